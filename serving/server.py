"""`serve`, from the first byte to the exit code: HTTP at once, the engine when it is there, an end
that loses no request it could have answered.
"""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from importlib.metadata import version
from typing import Any

import psutil
import uvicorn
import uvloop
from prometheus_client import Gauge, Info

from lmi_config import explain
from lmi_config.machine import out_of_memory_kills
from lmi_config.options import Settings
from serving import VERSION, logs
from serving.app import create_app
from serving.engine import Engine, EngineError, Note
from serving.invocations import Front
from serving.last_words import Ending, memory_ran_out, root_cause
from serving.lifecycle import DIED, DRAIN_S, START_FAILED, Lifecycle, Stage
from serving.prepare import Prepared
from serving.start import start

log = logging.getLogger(__name__)

FAREWELL_S = 1.0  # for answers to be written once their requests have been ended
STOP_S = 3.5  # for the engine's processes to end by themselves
KEEP_ALIVE_S = 75  # longer than the 60 s after which load balancers drop an idle connection
WATCH_S = 0.25  # how often the engine is asked whether it lives
SETTLE_S = 0.2  # for the last lines of processes that have died to be read
BLAMED_S = 60.0  # how long before its end an engine may have told why
REAP_S = 10.0  # far longer than it takes to wait for a child of one's own that has ended

_START_SECONDS = Gauge("slipway_start_seconds", "How long each step of the start took.", ["step"])
_BUILD = Info("slipway_build", "What is running here.")

Start = Callable[[Note], Coroutine[Any, Any, Engine]]


def serve(prepared: Prepared) -> Ending:
    """Serve until SIGTERM or SIGINT, or until something has failed.

    A thread may still be inside vLLM when this returns; the caller should end the process at once.
    """
    settings = prepared.plan.settings
    try:
        listener = socket.create_server(("0.0.0.0", settings.port), backlog=2048)
    except OSError as error:
        reason = f"cannot listen on port {settings.port}: {error.strerror}"
        return Ending(START_FAILED, "start", reason)
    for finding in prepared.plan.findings:
        log.warning("%s", finding)
    log.info("plan", extra={"facts": {"plan": explain.as_json(prepared.plan)}})
    _adopt_orphans()
    # vLLM leaves the sockets it talks to its processes over where it has put them.
    with listener, tempfile.TemporaryDirectory(prefix="slipway-") as sockets:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", sockets)
        server = Server(listener, settings, lambda note: start(prepared, note))
        try:
            uvloop.run(server.run())
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # it ends already
            for child in psutil.Process().children(recursive=True):
                child.kill()
        return server.ending


def _adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, as PID 1 of a container is anyway.

    When vLLM's engine core is killed, its workers take seconds to notice; only their parent can
    still find them.
    """
    pr_set_child_subreaper = 36  # prctl(2)
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


async def _reap() -> None:
    """Wait for adopted children that have ended: nobody else does, and each keeps its number.

    Who starts a child waits for it when it ends; multiprocessing does so when it is asked. So what
    has ended and is still there a round later is adopted.
    """
    before: set[psutil.Process] = set()
    while True:
        await asyncio.sleep(REAP_S)
        multiprocessing.active_children()
        ended = {child for child in psutil.Process().children() if _has_ended(child)}
        for child in ended & before:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
        before = ended


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server:
    """One server's parts and its course."""

    def __init__(self, listener: socket.socket, settings: Settings, start: Start) -> None:
        self._listener = listener
        self._settings = settings
        self._start = start
        self.lifecycle = Lifecycle()
        self.ending = Ending(0, "start", "")
        self._killed = out_of_memory_kills()
        self.front = Front(self.lifecycle, settings)
        _BUILD.info({"version": VERSION, **{name: version(name) for name in ("vllm", "lmcache")}})
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._http = _Http(
            uvicorn.Config(
                create_app(self.front),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(FAREWELL_S),
            )
        )

    async def run(self) -> int:
        """From listening to the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGUSR1, logs.shift_level, -1)
        loop.add_signal_handler(signal.SIGUSR2, logs.shift_level, 1)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        reaping = asyncio.create_task(_reap())
        log.info("listening", extra={"facts": {"port": self._listener.getsockname()[1]}})
        try:
            return await self._live()
        finally:
            self._http.should_exit = True
            await http
            reaping.cancel()

    def _on_signal(self) -> None:
        """The first signal asks to stop, a second one not to wait for requests."""
        (self._hurried if self._asked.is_set() else self._asked).set()

    async def _live(self) -> int:
        stop = asyncio.create_task(self._asked.wait())
        starting = asyncio.create_task(self._start(self._note))
        timeout = self._settings.model_loading_timeout
        await asyncio.wait({starting, stop}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            if not stop.done():
                stop.cancel()
                doing = self.lifecycle.detail
                reason = f"not ready after {timeout} s (OPTION_MODEL_LOADING_TIMEOUT): {doing}"
                return await self._failed("start", reason, START_FAILED)
            self.lifecycle.enter(Stage.STOPPED)
            return 0
        try:
            engine = starting.result()
        except EngineError as error:
            log.error("the engine did not start", exc_info=error.__cause__)
            return await self._failed("start", str(error), START_FAILED)
        self.front.engine = engine
        self.lifecycle.enter(Stage.READY)
        self.front.error_rates.clear()  # of requests that came too early
        log.info("ready", extra={"facts": self._time_to_ready()})

        failing = asyncio.create_task(self._failure(engine))
        await asyncio.wait({failing, stop}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            code = await self._failed("serving", failing.result(), DIED)
            await self.front.drained(FAREWELL_S)  # vLLM ends the requests of a dead engine itself
        else:
            code = await self._drain(failing)
        failing.cancel()
        await self._stop(engine)
        return code

    async def _failure(self, engine: Engine) -> str:
        """Wait until the engine has died, or fails too often; say why."""
        while True:
            if failure := engine.failure:
                return failure
            if self._settings.fail_fast and (failure := self.front.error_rates.exceeded()):
                return f"{failure}, and SERVING_FAIL_FAST is set"
            await asyncio.sleep(WATCH_S)

    async def _drain(self, failing: "asyncio.Task[str]") -> int:
        self.lifecycle.enter(Stage.DRAINING)
        self.ending = Ending(0, "draining", "")
        log.info("draining")
        drained = asyncio.create_task(self.front.drained(DRAIN_S))
        hurried = asyncio.create_task(self._hurried.wait())
        await asyncio.wait({drained, hurried, failing}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if failing.done():
            return await self._failed("draining", failing.result(), DIED)
        if not drained.done() or not drained.result():
            log.warning("ending %d requests that did not finish in time", self.front.abort())
            await self.front.drained(FAREWELL_S)
        self.lifecycle.enter(Stage.STOPPED)
        return 0

    async def _stop(self, engine: Engine) -> None:
        try:
            await asyncio.wait_for(engine.stop(), STOP_S)
        except TimeoutError:
            log.warning("the engine did not stop in time; its processes are killed")

    async def _failed(self, stage: str, reason: str, code: int) -> int:
        self.lifecycle.enter(Stage.FAILED, reason)
        await asyncio.sleep(SETTLE_S)
        reason = root_cause(reason, logs.causes(BLAMED_S)) + memory_ran_out(self._killed)
        self.ending = Ending(code, stage, reason)
        return code

    def _time_to_ready(self) -> dict[str, object]:
        """How long the start took, by its steps, in seconds; also as a series."""
        before = time.time() - psutil.Process().create_time() - self.lifecycle.elapsed
        steps = {"planning": before, **self.lifecycle.steps}
        for step, seconds in steps.items():
            _START_SECONDS.labels(step).set(seconds)
        told = {step: round(seconds, 1) for step, seconds in steps.items()}
        return {"elapsed_s": round(sum(steps.values()), 1), "steps": told}

    def _note(self, detail: str) -> None:
        self.lifecycle.note(detail)
        log.info(detail, extra={"facts": {"elapsed_s": round(self.lifecycle.elapsed, 1)}})


class _Http(uvicorn.Server):
    """Uvicorn that leaves signals to us: it would stop listening at once and wait without end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
