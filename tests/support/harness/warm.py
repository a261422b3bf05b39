# SPDX-License-Identifier: Apache-2.0
"""A Python that has already imported everything: programs that it forks start in seconds instead of
half a minute.

    with WarmPython("a.module.that.imports", folder) as python:
        process = python.start(["-m", "serving", "serve"], environ, output=log)

A forked process runs a program with its arguments, variables, working folder and output, in a new
session, under its usual name. Its `sys.executable` is also warm: it forks the programs that the
module names, and runs others by the ordinary Python.

Two rules, or a fork hangs: no import leaves a thread behind or computes with torch. All forked
programs share the variables that libraries read at their import.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Self

import setproctitle

ROOT = Path(__file__).parents[3]
IMPORT_S = 300.0  # far above the usual time of the import, for busy machines
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A line with #! takes no path with a space. The first line is a command for sh, and a string for
# Python.
EXECUTABLE = """#!/bin/sh
'''exec' '{python}' -Es "$0" "$@"
' '''
import sys
sys.path.insert(0, {root!r})
from tests.support.harness import warm
warm.run_elsewhere({address!r}, {programs!r})
"""


spent_s = 0.0
"""CPU time of the forked processes of this process that have ended, and of those that they have
waited for, in seconds.
"""


class NotWarm(Exception):
    """A warm Python that has ended, or did not start."""


class Forked:
    """A process that a warm Python has forked, with the parts of subprocess.Popen that harnesses
    use.

    It is killed when the process that has this object ends.
    """

    def __init__(
        self,
        address: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        folder: str,
        files: Sequence[int],
    ) -> None:
        """files: the descriptors of standard input, output and errors. Raises NotWarm."""
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(IMPORT_S)
        self._answers = self._connection.makefile()
        request = json.dumps([[*arguments], dict(environ), folder])
        try:
            self._connection.connect(address)
            socket.send_fds(self._connection, [b"x"], files)
            self._connection.sendall(f"{request}\n".encode())
            self.pid = int(self._answers.readline())
        except (OSError, ValueError) as error:
            self._close()
            raise NotWarm(f"{address}: {error}") from error

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            answer = ""
            with contextlib.suppress(OSError):
                answer = self._answers.readline()
            self._close()
            # A warm Python that ends without an answer takes its forked processes along.
            code, cpu_s = answer.split() if answer else (-signal.SIGKILL, 0)
            self.returncode = int(code)
            global spent_s
            spent_s += float(cpu_s)
        return self.returncode

    def _close(self) -> None:
        self._answers.close()
        self._connection.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """The process that forks others. It ends with the process that starts it. Other processes
    may also use it.

    prepared: the module to import, which takes most of the time; None for a warm Python that
    another process has started. Its PROGRAMS are the first arguments of the programs that forked
    processes may fork in turn. Every forked process calls its forked() with its arguments before it
    runs. folder: for sockets; its path must be short.
    """

    _process: "subprocess.Popen[bytes] | None" = None

    def __init__(self, prepared: str | None, folder: Path) -> None:
        self.folder = folder
        self._address = folder / "python"
        self._log = folder / "log"
        if not prepared:
            return
        command = [sys.executable, "-m", "tests.support.harness.warm"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, prepared, str(self._address), str(os.getpid())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        folder: Path = ROOT,
        output: IO[bytes] | None = None,
    ) -> Forked:
        """Fork a process that runs a program; arguments are those of `python`. Raises NotWarm."""
        self._imported()
        with Path(os.devnull).open("rb") as nothing:
            outputs = [output.fileno()] * 2 if output else [1, 2]
            files = [nothing.fileno(), *outputs]
            return Forked(str(self._address), arguments, environ, str(folder), files)

    def executable(self, *programs: Sequence[str]) -> str:
        """A `python` executable for other programs. programs: as in PROGRAMS. Raises NotWarm."""
        self._imported()
        return _executable(str(self._address), programs)

    def _imported(self) -> None:
        deadline = time.monotonic() + IMPORT_S
        while not self._address.exists():
            ended = self._process and self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise NotWarm(self._log.read_text(errors="replace")[-2000:])
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()


def run_elsewhere(address: str, programs: Sequence[Sequence[str]]) -> None:
    """Be the executable of a forked process: `python`, which forks the listed programs.

    This process represents the forked one: it passes signals on, ends with it, and takes it along
    when it is killed.
    """
    arguments = sys.argv[1:]
    ordinary = [sys.executable, *arguments]
    if not any(arguments[: len(it)] == [*it] for it in programs):
        os.execv(ordinary[0], ordinary)
    try:
        forked = Forked(address, arguments, os.environ, str(Path.cwd()), (0, 1, 2))
    except NotWarm:
        os.execv(ordinary[0], ordinary)

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(forked.pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # entrypoint.sh blocks some of them
    setproctitle.setproctitle(f"warm python: stands for {forked.pid}")
    code = forked.wait()
    if code < 0:
        with contextlib.suppress(OSError):  # also for SIGKILL, which has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


class _Request(NamedTuple):
    arguments: list[str]
    environ: dict[str, str]
    folder: str
    files: list[int]


class _Child(NamedTuple):
    pid: int
    ended: int  # becomes readable at its end
    asked_by: socket.socket


def main(prepared: str, address: str, parent: int) -> None:
    """Be a warm Python. Returns in the forked processes, after they have run their programs."""
    from serving.process import end_with_parent

    end_with_parent(signal.SIGKILL, parent)
    gc.disable()  # it would scan the imported objects again and again
    module = importlib.import_module(prepared)
    gc.collect()
    gc.freeze()  # no collection touches shared pages, which would copy them
    gc.enable()
    request = _fork_for_each(_listening(address))
    # The programs that this process starts are forked from its present state, not from a later one.
    ours, inner = os.getpid(), f"{address}-{os.getpid()}"
    listener = _listening(inner)
    if os.fork():
        listener.close()
        sys.executable = _executable(inner, module.PROGRAMS)
    else:
        end_with_parent(signal.SIGKILL, ours)
        os.setsid()
        for file in request.files:
            os.close(file)
        request = _fork_for_each(listener)
    _become(request)
    module.forked(request.arguments)
    _run(request.arguments)


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + "~")
    listener.listen()
    Path(address + "~").rename(address)  # any process that sees it can connect
    return listener


def _executable(address: str, programs: Sequence[Sequence[str]]) -> str:
    file = Path(f"{address}-client-{os.getpid()}")  # several processes use one warm Python
    values = {"root": str(ROOT), "address": address, "programs": programs}
    file.write_text(EXECUTABLE.format(python=sys.executable, **values))
    file.chmod(0o755)
    return str(file)


def _fork_for_each(listener: socket.socket) -> _Request:
    """Fork a process for each request, and answer with its number, and then with its exit code and
    CPU time. Returns in the forked processes only.
    """
    from serving.process import end_with_parent

    setproctitle.setproctitle("warm python")
    ours = os.getpid()
    children: set[_Child] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            key, _ = selector.select()[0]
            if key.fileobj is listener:
                asked_by, _ = listener.accept()
                try:
                    request = _read(asked_by)
                except (OSError, ValueError):  # the client has gone
                    asked_by.close()
                    continue
                pid = os.fork()
                if not pid:
                    end_with_parent(signal.SIGKILL, ours)
                    break
                for file in request.files:
                    os.close(file)
                child = _Child(pid, os.pidfd_open(pid), asked_by)
                children.add(child)
                selector.register(child.ended, selectors.EVENT_READ, child)
                selector.register(asked_by, selectors.EVENT_READ, child)
                with contextlib.suppress(OSError):
                    asked_by.sendall(f"{pid}\n".encode())
            elif key.fileobj is key.data.asked_by:  # its client is gone
                selector.unregister(key.data.asked_by)
                signal.pidfd_send_signal(key.data.ended, signal.SIGKILL)
            else:
                child = key.data
                children.remove(child)
                selector.unregister(child.ended)
                with contextlib.suppress(KeyError):
                    selector.unregister(child.asked_by)
                _, status, usage = os.wait4(child.pid, 0)
                code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
                with contextlib.suppress(OSError):
                    child.asked_by.sendall(f"{code} {cpu_s}\n".encode())
                child.asked_by.close()
                os.close(child.ended)
    for child in children:
        child.asked_by.close()
        os.close(child.ended)
    asked_by.close()
    listener.close()
    return request


def _read(asked_by: socket.socket) -> _Request:
    _, files, _, _ = socket.recv_fds(asked_by, 1, 3)
    with asked_by.makefile() as lines:
        arguments, environ, folder = json.loads(lines.readline())
    return _Request(arguments, environ, folder, files)


def _become(request: _Request) -> None:
    """Set the working folder, variables and files of a program that starts."""
    os.setsid()
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lives
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environ)
    setproctitle.setproctitle(" ".join(["python", *request.arguments]))


def _run(arguments: Sequence[str]) -> None:
    """Run a program as `python` does: -m and a module, or a file, and its arguments. -P has no
    effect here, because the path of modules is already set.
    """
    if arguments[0] == "-P":
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
