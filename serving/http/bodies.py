# SPDX-License-Identifier: Apache-2.0
"""Bodies: receiving them, limiting the memory that they take, and writing them without waiting."""

from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from starlette.types import Message, Receive, Scope, Send

from serving.cancellation import ClientLeft
from serving.errors import Overloaded, ServingError, TooLarge

HELD = 2**30
"""Most bytes of all requests' bodies in memory, without the first FREE bytes of each."""
FREE = 64 * 1024


class Writer(Protocol):
    """Writes an answer: `send` of ASGI, and parts of the body without awaiting, in one order.

    A wrapper of a writer must wrap both, so that it sees every part of a body.
    """

    def __call__(self, message: Message) -> Awaitable[None]: ...

    def takes(self) -> bool:
        """Whether write() is allowed now: the head was sent, and the client keeps up."""

    def write(self, part: bytes) -> None:
        """Write a part of the body. Only allowed right after takes() has returned True."""


class Sender(Writer, Protocol):
    """A connection's own `send`. refusal: the error of a request that cannot be read, or None. ASGI
    has no other field for it.
    """

    refusal: ServingError | None


def sender(send: Send) -> Sender | None:
    """Return `send` if it is the connection's own, and None if it is wrapped."""
    return cast(Sender, send) if hasattr(send, "refusal") else None


Head = Callable[[Message], Awaitable[Message]]
"""Returns the head of an answer with its changes."""


class Answer:
    """A client's answer (Writer). A wrapper that changes only the head sees no part of the body.

    send: the connection's own, or a wrapper of it that sees all parts.
    """

    def __init__(self, send: Send) -> None:
        connection = sender(send)
        self._send = send
        self._heads: list[Head] = []
        self.takes = connection.takes if connection else _never
        self.write = connection.write if connection else _unwritten
        self.complete = False
        """Whether its last part has been sent."""

    def at_head(self, change: Head) -> None:
        """Let a function change the head, before those that were added earlier."""
        self._heads.insert(0, change)

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            return self._begin(message)
        self.complete = self.complete or not message.get("more_body")
        return self._send(message)

    async def _begin(self, message: Message) -> None:
        for change in self._heads:
            message = await change(message)
        await self._send(message)


def _never() -> bool:
    return False


def _unwritten(part: bytes) -> None:
    raise AssertionError("a wrapped `send` gets messages")


class Collected:
    """Collects an answer (Writer)."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    async def __call__(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.write(message.get("body", b""))

    def takes(self) -> bool:
        return True

    def write(self, part: bytes) -> None:
        self.body += part


def header(scope: Scope, name: bytes) -> bytes:
    for key, value in scope["headers"]:  # a generator takes twice as long
        if key == name:
            return value  # type: ignore[no-any-return]
    return b""


class Bodies:
    """The memory budget of request bodies, for each and for all of them.

    largest: the most bytes of one body.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self.limit = max(HELD, 4 * largest)
        self.held = 0

    def share(self) -> "Share":
        """Return one body's share of the memory budget. The caller must free it."""
        return Share(self)

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Return a request's whole body, without keeping its share. Raises what whole() raises."""
        share = self.share()
        try:
            return await self.whole(scope, receive, share)
        finally:
            share.free()

    async def whole(self, scope: Scope, receive: Receive, share: "Share", front: int = 0) -> bytes:
        """Return a request's whole body. front: bytes at its start that are not the client's.

        Raises TooLarge above the limit of one body, Overloaded if the memory budget is used up, and
        ClientLeft. A refused body of at most four times its limit is still read to its end, because
        a client that is still sending would not see the answer.
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
    """One body's share of the memory budget."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    def grown(self, size: int) -> Overloaded | None:
        """Grow the share to a body of `size` bytes. Returns the error if the budget is used up."""
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
