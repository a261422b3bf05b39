# SPDX-License-Identifier: Apache-2.0
"""A child of the supervisor's: a process with all that it has started."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

import psutil

from serving.aio import in_thread
from serving.copies.part import Part, hand, told
from serving.exit import Exit
from serving.observability.logs import process_handler

KILLED_S = 5.0
"""Processes that were killed are waited for so long."""


class Child:
    """A process in a session of its own, so that Ctrl-C is for its parent alone."""

    def __init__(self, process: asyncio.subprocess.Process, report: int) -> None:
        self._process = process
        self._report = report

    @classmethod
    async def start(
        cls,
        program: Sequence[str],
        part: Part,
        report: tuple[int, int],
        environ: Mapping[str, str],
        listener: int | None = None,
    ) -> "Child":
        """program: what takes the part, by the descriptor that is its last word. report: both ends
        of the pipe for the child's report. environ: variables in addition to ours. listener: a
        socket that it gets.
        """
        reading, writing = report
        handed = hand(part)
        kept = [handed, writing, *([] if listener is None else [listener])]
        try:
            process = await asyncio.create_subprocess_exec(
                *(*program, str(handed)),
                env={**os.environ, **environ},
                stdin=asyncio.subprocess.DEVNULL,
                # Not to our own pipe: a child's lines are lines of the log already.
                stdout=(output := process_handler().stream),
                stderr=output,
                pass_fds=kept,
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(handed)
            os.close(writing)
        return cls(process, reading)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self) -> None:
        """Ask it to stop; asked again, it does not wait for requests."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ended(self) -> Exit:
        """Wait until nothing of it is left. How it has ended.

        Whoever starts it again can rely on that: a worker that has outlived its server could still
        write into memory that others have been given since.
        """
        code = await self._process.wait()
        await in_thread(_kill_session, self.pid)
        try:
            return told(self._report, code)
        finally:
            os.close(self._report)


def _kill_session(leader: int) -> None:
    """Kill what is left of a session. Its processes are ours by now: see adopt_orphans()."""
    for _ in range(20):  # it may start more in the meantime
        found = [it for it in psutil.Process().children(recursive=True) if _session(it) == leader]
        if not found:
            return
        for it in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                it.kill()
        psutil.wait_procs(found, timeout=KILLED_S)


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None
