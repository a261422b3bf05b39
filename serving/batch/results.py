# SPDX-License-Identifier: Apache-2.0
"""The answers of a batch, in two files: those without errors, and those with.

They are the only record of finished work. An answer counts once it is on disk, and is then not
computed again.
"""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from serving.aio import in_thread
from serving.batch import lines


class _Entry(NamedTuple):
    """An answer to be written. number: of its file."""

    number: int
    custom_id: str
    line: bytes
    done: asyncio.Future[None]


class Results:
    """A batch's two files. `output` and `errors`: their paths.

    Raises OSError if they cannot be written; no further writes are allowed then.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self._paths = output, errors
        self._descriptors: list[int] = []
        self._pending: list[_Entry] = []
        self._writing: asyncio.Task[None] | None = None
        # Of the output, and of the errors
        self.sizes = [0, 0]
        self.counts = [0, 0]
        self.answered: set[bytes] = set()
        """Digests of the custom_ids of lines that have answers."""

    def open(self) -> None:
        """Read the existing answers; an incomplete answer is removed. Blocks, so a thread should
        call it.
        """
        for number, path in enumerate(self._paths):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            self._descriptors.append(descriptor)
            with open(descriptor, "rb", closefd=False) as file:
                for custom_id, end in lines.answered(file):
                    self.answered.add(custom_id)
                    self.sizes[number] = end
                    self.counts[number] += 1
            os.ftruncate(descriptor, self.sizes[number])

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    async def add(self, custom_id: str, entry: bytes, failed: bool) -> None:
        """Keep an answer; the disk has it when this returns."""
        await self.soon(custom_id, entry, failed)

    def soon(self, custom_id: str, entry: bytes, failed: bool = True) -> asyncio.Future[None]:
        """The same, without waiting. Answers that come while others are written share a sync."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append(_Entry(int(failed), custom_id, entry, done))
        if not self._writing or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return done

    async def written(self) -> None:
        """Wait for the current write."""
        if self._writing:
            await asyncio.wait([self._writing])

    async def _write(self) -> None:
        while pending := self._pending:
            self._pending = []
            try:
                await in_thread(self._commit, pending)
            except OSError as error:
                for entry in pending:
                    if not entry.done.done():
                        entry.done.set_exception(error)
                continue
            for entry in pending:
                self.counts[entry.number] += 1
                self.answered.add(lines.digest(entry.custom_id))
                if not entry.done.done():
                    entry.done.set_result(None)

    def _commit(self, entries: list[_Entry]) -> None:
        for number, descriptor in enumerate(self._descriptors):
            whole = b"".join(entry.line for entry in entries if entry.number == number)
            if not whole:
                continue
            size = self.sizes[number]
            try:
                _write_at(descriptor, whole, size)
                os.fdatasync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
            self.sizes[number] += len(whole)


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count
