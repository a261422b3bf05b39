"""A connection to a replica: requests go out, and answers come back as the bytes they are.

httptools follows an answer only to find where it ends. Its head is changed where HTTP demands it;
from there on nothing is read, copied or parsed.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import httptools

MAX_HEAD = 64 * 1024
"""Bytes of a head, of a request's as of an answer's."""

# What concerns one connection only (RFC 9110, 7.6.1).
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)


def framed(headers: Mapping[bytes, bytes]) -> bool:
    """Whether an answer has an end of its own, and not its connection's."""
    coding = headers.get(b"transfer-encoding", b"").lower()
    return b"content-length" in headers or coding.endswith(b"chunked")


class Listener(Protocol):
    """Who asked, and is told what comes back."""

    def answered(self, status: int, head: bytes, headers: dict[bytes, bytes], body: bytes) -> bool:
        """The answer's head is here, with what has come of its body. False: it is not wanted."""

    def more(self, data: bytes) -> None:
        """The next bytes of the answer's body, with their framing."""

    def finished(self, keep: bool) -> None:
        """The answer is whole. keep: whether what went on may be followed by another answer."""

    def lost(self, reason: str) -> None:
        """The connection broke, or the replica does not speak HTTP."""

    def drained(self) -> None:
        """There is room again for what is sent to the replica."""


class Upstream(asyncio.Protocol):
    """used: whether it has carried an answer before. full: whether the replica reads too slowly."""

    transport: asyncio.Transport

    def __init__(self, idle: list["Upstream"], decoding: bool = False) -> None:
        """idle: where it puts itself when it can be used again. decoding: pass on bodies without
        their framing, to clients that do not know it; such a connection is used once.
        """
        self._idle = idle
        self._decoding = decoding
        if decoding:
            self.on_body = self._collect  # httptools would make a copy of every body for it
        self._listener: Listener | None = None
        self._sent = True  # all of the request
        self._held = False
        self.used = False
        self.full = False
        self.since = 0.0  # when it became idle
        self._parser = httptools.HttpResponseParser(self)
        self._reset(False)

    def _reset(self, head_only: bool) -> None:
        self._head: bytes | None = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_only = head_only
        self._status = 0
        self._keeps = False
        self._whole = False
        self._body: list[bytes] = []

    def ask(
        self, listener: Listener, request: Sequence[bytes], *, head_only: bool, whole: bool
    ) -> None:
        """Send a request. head_only: it is a HEAD request, whose answer has no body. whole: whether
        this is all of it.
        """
        self._listener = listener
        self._sent = whole
        self._reset(head_only)
        self.transport.write(b"".join(request))

    def send(self, data: bytes, *, whole: bool) -> None:
        """Send more of the request's body, framed. whole: whether that is the last of it."""
        self._sent = whole
        self.transport.write(data)

    def hold(self, hold: bool) -> None:
        """Stop reading, or go on, as the client keeps up."""
        if hold is not self._held and not self.transport.is_closing():
            self._held = hold
            (self.transport.pause_reading if hold else self.transport.resume_reading)()

    def drop(self) -> None:
        """End the connection, and with it the replica's work on the request."""
        self._listener = None
        self.transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        listener = self._listener
        if listener is None:  # it speaks without having been asked
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._broken("the replica's answer is not HTTP")
            return
        if self._head is None:
            listener.more(b"".join(self._body) if self._decoding else data)
            self._body.clear()
        elif not self._begun(listener, self._head + data):
            return
        if self._whole and self._listener is listener:
            self._finish()

    def _begun(self, listener: Listener, data: bytes) -> bool:
        """Look for the head's end in what has come. Whether the answer is on its way."""
        head, end, body = data.lstrip(b"\r\n").partition(b"\r\n\r\n")
        while end and head[9:10] == b"1":  # as in "HTTP/1.1 100": the real one follows
            data = body
            head, end, body = data.lstrip(b"\r\n").partition(b"\r\n\r\n")
        if not end:
            self._head = data
            if len(data) > MAX_HEAD:
                self._broken("the head of the replica's answer is too long")
            return False
        if self._status < 200:
            self._broken("the replica's answer has no status")
            return False
        self._head = None
        if self._decoding:
            body = b"".join(self._body)
            self._body.clear()
        if self._head_only:
            self._whole, body = True, b""
        if not listener.answered(self._status, head, self._headers, body):
            self._listener = None
            self._release()
            return False
        return True

    def eof_received(self) -> None:
        """The replica ends the connection, and with it an answer that has no other end."""

    def connection_lost(self, exception: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        listener, self._listener = self._listener, None
        if listener is None:
            return
        if self._head is None and not framed(self._headers) and exception is None:
            listener.finished(keep=False)
        else:
            listener.lost("the replica broke off the connection")

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._listener:
            self._listener.drained()

    # the parser's side

    def on_message_begin(self) -> None:
        if self._whole:
            raise ValueError("a second answer to one request")
        self._headers = {}
        self._status = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._status:  # it is a trailer
            return
        name, value = name.lower(), value.rstrip()
        before = self._headers.get(name)
        self._headers[name] = value if before is None else before + b", " + value

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._keeps = self._parser.should_keep_alive()  # the parser forgets it with the body

    def _collect(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._whole = self._status >= 200

    def _finish(self) -> None:
        listener, self._listener = self._listener, None
        assert listener
        listener.finished(keep=not self._decoding)
        self._release()

    def _release(self) -> None:
        """Wait for another request, where one can follow, or end."""
        over = self._whole and self._sent and not self._head_only
        if not (over and self._keeps) or self._decoding:
            self.transport.abort()
            return
        self.used = True
        self.since = time.monotonic()
        self.hold(False)
        self._idle.append(self)

    def _broken(self, reason: str) -> None:
        listener, self._listener = self._listener, None
        self.transport.abort()
        if listener:
            listener.lost(reason)
