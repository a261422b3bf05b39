# SPDX-License-Identifier: Apache-2.0
"""A server in a separate process: the one supervisor of tests, benchmarks and chaos."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import httpx
import psutil

from tests.support.harness import ports
from tests.support.harness.warm import Forked, NotWarm, WarmPython

ROOT = Path(__file__).parents[3]
SERVE = ("./entrypoint.sh", "serve")
ROUTE = ("./entrypoint.sh", "route")
PYTHON_SERVES = (sys.executable, "-m", "serving", "serve")
"""The command that entrypoint.sh runs, for a Forkable."""
AS_ENTRYPOINT_SH = MappingProxyType({"DO_NOT_TRACK": "1", "PYTHONPATH": str(ROOT)})
START_S = 500.0  # far above the usual time of a start, for busy machines
STOP_S = 40.0  # above the 30 s after which platforms kill


NOTHING: Mapping[str, str] = MappingProxyType({})


class NotReady(Exception):
    """A server that has ended, or is still starting, when it should answer."""


class Program:
    """A program that serves HTTP on a port, which it keeps over restarts.

    command, environ: `{port}` in them becomes the port. environ is set in addition to our own
    variables and OPTION_PORT. log: the file for its output; None for our own output. root: the
    checkout to run from. port: a fixed port; None for a free one. health: the path that says
    whether it is ready.
    """

    process: "subprocess.Popen[bytes] | Forked"

    def __init__(
        self,
        *command: str,
        environ: Mapping[str, str] = NOTHING,
        log: Path | None = None,
        root: Path = ROOT,
        port: int | None = None,
        health: str = "/ping",
    ) -> None:
        self._health = health
        self.port = port or ports.free()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        if log:
            log.write_bytes(b"")
        self._command = [part.replace("{port}", str(self.port)) for part in command]
        own = {"OPTION_PORT": "{port}", "SLIPWAY_PYTHON": sys.executable, **environ}
        own = {name: value.replace("{port}", str(self.port)) for name, value in own.items()}
        self._environ = {**os.environ, **own}
        self._root = root
        self._seen: set[psutil.Process] = set()

    def start(self) -> None:
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(self.log.open("ab")) if self.log else None
            self.process = subprocess.Popen(
                self._command,
                env=self._environ,
                cwd=self._root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # as a shell does it: our Ctrl-C is not for it
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self.end()

    def ready(self, seconds: float = START_S) -> None:
        """Wait until its `health` is 200. Raises NotReady."""
        deadline = time.monotonic() + seconds
        with httpx.Client(base_url=self.url, timeout=10, verify=False) as client:
            while self.process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(self._health).status_code == 200:
                        self.children()
                        return
                time.sleep(0.1)
        ended = self.process.poll()
        why = (
            f"not ready within {seconds:g} s" if ended is None else f"ended with exit code {ended}"
        )
        raise NotReady(f"{' '.join(self._command)}: {why}\n{self.logged()[-5000:]}")

    def ready_replicas(self) -> int:
        """How many copies of this server, or servers of this router, are ready."""
        rows = httpx.get(f"{self.url}/replicas", timeout=60).json()["replicas"]
        return sum(row["state"] == "ready" for row in rows)

    def listens(self) -> bool:
        """Whether it accepts connections. For programs that do not speak HTTP."""
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def logged(self) -> str:
        return self.log.read_text(errors="replace") if self.log else ""

    @property
    def own(self) -> psutil.Process:
        """The program's process. Raises psutil.NoSuchProcess."""
        return psutil.Process(self.process.pid)

    def children(self, name: str = "") -> list[psutil.Process]:
        """Its living processes with this text in their command line, like VLLM::Worker."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in self.own.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if running(child) and name in " ".join(child.cmdline()):
                        found.append(child)
                    self._seen.add(child)
        return found

    def left_behind(self, seconds: float = 5) -> list[psutil.Process]:
        """Its processes that survive it, once they have had a moment to end."""
        # The number of an ended process may be a thread's by now, and psutil cannot wait for that.
        seen = [child for child in self._seen if running(child)]
        _, alive = psutil.wait_procs(seen, timeout=seconds)
        return [child for child in alive if running(child)]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send this signal to the program, and not to its children."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def stop(self, seconds: float = STOP_S) -> int:
        """Ask it to stop. Returns its exit code. Raises subprocess.TimeoutExpired."""
        self.children()
        self.process.terminate()
        return self.process.wait(seconds)

    def end(self) -> None:
        """Kill it with all its children, as a container's end does."""
        self.children()
        self.kill()
        for child in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


class Forkable(Program):
    """A program that is forked from a warm Python if our own Python runs it.

    python: returns the warm Python, called when it is needed. Without it, the program starts as any
    other.
    """

    log: Path

    def __init__(self, *command: str, python: Callable[[], WarmPython], **more: Any) -> None:
        super().__init__(*command, **more)
        self._python = python

    def start(self) -> None:
        program, *arguments = self._command
        if program == sys.executable:
            try:
                with self.log.open("ab") as output:
                    self.process = self._python().start(arguments, self._environ, output=output)
                return
            except NotWarm as error:
                sys.stderr.write(f"the server starts in the ordinary way: {error}\n")
        super().start()


def running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """The CPU time that these processes have used, to the nanosecond: /proc counts in steps of 10
    ms.

    clock_getcpuclockid(3) computes the number of a process's clock in the same way.
    """
    return sum(time.clock_gettime(~process.pid << 3 | 2) for process in processes)
