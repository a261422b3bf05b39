# SPDX-License-Identifier: Apache-2.0
"""The whole interface between a client's connection and the part that answers its requests."""

from typing import Protocol

from serving.errors import ServingError
from serving.router.http.forwarded_request import Request


class WholeResponder(Protocol):
    """The receiver of a request's whole answer."""

    def respond(self, status: int, content_type: bytes, body: bytes, *lines: bytes) -> None:
        """Send a whole answer. lines: further lines of its head."""

    def fail(self, error: ServingError) -> None:
        """Answer with an error, in the shape of the path's API."""


class Responder(WholeResponder, Protocol):
    """A client's connection, as seen by the part that answers a request."""

    def start(self, lines: list[bytes], *, keep_alive: bool, body: bytes) -> None:
        """Send an answer's head, given as its lines, and the received part of its body.

        keep_alive: whether another answer may follow on the connection.
        """

    def write(self, data: bytes, /) -> None:
        """Send more of the answer's body, framed."""

    def finish(self, *, keep_alive: bool) -> None:
        """The answer is complete."""

    def abort(self) -> None:
        """Break the connection off: an answer that has begun cannot be completed."""

    def pause(self) -> None:
        """Read no more of the request for now."""

    def resume(self) -> None:
        """Read on: the received part was forwarded."""


class Answering(Protocol):
    """The part that answers a request, as seen by the client's connection."""

    begun: bool
    """Whether the answer's head was sent."""

    def start(self) -> None:
        """Begin to work on the answer. It may be complete, or have failed, on return."""

    def body_arrived(self) -> None:
        """More of a streamed body has arrived, or its end."""

    def pause(self) -> None:
        """The client reads too slowly."""

    def resume(self) -> None:
        """The client keeps up again."""

    def cancel(self) -> None:
        """The client has left, or its request turned out to be invalid."""


class Dispatch(Protocol):
    """Decides which part answers a request."""

    def __call__(self, responder: Responder, request: Request, /) -> Answering | None:
        """The part that answers the request, not started yet; None if the answer is given or in
        flight.

        Raises ServingError if the request is refused.
        """
