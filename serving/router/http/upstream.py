# SPDX-License-Identifier: Apache-2.0
"""A connection to a replica: requests go out, and answers come back as the bytes they are.

httptools parses the head's fields of an answer and finds the end of the answer. It does not report
the offset of the head's end, so the bytes are searched for it once.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Protocol

import httptools

from serving.http.http1 import MAX_HEAD
from serving.router.http.flow import FlowControl

# What concerns one connection only (RFC 9110, 7.6.1).
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)

FRAMING = frozenset((b"content-length", b"transfer-encoding"))
"""The rule that ends a body."""

CONNECT_S = 3.0
"""For a new connection to a server."""
JOINED = 4096
"""Bytes of a body below which a copy of it is cheaper than a second buffer for the kernel."""


def is_framed(headers: Mapping[bytes, bytes]) -> bool:
    """Whether an answer has its own end, before the connection's."""
    coding = headers.get(b"transfer-encoding", b"").lower()
    return b"content-length" in headers or coding.endswith(b"chunked")


class Listener(Protocol):
    """The receiver of an answer, as seen by the connection to the replica."""

    def on_head(self, status: int, head: bytes, headers: dict[bytes, bytes], body: bytes) -> bool:
        """The answer's head has arrived, with the received part of its body.

        headers: its fields by their names in lower case. Returns whether the answer is wanted.
        """

    def on_data(self, data: bytes) -> None:
        """The next bytes of the answer's body are here, with their framing."""

    def on_end(self, *, keep_alive: bool) -> None:
        """The answer is complete. keep_alive: whether its framing allows another to follow it."""

    def on_lost(self, reason: str) -> None:
        """The connection broke, or the replica does not speak HTTP."""

    def on_writable(self) -> None:
        """The connection to the replica accepts writes again."""


class IdleConnections:
    """The connections to one replica that wait for a request."""

    def __init__(self) -> None:
        self._since: dict[Upstream, float] = {}
        self._closed = False

    def put(self, connection: "Upstream") -> None:
        """It can carry another request."""
        if self._closed:
            connection.drop()
        else:
            self._since[connection] = time.monotonic()

    def take(self) -> "Upstream | None":
        """The one that has waited for the shortest time, if there is any."""
        return self._since.popitem()[0] if self._since else None

    def discard(self, connection: "Upstream") -> None:
        """It is at its end."""
        self._since.pop(connection, None)

    def drop(self, waiting_s: float = 0.0) -> None:
        """End connections that have waited for too long."""
        latest = time.monotonic() - waiting_s
        for connection in [it for it, since in self._since.items() if since <= latest]:
            del self._since[connection]
            connection.drop()

    def close(self) -> None:
        """End all idle connections, and those that would become idle later."""
        self._closed = True
        self.drop()


class Upstream(FlowControl):
    """A connection to a replica, which carries one request and its answer at a time."""

    def __init__(self, idle: IdleConnections | None, *, decoding: bool = False) -> None:
        """idle: the pool that takes the connection after an answer; None if it carries only one
        request. decoding: remove the transfer framing from bodies, for clients that do not know it.
        """
        super().__init__()
        self._idle = idle
        self._decoding = decoding
        if decoding:
            self.on_body = self._collect  # httptools would make a copy of every body for it
        self.used = False
        """Whether it has carried an answer before."""
        # request
        self._listener: Listener | None = None
        self._request_sent = True
        self._head_only = False
        # answer
        self._parser = httptools.HttpResponseParser(self)
        self._reset(head_only=False)

    def _reset(self, *, head_only: bool) -> None:
        self._head_only = head_only
        self._head: bytes | None = b""  # its received part; None once it was passed on
        self._headers: dict[bytes, bytes] = {}
        self._status = 0
        self._keep_alive = False
        self._complete = False
        self._body: list[bytes] = []  # if it is decoded: the part that is not passed on yet

    def send(
        self,
        listener: Listener,
        head: bytes,
        body: bytes | bytearray,
        *,
        head_only: bool,
        complete: bool,
    ) -> None:
        """Send a request. head_only: it is a HEAD request, whose answer has no body. complete:
        whether this is all of it.
        """
        self._listener = listener
        self._request_sent = complete
        self._reset(head_only=head_only)
        if len(body) < JOINED:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def send_more(self, data: bytes | bytearray, *, complete: bool) -> None:
        """Send more of the request's body, framed. complete: whether this is the last part."""
        self._request_sent = complete
        self.transport.write(data)

    def drop(self) -> None:
        """End the connection, and with it the replica's work on the request."""
        self._listener = None
        self.transport.abort()

    # asyncio's side

    def data_received(self, data: bytes) -> None:
        listener = self._listener
        if listener is None:  # it speaks without having been asked
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("the replica's answer is not HTTP")
            return
        if self._head is None:
            listener.on_data(b"".join(self._body) if self._decoding else data)
            self._body.clear()
        elif not self._begin(listener, self._head + data):
            return
        if self._complete and self._listener is listener:
            self._finish()

    def _begin(self, listener: Listener, data: bytes) -> bool:
        """Forward the head if its end has arrived. Whether the answer is on its way."""
        head, end, body = data.lstrip(b"\r\n").partition(b"\r\n\r\n")
        while end and head[9:10] == b"1":  # as in "HTTP/1.1 100": the real one follows
            data = body
            head, end, body = data.lstrip(b"\r\n").partition(b"\r\n\r\n")
        if not end:
            self._head = data
            if len(data) > MAX_HEAD:
                self._fail("the head of the replica's answer is too long")
            return False
        if self._status < 200:
            self._fail("the replica's answer has no status")
            return False
        self._head = None
        if self._decoding:
            body = b"".join(self._body)
            self._body.clear()
        if self._head_only:
            self._complete, body = True, b""
        if not listener.on_head(self._status, head, self._headers, body):
            self._listener = None
            self._release()
            return False
        return True

    def eof_received(self) -> None:
        """The replica ends the connection, and with it an answer that has no other end."""

    def connection_lost(self, exception: Exception | None) -> None:
        if self._idle:
            self._idle.discard(self)
        self._parser = None  # type: ignore[assignment]  # it keeps this connection
        listener, self._listener = self._listener, None
        if listener is None:
            return
        if self._head is None and not is_framed(self._headers) and exception is None:
            listener.on_end(keep_alive=False)
        else:
            listener.on_lost("the replica broke off the connection")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._listener:
            self._listener.on_writable()

    # the parser's side

    def on_message_begin(self) -> None:
        if self._complete:
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
        self._keep_alive = self._parser.should_keep_alive()  # the parser forgets it with the body

    def _collect(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._complete = self._status >= 200

    def _finish(self) -> None:
        listener, self._listener = self._listener, None
        assert listener
        listener.on_end(keep_alive=not self._decoding)
        self._release()

    def _release(self) -> None:
        """Become idle if another request can follow, else end the connection."""
        over = self._complete and self._request_sent and not self._head_only
        if not (over and self._keep_alive and self._idle):
            self.transport.abort()
            return
        self.used = True
        self.resume()
        self._idle.put(self)

    def _fail(self, reason: str) -> None:
        listener, self._listener = self._listener, None
        self.transport.abort()
        if listener:
            listener.on_lost(reason)


async def connect(
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    idle: IdleConnections | None,
    *,
    decoding: bool = False,
) -> Upstream:
    """A new connection. idle, decoding: as Upstream has them. Raises OSError, TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_S):  # wait_for() may miss that it is cancelled
        _, upstream = await loop.create_connection(
            lambda: Upstream(idle, decoding=decoding), host, port, ssl=tls
        )
    return upstream
