# SPDX-License-Identifier: Apache-2.0
"""Signals, and the processes below this one: what `serve`, `route` and `tune` share of a life."""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import IO

import psutil

from serving.observability import logs

REAP_S = 10.0
"""Between two rounds: far longer than it takes to wait for a child of one's own that has ended."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class StopSignals:
    """What signals ask a server for: the first one to stop, a second one not to wait for requests.

    SIGUSR1 and SIGUSR2 change the log's level.
    """

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def listen(self, *numbers: signal.Signals) -> None:
        """Handle the signals in the event loop that runs. numbers: those that ask to stop."""
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self.ask)
        loop.add_signal_handler(signal.SIGUSR1, logs.step_level, -1)
        loop.add_signal_handler(signal.SIGUSR2, logs.step_level, 1)

    def ask(self) -> None:
        """Ask as one more signal does."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def stop(self) -> None:
        """Wait until the server is asked to stop."""
        await self._stop.wait()

    async def hurry(self) -> None:
        """Wait until it is asked not to wait for requests."""
        await self._hurry.wait()


def keep_freed_memory(size: int) -> None:
    """Have the C library keep so many bytes that were freed, and take blocks up to as many from
    them. By its own measure (mallopt(3)) it gives 128 KiB at the end of its heap back to the kernel
    at once, which has to clear them when they are next wanted.
    """
    with contextlib.suppress(AttributeError):  # a C library without it
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(parameter, size)


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent ends.

    parent: its number, where it is known: then it is noticed that it has ended already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def begin(
    command: list[str], environ: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Begin a program that ends when this process does, and does not hear the terminal's Ctrl-C."""
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,
        preexec_fn=partial(end_with_parent, signal.SIGTERM, os.getpid()),
    )


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, as PID 1 of a container is anyway.

    When vLLM's engine core is killed, its workers take seconds to notice; only their parent can
    still find them.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


async def reap() -> None:
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


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill those that have not ended in the meantime."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_all_of(user: int) -> None:
    """Kill what a user of ours has started and left behind, in whatever session. It is below this
    process where adopt_orphans() was called. Blocks.
    """
    for _ in range(20):  # it may start more in the meantime
        below = psutil.Process().children(recursive=True)
        found = [it for it in below if _is_of(it, user)]
        if not found:
            return
        kill(found)
        time.sleep(0.05)


def _is_of(process: psutil.Process, user: int) -> bool:
    try:
        return process.uids().real == user and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
