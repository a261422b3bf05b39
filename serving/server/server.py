# SPDX-License-Identifier: Apache-2.0
"""`serve`, from listening to the exit code. HTTP is available at once, and the engine later. A
drain loses no request that could have been answered.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from importlib.metadata import version
from typing import Any

import psutil
import uvloop
from prometheus_client import Gauge, Info

from lmi_config.facts.machine import out_of_memory_kills
from lmi_config.options.declared import Settings
from lmi_config.plan import explain
from serving import VERSION, process
from serving.access.access import Access
from serving.api.app import create_app
from serving.api.backend import NO_PLAN, Backend
from serving.batch.objects import OtherCopies
from serving.engine.base import Engine, EngineError
from serving.exit import DIED, START_FAILED, Exit, memory_ran_out, root_cause
from serving.follow import kept
from serving.http.connections import HttpServer
from serving.http.sockets import (
    CannotListen,
    bound,
    local_url,
    most_connections,
    raise_open_files,
)
from serving.http.tls import ServerTls
from serving.inference.admission import Admission
from serving.lifecycle import SHUTDOWN, Lifecycle, Note, Stage, Step
from serving.observability.capture import causes
from serving.process import StopSignals, return_freed_memory
from serving.protocol import INVOCATIONS, PING, UI
from serving.server import start_phases
from serving.server.orders import obey
from serving.server.prepare import LOOPBACK, Deployment
from serving.server.startup import Runtime, start

log = logging.getLogger(__name__)

KILLED_S = 1.0
"""Maximum wait for each killed process of the engine, in seconds."""
WATCH_S = 0.25
"""Seconds between two checks of the engine."""
BLAMED_S = 60.0
"""An engine's error may be the cause of its end if it was at most this many seconds earlier."""

_START_SECONDS = Gauge("slipway_start_seconds", "How long each step of the start took.", ["step"])
_BUILD = Info("slipway_build", "What is running here.")
_TENANTS = Info("slipway_tenants", "By which header tenants are told apart.")
_ROLE = Info("slipway_role", "What a router has this server do.")

LARGE = 256 * 1024
"""Bytes of a block that goes back to the kernel when it is freed. Large bodies take such blocks,
most requests do not.
"""

Start = Callable[[Note], Coroutine[Any, Any, Runtime]]


def serve(deployment: Deployment, warm: bool = False, orders: socket.socket | None = None) -> Exit:
    """Serve until SIGTERM, SIGINT or a failure. Returns the end of the process. warm: stop once
    the server is ready. orders: as Server has it.

    A thread may still be inside vLLM when this returns; the caller should end the process at once.
    """
    settings = deployment.plan.settings
    raise_open_files()
    return_freed_memory(LARGE)
    try:
        host = LOOPBACK if deployment.shared else settings.host
        listener = bound(host, settings.port, backlog=2048)
    except CannotListen as error:
        return Exit(START_FAILED, "start", str(error))
    for finding in deployment.plan.findings:
        log.warning("%s", finding)
    _, size, model = next(explain.rows(deployment.plan))
    facts = {"plan": explain.as_json(deployment.plan)}
    log.info("plan", extra={"facts": facts, "text": f"model: {model}, {size}"})
    process.adopt_orphans()
    start_phases.follow()
    # vLLM does not remove the sockets to its processes.
    with listener, tempfile.TemporaryDirectory(prefix="slipway-") as sockets:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", sockets)
        about = explain.summary(deployment.plan)
        others = deployment.shared.others if deployment.shared else None
        server = Server(
            *(listener, settings, lambda note: start(deployment, note), about, others, warm, orders)
        )
        try:
            return uvloop.run(server.run())
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # the process is already ending
            process.kill(psutil.Process().children(recursive=True))
            for it in multiprocessing.active_children():  # memory and devices are free after it
                it.join(KILLED_S)


class Server:
    """A server, from its start to its end: it listens, starts, serves, drains and ends."""

    def __init__(
        self,
        listener: socket.socket,
        settings: Settings,
        start: Start,
        plan: Mapping[str, Any] = NO_PLAN,
        others: OtherCopies | None = None,
        warm: bool = False,
        orders: socket.socket | None = None,
    ) -> None:
        """start: starts the engine or handler, and notes its current step meanwhile. plan: as the
        page at /ui shows it. others: as Backend has it. warm: whether the server stops once it is
        ready. orders: where the supervisor of several models gives its orders.
        """
        self._warm = warm
        self._orders = orders
        self._listener = listener
        self._settings = settings
        self._start = start
        self.lifecycle = Lifecycle()
        self._memory_kills = out_of_memory_kills()
        self.backend = Backend(self.lifecycle, settings, plan, others)
        _BUILD.info({"version": VERSION, **{name: version(name) for name in ("vllm", "lmcache")}})
        _TENANTS.info({"header": (settings.cache_salt_header or "").lower()})
        _ROLE.info({"role": settings.server_role})
        self._signals = StopSignals()
        self._access = Access(settings)
        most = most_connections(settings.job_queue_size)
        app = create_app(self.backend, settings, self._access)
        self._tls = ServerTls(settings)
        self._http = HttpServer(app, most, SHUTDOWN.connections, self._tls)

    async def run(self) -> Exit:
        """Serve. Returns the end of the process."""
        self._signals.listen(signal.SIGTERM, signal.SIGINT)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        works = (
            kept("processes", process.reap),
            kept("memory", process.return_heaps),
            self._access.follow(),
            self._tls.follow(),
        )
        tasks = [asyncio.create_task(work) for work in works]
        host, port = self._listener.getsockname()[:2]
        path = UI if self._settings.serves_ui else PING
        text = f"listening on {local_url(host, port)}; {path} shows progress"
        log.info("listening", extra={"facts": {"host": host, "port": port}, "text": text})
        try:
            return await self._live()
        finally:
            self._http.should_exit = True
            await http
            await self.backend.limiter.close()
            if self.backend.tracer:
                await self.backend.tracer.stop()
            for task in tasks:
                task.cancel()

    def stop(self) -> None:
        """Stop; a second call ends the drain."""
        self._signals.ask()

    async def _live(self) -> Exit:
        stop = asyncio.create_task(self._signals.stop())
        runtime = await self._start_up(stop)
        if isinstance(runtime, Exit):
            stop.cancel()
            return runtime
        parts = runtime.engine, runtime.adapters, runtime.code
        requests = self.backend.open(*parts, runtime.gpus, runtime.tiers).admission
        facts = self._time_to_ready()
        text = f"ready after {facts['elapsed_s']} s. Try:\n\n{self._to_try()}\n"
        log.info("ready", extra={"facts": facts, "text": text, "busy": False})
        failure = asyncio.create_task(self._failure(runtime.engine))
        following = asyncio.create_task(kept("adapters", runtime.follow))
        obeying = asyncio.create_task(self._obey(runtime.engine))
        saving = asyncio.create_task(runtime.save())
        if self._warm:
            await saving
            self.stop()
        batches = self.backend.files.runner
        running = {asyncio.create_task(kept("batches", batches.run))} if batches else set()
        await asyncio.wait({failure, stop}, return_when=asyncio.FIRST_COMPLETED)
        if batches:
            running.add(asyncio.create_task(batches.stop()))
        if failure.done():
            end = await self._fail(DIED, "serving", failure.result())
            # vLLM ends the requests of a dead engine itself.
            await requests.drained(SHUTDOWN.farewell)
        else:
            end = await self._drain(requests, failure)
        failure.cancel()
        following.cancel()
        obeying.cancel()
        saving.cancel()
        if running:
            await asyncio.wait(running, timeout=SHUTDOWN.farewell)
        try:
            async with asyncio.timeout(SHUTDOWN.engine):
                await runtime.stop()
        except TimeoutError:
            log.warning("the engine did not stop in time; its processes are killed")
        return end

    async def _obey(self, engine: Engine) -> None:
        if orders := self._orders:
            await kept("models", lambda: obey(orders, engine))

    async def _start_up(self, stop: asyncio.Task[None]) -> Runtime | Exit:
        """Start the engine. Returns the runtime, or the end of the process if the start failed."""
        starting = asyncio.create_task(self._start(self._note))
        timeout = self._settings.model_loading_timeout
        await asyncio.wait({starting, stop}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            try:
                return starting.result()
            except EngineError as error:
                log.error("the engine did not start", exc_info=error.__cause__)
                return await self._fail(START_FAILED, "start", str(error))
        starting.cancel()
        if stop.done():
            self.lifecycle.enter(Stage.STOPPED)
            return Exit(0, "start")
        detail = self.lifecycle.detail
        reason = f"not ready after {timeout} s (OPTION_MODEL_LOADING_TIMEOUT): {detail}"
        return await self._fail(START_FAILED, "start", reason)

    async def _failure(self, engine: Engine) -> str:
        """Wait until the engine has died, or requests fail too often. Returns the reason."""
        while True:
            if failure := engine.failure:
                return failure
            if self._settings.fail_fast and (failure := self.backend.error_rates.exceeded()):
                return f"{failure}, and SERVING_FAIL_FAST is set"
            await asyncio.sleep(WATCH_S)

    async def _drain(self, requests: Admission, failure: asyncio.Task[str]) -> Exit:
        """Let requests in flight finish, and accept no new ones. failure: waits for the engine's
        failure. Returns the end of the process.
        """
        self.lifecycle.enter(Stage.DRAINING)
        text = "stopping once requests in flight are answered; Ctrl-C again does not wait for them"
        log.info("draining", extra={"text": text})
        drained = asyncio.create_task(requests.drained(SHUTDOWN.drain))
        hurry = asyncio.create_task(self._signals.hurry())
        await asyncio.wait({drained, hurry, failure}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if failure.done():
            return await self._fail(DIED, "draining", failure.result())
        if not drained.done() or not drained.result():
            log.warning("ending %d requests that did not finish in time", requests.abort())
            await requests.drained(SHUTDOWN.farewell)
        self.lifecycle.enter(Stage.STOPPED)
        return Exit(0, "draining")

    async def _fail(self, code: int, stage: str, reason: str) -> Exit:
        self.lifecycle.enter(Stage.FAILED, reason)
        await asyncio.sleep(SHUTDOWN.settle)
        cause = root_cause(reason, causes(BLAMED_S))
        return Exit(code, stage, cause + memory_ran_out(self._memory_kills))

    def _time_to_ready(self) -> dict[str, object]:
        """Return the seconds of the start and of its steps, and set their series."""
        before = time.time() - psutil.Process().create_time() - self.lifecycle.elapsed
        steps = {Step.PLANNING: before, **self.lifecycle.steps}
        for step, seconds in steps.items():
            _START_SECONDS.labels(step).set(seconds)
        facts: dict[str, object] = {"elapsed_s": round(sum(steps.values()), 1)}
        loading = start_phases.report(steps.get(Step.LOADING, 0.0))
        for name, parts in (("steps", steps), ("loading", loading)):
            facts[name] = {part: round(seconds, 1) for part, seconds in parts.items()}
        return facts

    def _note(self, step: Step, text: str = "") -> None:
        self.lifecycle.note(step, text)
        facts = {"elapsed_s": round(self.lifecycle.elapsed, 1)}
        text = self.lifecycle.detail
        log.info(text, extra={"facts": facts, "text": text, "busy": True})

    def _to_try(self) -> str:
        """Return a command that sends a request to the server, and the URL of its page."""
        url = local_url(*self._listener.getsockname()[:2])
        body = json.dumps({"inputs": "The capital of France is"})
        command = f"curl -s {url}{INVOCATIONS[0]} -d '{body}'"
        page = f"\n\nor open {url}{UI} in a browser." if self._settings.serves_ui else ""
        return command + page
