# SPDX-License-Identifier: Apache-2.0
"""A child of the supervisor: a process with its descendants."""

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
"""Maximum wait for killed processes, in seconds."""


class Child:
    """A process in a separate session, so that Ctrl-C reaches only its parent."""

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
        more: Sequence[int] = (),
    ) -> "Child":
        """program: the command line. The descriptor of the part becomes its last word. report:
        both ends of the pipe for the child's report. environ: variables in addition to this
        process's. more: further descriptors for the child.
        """
        reading, writing = report
        handed = hand(part)
        kept = [handed, writing, *more]
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
        """Ask it to stop. After a second call it does not wait for requests."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ended(self) -> Exit:
        """Wait until all its processes have ended. Returns the reason of its end.

        A restart must wait for this: a worker that outlives its server could still write into
        memory that belongs to other processes by then.
        """
        code = await self._process.wait()
        await in_thread(_kill_session, self.pid)
        try:
            return told(self._report, code)
        finally:
            os.close(self._report)


def _kill_session(leader: int) -> None:
    """Kill the remaining processes of a session, which adopt_orphans() has made ours."""
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
