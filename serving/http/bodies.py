# SPDX-License-Identifier: Apache-2.0
"""Bodies: how they are received, how much of them is held, and how they are written at once."""

from collections.abc import Awaitable
from typing import Protocol, cast

from starlette.types import Message, Receive, Scope, Send

from serving.cancellation import ClientLeft
from serving.errors import Overloaded, ServingError, TooLarge

HELD = 2**30
"""Bytes of bodies that are held at once, for all requests, but for the first FREE of each."""
FREE = 64 * 1024


class Writer(Protocol):
    """What writes parts of an answer's body without waiting, in order with those that are sent."""

    def takes(self) -> bool:
        """Whether it can now: the head has gone, and the client keeps up."""

    def write(self, part: bytes) -> None:
        """Write a part, right after takes() has said so."""


class Sender(Writer, Protocol):
    """A connection's own `send`. refusal: why the request cannot be read, where that is so: ASGI
    has no other way to say it.
    """

    refusal: ServingError | None

    def __call__(self, message: Message) -> Awaitable[None]: ...


def sender(send: Send) -> Sender | None:
    """The connection's own `send`, where this is it, and nothing stands between."""
    return cast(Sender, send) if hasattr(send, "refusal") else None


def header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


class Bodies:
    """Request bodies: how large each may be, and all that are held.

    largest: bytes of one.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self.limit = max(HELD, 4 * largest)
        self.held = 0

    def share(self) -> "Share":
        """What one body is to have of all that is held; to be freed."""
        return Share(self)

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """A request's whole body, which is held no longer. Raises what whole() does."""
        share = self.share()
        try:
            return await self.whole(scope, receive, share)
        finally:
            share.free()

    async def whole(self, scope: Scope, receive: Receive, share: "Share", front: int = 0) -> bytes:
        """A request's whole body. front: bytes of it that are not the client's.

        Raises TooLarge where it is larger than one may be, Overloaded where too much is held, and
        ClientLeft. What is refused but not absurdly large is read to its end all the same: a client
        that is still sending would not see the answer.
        """
        largest = self._largest + front
        length = header(scope, b"content-length")
        announced = int(length) if length.isdigit() else 0
        if announced > 4 * largest:
            raise TooLarge(self._largest)
        parts: list[bytes] = []
        refused: ServingError | None = None
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            size += len(part)
            if size > 4 * largest:
                raise TooLarge(self._largest)
            if not refused:
                refused = TooLarge(self._largest) if size > largest else share.grown(size)
                parts.append(part)
            if refused:
                parts.clear()
                share.free()
            if not message.get("more_body", False):
                break
        if refused:
            raise refused
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Share:
    """What one body has of all that are held."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    def grown(self, size: int) -> Overloaded | None:
        """Count it as so large; returns why that cannot be."""
        more = max(size - FREE, 0) - self._size
        bodies = self._bodies
        if more and bodies.held + more > bodies.limit:
            return Overloaded(
                f"{bodies.held} bytes of bodies are held; all requests together may have "
                f"{bodies.limit}, and small ones still pass"
            )
        self._size += more
        bodies.held += more
        return None

    def free(self) -> None:
        self._bodies.held -= self._size
        self._size = 0
