# SPDX-License-Identifier: Apache-2.0
"""The life of a container whose servers are children of one process behind a router: copies of one
model, or several models. From the first connection to the end.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from lmi_config.facts.machine import out_of_memory_kills
from lmi_config.options.declared import Settings
from lmi_config.options.option_files import Given
from serving import process
from serving.copies import divided
from serving.copies.child import Child
from serving.copies.part import RouterPart
from serving.engine.base import EngineError
from serving.exit import DIED, START_FAILED, Exit, memory_ran_out
from serving.follow import kept
from serving.http.sockets import CannotListen, bound, raise_open_files
from serving.lifecycle import SHUTDOWN
from serving.process import StopSignals

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-P", "-m", "serving.copies")
"""The command line of a child."""
RESTART_S = 1.0
"""Seconds before the restart of a child that has ended."""
STEADY_S = 60.0
QUICK_ENDS = 5
"""A child is not started again after this number of ends in a row within STEADY_S."""
ROUTER_S = SHUTDOWN.drain + SHUTDOWN.farewell + 0.3
"""Seconds after which a stopping router has ended ..."""
SERVERS_S = SHUTDOWN.engine
"""... and seconds for the servers, which then have no requests."""

Tasks = list["asyncio.Task[None]"]


class Container(ABC):
    """A container's router and servers. A subclass has the servers."""

    def __init__(
        self,
        settings: Settings,
        argued: Mapping[str, Given],
        listener: socket.socket | None,
        folder: Path,
        program: Sequence[str],
    ) -> None:
        """listener: the public socket, which outlives the router. folder: the children's shared
        files. program: the command line of a child.
        """
        self._settings = settings
        self._argued = argued
        self._listener = listener
        self._folder = folder
        self._program = program
        self._secret = divided.secret(settings)
        self._began = time.monotonic()
        self._memory_kills = out_of_memory_kills()
        self._signals = StopSignals()
        self._stopping = False
        self._failed: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._router: Child | None = None
        self._servers: dict[int, Child] = {}

    @property
    @abstractmethod
    def _was_ready(self) -> bool:
        """Whether the container has been ready."""

    @abstractmethod
    async def _start(self) -> Tasks:
        """Start the tasks that keep the servers. Raises EngineError."""

    @abstractmethod
    def _router_part(self, report: int, listener: int | None) -> RouterPart:
        """Return the router's part. report, listener: descriptors."""

    @abstractmethod
    async def _close(self) -> None:
        """Stop what the servers used, after their end."""

    async def run(self) -> Exit:
        """Run from the first connection to the end."""
        self._signals.listen(signal.SIGTERM, signal.SIGINT)
        stop = asyncio.create_task(self._signals.stop())
        tasks = [
            asyncio.create_task(kept("processes", process.reap)),
            asyncio.create_task(self._keep_router()),
        ]
        tasks[1].add_done_callback(self._on_done)
        starting = asyncio.create_task(self._start())
        try:
            await _first(stop, self._failed, starting)
            if starting.done() and not (stop.done() or self._failed.done()):
                tasks += starting.result()
                await _first(stop, self._failed)
        except EngineError as error:
            self._failed.set_result(Exit(START_FAILED, "start", str(error)))
        if self._failed.done():
            end = self._failed.result()
            reason = end.reason + memory_ran_out(self._memory_kills)
            end = end._replace(reason=reason)
        else:
            end = Exit(0, "draining" if self._was_ready else "start")
        await self._stop(starting, drains=not self._failed.done())
        for task in [*tasks, stop, starting]:
            task.cancel()
        await asyncio.gather(*tasks, stop, starting, return_exceptions=True)
        return end

    def _keep_running(self, works: Sequence[Coroutine[Any, Any, None]]) -> Tasks:
        """Start tasks whose failure ends the container."""
        tasks = [asyncio.create_task(work) for work in works]
        for task in tasks:
            task.add_done_callback(self._on_done)
        return tasks

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        """A task that keeps or watches children has failed: an internal error."""
        if not task.cancelled() and (error := task.exception()):
            log.error("an error of Slipway's own", exc_info=error)
            self._fail(Exit(DIED, "unforeseen", f"{type(error).__name__}: {error}"))

    def _fail(self, end: Exit) -> None:
        if not self._failed.done() and not self._stopping:
            self._failed.set_result(end)

    # the router

    async def _keep_router(self) -> None:
        """Keep the router running. During a restart, connections wait in its socket."""
        quick = 0
        while not self._stopping:
            began = time.monotonic()
            self._router = await self._start_router()
            end = await self._router.ended()
            self._router = None
            if self._stopping:
                return
            quick = quick + 1 if time.monotonic() - began < STEADY_S else 1
            if end.stage in ("options", "start") or quick == QUICK_ENDS:
                reason = f"the router: {end.reason or 'it ended'}"
                self._fail(Exit(exit_code(end, DIED), end.stage, reason))
                return
            log.error("the router has ended, and is started again: %s", end.reason)
            await asyncio.sleep(RESTART_S)

    async def _start_router(self) -> Child:
        report = os.pipe()
        listener = self._listener.fileno() if self._listener else None
        part = self._router_part(report[1], listener)
        more = () if listener is None else (listener,)
        return await Child.start(self._program, part, report, self._secrets, more)

    @property
    def _secrets(self) -> dict[str, str]:
        return {"OPTION_ROUTER_SECRET": self._secret}

    # the end

    async def _stop(self, starting: "asyncio.Task[Any]", *, drains: bool) -> None:
        """Stop the router first, because stopping servers would refuse its requests. Then stop the
        servers, and last the processes that they use.
        """
        self._stopping = True
        starting.cancel()
        if drains and self._was_ready:
            log.info("draining", extra={"text": "stopping once requests in flight are answered"})
        if router := self._router:
            router.ask()
            hurry = asyncio.create_task(self._hurry(router))
            if not drains:
                router.ask()
            await gone(lambda: self._router is None, ROUTER_S)
            hurry.cancel()
            router.kill()
        for child in self._servers.values():
            child.ask()
        await gone(lambda: not self._servers, SERVERS_S)
        for child in self._servers.values():
            child.kill()
        await gone(lambda: not self._servers, 1.0)
        await self._close()

    async def _hurry(self, router: Child) -> None:
        await self._signals.hurry()
        router.ask()


Live = Callable[[socket.socket | None, Path], Coroutine[Any, Any, Exit]]


def live(settings: Settings, life: Live) -> Exit:
    """Live until SIGTERM or SIGINT, or until a failure. life: from a public socket, if the router
    has one process, and a folder for the children's shared files.
    """
    raise_open_files()
    try:
        listener = None
        if settings.router_processes == 1:
            listener = bound(settings.host, settings.port, backlog=2048)
    except CannotListen as error:
        return Exit(START_FAILED, "start", str(error))
    process.adopt_orphans()
    with divided.folder() as folder, listener or contextlib.nullcontext():
        try:
            return asyncio.run(life(listener, Path(folder)))
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # it ends already
            process.kill(psutil.Process().children(recursive=True))


async def gone(is_gone: Callable[[], bool], seconds: float) -> bool:
    """Wait until something is gone, for a maximum time in seconds. Whether it is."""
    until = time.monotonic() + seconds
    while not is_gone() and time.monotonic() < until:
        await asyncio.sleep(0.02)
    return is_gone()


def exit_code(end: Exit, otherwise: int) -> int:
    """The container's exit code after a child's end. otherwise: after an end without a fault, or by
    a signal, whose negative number is no exit code.
    """
    return end.code if end.code > 0 else otherwise


async def _first(*waited: "asyncio.Future[Any]") -> None:
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
