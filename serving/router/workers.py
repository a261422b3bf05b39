# SPDX-License-Identifier: Apache-2.0
"""`route`: the processes of a router, one or several, on one port."""

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import time
from collections.abc import Mapping
from multiprocessing.context import ForkProcess

import uvloop

from lmi_config.options.declared import Settings
from serving.exit import DIED, START_FAILED, Exit
from serving.http.sockets import CannotListen, bound, raise_open_files
from serving.observability import logs
from serving.process import end_with_parent, keep_freed_memory
from serving.router.fleet.own_copies import OwnCopies
from serving.router.models.model_messages import Door
from serving.router.peers import links
from serving.router.router import Router

log = logging.getLogger(__name__)

FREED = 32 * 1024 * 1024
"""Bytes that bodies have taken and others will: without them one of 256 KB took up to a quarter
more CPU time. Once a minute return_heaps() returns them all the same, so that an idle router is
small: that costs the next bodies 15 ms together.
"""
LARGE = 1024 * 1024
"""Bytes of a block that goes back to the kernel when it is freed. Few bodies are this large."""
TLS_BUFFER = 256 * 1024
"""The same with TLS: bytes of uvloop's buffer for each connection, which is hardly ever full."""
RESTART_S = 1.0
"""Before a process that has died is started again."""
QUICK_S = 10.0
QUICK_ENDS = 5
"""A process that ends this many times in a row within QUICK_S of its start cannot run."""


def route(
    settings: Settings,
    environ: Mapping[str, str],
    listener: socket.socket | None = None,
    copies: OwnCopies | None = None,
    models: Door | None = None,
) -> Exit:
    """Route until SIGTERM or SIGINT, or until a process or the endpoint picker has failed.

    listener: a socket that already listens, for one process. copies, models: this container's
    copies or models, if it has any; several models need one process.
    """
    raise_open_files()  # a request takes two
    keep_freed_memory(FREED, TLS_BUFFER if settings.tls_cert_file else LARGE)
    try:
        listener = listener or bound(settings.host, settings.port, shared=True)
    except CannotListen as error:
        return Exit(START_FAILED, "start", str(error))
    with listener:
        if settings.router_processes == 1:
            try:
                router = Router(settings, environ, copies=copies, models=models)
                uvloop.run(router.run(listener))
                code = 0
            except CannotListen as error:  # an endpoint picker
                return Exit(START_FAILED, "start", str(error))
        else:
            code = Supervisor(settings, environ, listener.getsockname()[1], copies).run()
    return Exit(code, "routing", f"a router process ended with exit code {code}" if code else "")


class Worker:
    """One process of a router that has several."""

    def __init__(self, process: ForkProcess, quick_ends: int) -> None:
        """quick_ends: number of earlier processes in a row that have ended within QUICK_S."""
        self.process = process
        self._quick_ends = quick_ends
        process.start()
        self._began = time.monotonic()

    def quick_ends(self) -> int:
        """After its end: the number of processes in a row, up to this one, that have ended within
        QUICK_S.
        """
        quick = time.monotonic() - self._began < QUICK_S
        return self._quick_ends + 1 if quick else 0


class Supervisor:
    """Keeps several processes running; each listens on the port itself."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        port: int,
        copies: OwnCopies | None = None,
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._port = port
        self._copies = copies
        self._links = links(settings.router_processes)
        self._parent = os.getpid()
        self._workers: dict[int, Worker] = {}
        self._stopping = False

    def run(self) -> int:
        """Supervise until all have ended. Returns the exit code."""
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, self._on_signal)
        for number in range(self._settings.router_processes):
            self._start(number)
        code = 0
        while self._workers:
            processes = [worker.process for worker in self._workers.values()]
            multiprocessing.connection.wait([process.sentinel for process in processes])
            for number, worker in [*self._workers.items()]:
                if worker.process.exitcode is not None:
                    del self._workers[number]
                    code = max(code, self._on_end(number, worker, worker.process.exitcode))
        return code

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._stopping = True
        for worker in self._workers.values():
            worker.process.terminate()

    def _start(self, number: int, quick_ends: int = 0) -> None:
        forked = multiprocessing.get_context("fork")
        worker = Worker(forked.Process(target=self._work, args=(number,)), quick_ends)
        self._workers[number] = worker
        if self._stopping:  # a signal came in the meantime
            worker.process.terminate()

    def _on_end(self, number: int, worker: Worker, exitcode: int) -> int:
        """Start a process again, unless the router stops or the process cannot run. Returns a
        number to add to the router's exit code.
        """
        if self._stopping:
            return exitcode
        quick_ends = worker.quick_ends()
        if quick_ends == QUICK_ENDS:
            log.error(
                "a process ended %d times in a row within %g s: exit code %d",
                *(QUICK_ENDS, QUICK_S, exitcode),
            )
            self._stop()
            return DIED
        log.error("a process died, and is started again: exit code %d", exitcode)
        time.sleep(RESTART_S)
        if not self._stopping:
            self._start(number, quick_ends)
        return 0

    # in the process

    def _work(self, number: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the parent's, until it has its own
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent passes it on
        end_with_parent(signal.SIGTERM, self._parent)
        with bound(self._settings.host, self._port, shared=True) as listener:
            router = Router(self._settings, self._environ, self._links[number], self._copies)
            try:
                uvloop.run(router.run(listener))
            finally:
                logs.flush()
