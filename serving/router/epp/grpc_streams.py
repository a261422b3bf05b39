# SPDX-License-Identifier: Apache-2.0
"""The streams of gRPC that are open: how many there may be, and which is let go for another."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from serving.router.http.forwarded_request import Request

M = TypeVar("M")


class Evicted(Exception):
    """The stream was let go for another one."""


class Streams:
    """A limited number of streams. Beyond the limit, a new stream replaces the one that has been
    silent for longest, if possible one with an incomplete request. A peer therefore cannot keep
    others out by holding streams.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._asking: dict[Stream, None] = {}
        self._answering: dict[Stream, None] = {}

    def __len__(self) -> int:
        return len(self._asking) + len(self._answering)

    def open(self) -> "Stream":
        """Another one. It must be closed."""
        if len(self) >= self._most:
            self.evict(next(iter(self._asking or self._answering), None))
        stream = Stream(self)
        self.note(stream, asking=True)
        return stream

    def evict(self, stream: "Stream | None") -> None:
        """Let one go."""
        if stream:
            self.close(stream)
            stream.end()

    def free(self, size: int, but: "Stream") -> bool:
        """Evict the streams whose requests have been awaited for longest, until they free `size`
        bytes. Streams without memory stay, because their end would free none. Returns whether
        enough was freed.
        """
        freed = []
        for stream in self._asking:
            if size <= 0:
                break
            if stream.holds and stream is not but:
                freed.append(stream)
                size -= stream.holds
        for stream in freed:
            self.evict(stream)
        return size <= 0

    def note(self, stream: "Stream", *, asking: bool) -> None:
        """It has said something. asking: whether its request is not here whole yet."""
        self.close(stream)
        (self._asking if asking else self._answering)[stream] = None

    def close(self, stream: "Stream") -> None:
        """It is over."""
        self._asking.pop(stream, None)
        self._answering.pop(stream, None)


class Stream:
    """An open stream."""

    def __init__(self, of: Streams) -> None:
        self.request: Request | None = None
        """Its request, as soon as the head is here."""
        self._of = of
        self._evicted = False
        self._wait: asyncio.Timeout | None = None

    @property
    def holds(self) -> int:
        """Bytes of memory that its request's head takes."""
        return self.request.weight if self.request else 0

    def end(self) -> None:
        """Raise Evicted in the call that awaits the next message."""
        self._evicted = True
        if self._wait:
            self._wait.reschedule(asyncio.get_running_loop().time())

    async def next(self, incoming: AsyncIterator[M], patience: float | None) -> M | None:
        """The next message; None at the end. patience: seconds to wait for it, None for no limit.

        Raises Evicted, TimeoutError.
        """
        if self._evicted:
            raise Evicted
        self._of.note(self, asking=patience is not None)
        try:
            async with asyncio.timeout(patience) as self._wait:
                return await anext(incoming, None)
        except TimeoutError:
            if self._evicted:
                raise Evicted from None
            raise
        finally:
            self._wait = None

    def make_room(self) -> bool:
        """Let others go whose memory suffices for this one. Whether there are such."""
        return self._of.free(self.holds, self)

    def close(self) -> None:
        """It is over."""
        self._of.close(self)
