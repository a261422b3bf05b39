"""A client's connection: HTTP/1.1 requests, answered one after the other in their order."""

import asyncio
import http
import re
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from serving import errors
from serving.errors import BadRequest, HeadTooLarge, NotReady, ServingError, TooLarge
from serving.router.exchange import Exchange
from serving.router.request import REQUEST_ID, Request
from serving.router.upstream import MAX_HEAD

if TYPE_CHECKING:
    from serving.router.server import Router

BUFFER = 4 * 1024**2
"""Bytes of a body that are awaited before its replica is chosen. The rest is streamed, and such a
request is not sent to a second replica.
"""
BUFFERED = 512 * 1024**2
"""Bytes of bodies that are kept at once, for all clients; beyond, all are streamed."""
PIPELINE = 16
"""Requests that a client may send ahead of their answers; then it is read no further."""
AHEAD = 1_000
"""What one packet may bring of them beyond that."""
LINGER_S = 2.0
"""A client that is still sending when it is refused gets so long to read why."""

_NOT_HTTP = "the request is not HTTP/1.1"
_HEAD_TOO_LARGE = f"the request's line and headers are longer than {MAX_HEAD} bytes"

# Clients offer HTTP/2 with a request (RFC 7540, 3.2), and mean it to be answered if nobody takes
# them up on it. The parser would stop at the head.
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class Client(asyncio.Protocol):
    """touched: when it was last heard of."""

    transport: asyncio.Transport

    def __init__(self, router: "Router") -> None:
        self._router = router
        self._parser = httptools.HttpRequestParser(self)
        self._head = b""  # between two requests: what has come of the next one's head
        self._stuck = 0  # bytes since the head that is being read began, or its body last came on
        self._reading: Request | None = None
        self._waiting: deque[Request] = deque()
        self._exchange: Exchange | None = None
        self._request: Request | None = None  # that is being answered
        self._held = False  # no more is read until what has come is dealt with
        self._deaf = False  # what it sends is not read any more
        self._full = False  # it does not read what it is sent
        self._closing = False
        self._keep = True
        self.touched = time.monotonic()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._router.clients.add(self)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self._closing:
            return
        self.touched = time.monotonic()
        if self._reading is None:
            data = self._head + data
            head, end, _ = data.partition(b"\r\n\r\n")
            if len(head) > MAX_HEAD:
                self._refuse(HeadTooLarge(_HEAD_TOO_LARGE))
                self._go_on()
                return
            if not end:
                self._head = data
                return
            self._head = b""
            if b"pgrade" in head or b"PGRADE" in head:
                data = _UPGRADE.sub(b"\r\nx-not-taken:", head) + data[len(head) :]
        else:
            self._stuck += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what on_... raised
            if not isinstance(cause, ServingError):
                cause = BadRequest(_NOT_HTTP)
            self._refuse(cause)
        else:
            if self._reading and self._stuck > MAX_HEAD:
                self._refuse(HeadTooLarge(_HEAD_TOO_LARGE))
        self._go_on()

    def _go_on(self) -> None:
        """Do something about what has come."""
        self._count(self._reading)
        if not self._request:
            self._next()
        elif self._request.streamed and self._exchange:
            self._exchange.sent_more()
            self._count(self._request)
        self._invite()
        if len(self._waiting) >= PIPELINE:
            self.hold(True)

    def pause_writing(self) -> None:
        self._full = True
        if self._exchange:
            self._exchange.hold(True)

    def resume_writing(self) -> None:
        self._full = False
        self.touched = time.monotonic()
        if self._exchange:
            self._exchange.hold(False)
        self._next()

    def connection_lost(self, exception: Exception | None) -> None:
        self._closing = True
        self._router.clients.discard(self)
        for request in (self._reading, self._request, *self._waiting):
            if request:
                request.body = bytearray()
                self._count(request)
        self._waiting.clear()
        if self._exchange:
            self._exchange.cancel()
            self._exchange = None

    # the parser's side: what is raised here, data_received finds

    def on_message_begin(self) -> None:
        if len(self._waiting) >= AHEAD:
            raise BadRequest("too many requests were sent ahead of their answers")
        self._reading = Request()
        self._stuck = 0

    def on_url(self, url: bytes) -> None:
        assert self._reading
        self._reading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._reading
        if not self._reading.method:  # else it is a trailer
            self._reading.headers.append((name.lower(), value.rstrip()))

    def on_headers_complete(self) -> None:
        request = self._reading
        assert request
        self._stuck = 0
        parser = self._parser
        version = parser.get_http_version()
        request.heads_in(parser.get_method(), version, parser.should_keep_alive())
        if version not in ("1.0", "1.1") or parser.should_upgrade():
            raise BadRequest(_NOT_HTTP)
        if request.named.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise BadRequest("the only transfer-encoding that is known here is chunked")
        if (request.length or 0) > self._router.max_request_size:
            raise TooLarge(self._router.max_request_size)

    def on_body(self, body: bytes) -> None:
        request = self._reading
        assert request
        self._stuck = 0
        request.body += body
        request.size += len(body)
        if request.size > self._router.max_request_size:
            raise TooLarge(self._router.max_request_size)
        if len(request.body) > BUFFER or self._router.buffered > BUFFERED:
            if request.for_all:
                raise BadRequest("the body is too large for a change of adapters")
            if self._request is None and not self._waiting:
                self._waiting.append(request)
            elif self._request is not request:
                self.hold(True)

    def on_message_complete(self) -> None:
        request, self._reading = self._reading, None
        assert request
        request.complete = True
        self._count(request)
        if request is not self._request and request not in self._waiting:
            self._waiting.append(request)

    # what is done with requests

    def _next(self) -> None:
        """Answer the next request, if one has come, and the answers before were read."""
        if self._closing or self._request or self._full or not self._waiting:
            return
        request = self._request = self._waiting.popleft()
        self._keep = request.keep_alive
        request.streamed = not request.complete
        try:
            if request.refusal:
                raise request.refusal
            if request.passes:
                if self._router.draining:
                    raise NotReady("the router is stopping")
                self._exchange = Exchange(self._router, self, request)
                self._exchange.start()
            else:
                self._router.answer(self, request)
        except ServingError as error:
            self.fail(error)
        except Exception:
            self.broken()

    def broken(self) -> None:
        """Something failed that nobody foresaw. To be called while that is handled."""
        self._give_up(errors.unforeseen())

    def _give_up(self, error: ServingError) -> None:
        """End the answer that is under way: with an error, or in the middle where it has begun."""
        if self._exchange:
            self._exchange.cancel()
            if self._exchange.begun:
                self.transport.abort()
                return
        self.fail(error)

    def hold(self, hold: bool) -> None:
        """Stop reading, or go on."""
        if hold is not self._held and not self.transport.is_closing():
            self._held = hold
            (self.transport.pause_reading if hold else self.transport.resume_reading)()

    def passed_on(self) -> None:
        """What had come of a streamed body is sent on: the next may come."""
        self._count(self._request)
        self.hold(False)

    def begin(self, lines: list[bytes], keep: bool, body: bytes) -> None:
        """Send an answer's head, its lines, and what is there of its body. keep: whether another
        answer may follow.
        """
        assert self._request
        self._keep = self._keep and keep
        lines.append(b"%b: %b" % (REQUEST_ID, self._request.id))
        if not self._keep:
            lines.append(b"connection: close")
        self.transport.write(b"\r\n".join((*lines, b"", body)))

    def whole(self, status: int, kind: bytes, body: bytes, *more: bytes) -> None:
        """Answer with this body. more: further lines of the head."""
        request = self._request
        assert request
        if self._closing:  # it has left in the meantime
            return
        phrase = http.HTTPStatus(status).phrase.encode()
        lines = [b"HTTP/1.1 %d %b" % (status, phrase), b"content-type: " + kind]
        lines += [b"content-length: %d" % len(body), *more]
        self.begin(lines, request.complete, b"" if request.method == b"HEAD" else body)
        self.done(request.complete)

    def fail(self, error: ServingError) -> None:
        """Answer with an error, in the shape of the path's API."""
        assert self._request
        path = self._request.path
        status = errors.status(error, path)
        more = [f"{name}: {value}".encode() for name, value in errors.headers(error).items()]
        self.whole(status, b"application/json", errors.body(error, path), *more)

    def done(self, keep: bool) -> None:
        """The answer is written."""
        self._exchange = None
        request, self._request = self._request, None
        if request:
            request.body = bytearray()
            self._count(request)
        self.touched = time.monotonic()
        if self._closing:
            return
        if not (keep and self._keep):
            self._close(bool(request and request.keep_alive))
            return
        if len(self._waiting) < PIPELINE:
            self.hold(False)
        self._invite()
        if self._waiting:
            # Not at once: a client with many requests in one packet is no reason to recurse.
            asyncio.get_running_loop().call_soon(self._next)

    def _invite(self) -> None:
        """Ask for a body that the client keeps until it is asked, when its turn has come."""
        request = self._reading
        if self._closing or self._deaf or self._request or self._waiting:
            return
        if request and request.expects:
            request.expects = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _count(self, request: Request | None) -> None:
        """Keep count of the bytes of bodies that are held."""
        if request:
            self._router.buffered += len(request.body) - request.counted
            request.counted = len(request.body)

    def _refuse(self, error: ServingError) -> None:
        """Answer what was read before, then this, and close."""
        self._deaf = True
        request = self._reading or Request()
        if not request.method:
            request.heads_in(b"GET", "1.1", keep_alive=False)
        request.refusal = error
        if request is self._request:
            self._give_up(error)
            return
        if request not in self._waiting:
            self._waiting.append(request)

    def _close(self, sending: bool) -> None:
        """End the connection once what was written is sent, and the client has read it. sending:
        whether the client may not know yet that it ends.
        """
        self._closing = True
        if not (sending or self._reading or self._deaf):
            self.transport.close()
            return
        # Closed with something unread, the connection would be reset, and the answer lost.
        self.hold(False)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.transport.close)

    def overdue(self, now: float, limit: float) -> None:
        """Close it if nothing has come for too long. Then break it off if it does not end."""
        if self._request or now - self.touched < limit:
            return
        if self._closing:
            self.transport.abort()
            return
        self._closing = True
        self.touched = now
        self.transport.close()
