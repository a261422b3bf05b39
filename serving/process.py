# SPDX-License-Identifier: Apache-2.0
"""Signals and child processes, for `serve`, `route` and `tune`."""

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

from serving.aio import in_thread
from serving.observability import logs

REAP_S = 10.0
"""Seconds between two rounds. Code that starts a child waits for it much sooner after its end."""

RETURN_S = 60.0
"""Seconds between two returns of free memory to the kernel."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_HEAPS = 2


class StopSignals:
    """Signals that stop a server. The first starts a drain, and the second ends the drain.

    SIGUSR1 and SIGUSR2 change the log's level.
    """

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def listen(self, *numbers: signal.Signals) -> None:
        """Handle the signals in the running event loop. numbers: the signals that stop."""
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self.ask)
        loop.add_signal_handler(signal.SIGUSR1, logs.step_level, -1)
        loop.add_signal_handler(signal.SIGUSR2, logs.step_level, 1)

    def ask(self) -> None:
        """Do the same as one more signal."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def stop(self) -> None:
        """Wait for the first signal."""
        await self._stop.wait()

    async def hurry(self) -> None:
        """Wait for the second signal."""
        await self._hurry.wait()


def keep_freed_memory(size: int, largest: int) -> None:
    """Make the C library keep up to `size` freed bytes, and use them for blocks below `largest`
    bytes. Larger blocks return to the kernel when they are freed. There are two heaps. Call it
    before the process has threads.

    By default (mallopt(3)) it returns free memory above 128 KiB at the end of its heap to the
    kernel at once, and the kernel must clear it for the next use. Large blocks would stretch a
    heap: between them, pages with a small block that is still used stay allocated.
    """
    _mallopt({_M_TRIM_THRESHOLD: size, _M_MMAP_THRESHOLD: largest, _M_ARENA_MAX: _HEAPS})


def return_freed_memory(size: int) -> None:
    """Make the C library return blocks of at least `size` bytes to the kernel when they are freed,
    and have two heaps. Call it before the process has threads.

    By default (mallopt(3)) blocks of up to 32 MiB come from the heaps once such a block has been
    freed, and there are eight heaps a core. A heap shrinks only at its end: a small block that is
    still used keeps everything below it, so that each thread's largest body stays allocated.
    """
    _mallopt({_M_MMAP_THRESHOLD: size, _M_ARENA_MAX: _HEAPS})


def _mallopt(parameters: Mapping[int, int]) -> None:
    with contextlib.suppress(AttributeError):  # a C library without mallopt()
        for parameter, value in parameters.items():
            ctypes.CDLL(None).mallopt(parameter, value)


async def return_heaps() -> None:
    """Return the free memory within the C library's heaps to the kernel, once a minute.

    After a burst of large requests, small blocks that are still used keep a heap at its full
    length. Takes some milliseconds after a burst, in a thread, and else one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    while trim:
        await asyncio.sleep(RETURN_S)
        await in_thread(trim, 0)


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Make the kernel send this process a signal when its parent ends.

    parent: the parent's process id. If it is given, and the parent has already ended, the process
    sends the signal to itself.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def begin(
    command: list[str], environ: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a program that ends with this process, and does not get the terminal's Ctrl-C."""
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
    """Become the parent of descendants whose parent dies, as PID 1 of a container always does.

    If vLLM's engine core is killed, its workers take seconds to notice it. Only their parent can
    still find them.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


async def reap() -> None:
    """Wait for adopted children that have ended. No other code does, and each keeps its process id.

    Code that starts a child also waits for it; multiprocessing does so in active_children(). So a
    child that has ended and still exists one round later is adopted.
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
    """Kill processes, except those that have already ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_all_of(user: int) -> None:
    """Kill all processes of one of our users, in any session. They are descendants of this process
    if adopt_orphans() was called. Blocks.
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
