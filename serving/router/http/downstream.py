# SPDX-License-Identifier: Apache-2.0
"""A client's connection: HTTP/1.1 requests, answered one after the other in their order.

A connection is in one of three stages:

- OPEN: bytes are parsed and requests are answered in their order. An invalid request leads to
  REFUSED. CLOSING follows the last answer, or a client that left or was idle for too long.
- REFUSED: bytes are dropped. Waiting requests are answered, the last one with the refusal. CLOSING
  follows the last answer, or a client that left.
- CLOSING: bytes and waiting requests are dropped.

In OPEN, incoming bytes belong to one of three parts:

- between requests: `_start` collects bytes until a head is complete; only then does the parser read
  it.
- a head: `_headers` is a list. The parser has begun this head behind the end of another request.
- a body: `_reading` is the body's request, which may already be in progress.
"""

import asyncio
import enum
import http
import re
import time
from collections import deque
from collections.abc import Callable

import httptools

from serving import errors
from serving.errors import (
    HeadTooLarge,
    Malformed,
    Overloaded,
    ServingError,
    TooSlow,
    without_frames,
)
from serving.http.http1 import (
    AHEAD,
    BEHIND_S,
    HEAD_S,
    KEEP_ALIVE_S,
    LEAST_RATE,
    LINGER_S,
    MAX_HEAD,
    MAX_HEADERS,
    NO_CODING,
    NOT_HTTP,
    TOO_MANY_AHEAD,
)
from serving.http.sockets import Place
from serving.protocol import REQUEST_ID, ROUTER_PROBES
from serving.router.http.buffers import Buffers
from serving.router.http.flow import FlowControl
from serving.router.http.forwarded_request import Headers, Request, Rules
from serving.router.http.ports import Answering, Dispatch

PIPELINE = 16
"""Requests that a client may send ahead of their answers; then it is read no further. Further bytes
of a packet may be AHEAD.
"""

# Clients offer HTTP/2 with a request (RFC 7540, 3.2), and mean it to be answered if nobody takes
# them up on it. The parser would stop at the head.
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class Stage(enum.Enum):
    """The state of a connection: see the table above."""

    OPEN = enum.auto()
    REFUSED = enum.auto()
    CLOSING = enum.auto()


_OPEN, _REFUSED, _CLOSING = Stage  # in Python 3.11 a member takes a call of an enumeration


class Downstream(FlowControl):
    """A client's connection. It is the Responder of whatever answers its requests."""

    write: Callable[[bytes], None]
    """The transport's own, so that a chunk of an answer costs no call of ours."""

    def __init__(
        self,
        dispatch: Dispatch,
        rules: Rules,
        buffers: Buffers,
        place: Place,
        clients: set["Downstream"],
    ) -> None:
        """place: its place among the connections. clients: the open connections, including this
        one.
        """
        super().__init__()
        # shared by all connections
        self._dispatch = dispatch
        self._rules = rules
        self._buffers = buffers
        self._clients = clients
        # connection
        self._place = place
        self._retired = False  # whether it ends after the answer that is under way
        self._stage: Stage = _OPEN
        self._touched = time.monotonic()  # when it last became idle, or could go on
        # the request that is read
        self._parser = httptools.HttpRequestParser(self)
        self._start = b""
        self._start_at = 0.0  # when that began
        self._target = b""
        self._headers: Headers | None = None
        self._reading: Request | None = None
        self._body_due = 0.0  # when more of the body has to be here
        self._stuck = 0  # bytes since the head that is read began, or its body last came on
        # the requests that wait, and the one that is answered
        self._waiting: deque[Request] = deque()
        self._request: Request | None = None
        self._answering: Answering | None = None
        self._keep_alive = True  # whether another answer may follow

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write = self.transport.write
        self._clients.add(self)
        self._touched = time.monotonic()
        self._place.opened(self.transport, self._retire)

    def data_received(self, data: bytes) -> None:
        if self._stage is not _OPEN:
            return
        now = time.monotonic()
        if self._reading is None and self._headers is None:
            if not self._start:
                self._start_at = now
            data = self._start + data
            end = data.find(b"\r\n\r\n")
            if (len(data) if end < 0 else end) > MAX_HEAD:
                self._refuse(HeadTooLarge(MAX_HEAD))
                self._advance()
                return
            if end < 0:
                self._start = data
                return
            self._start = b""
            head = data[:end]
            if b"pgrade" in head or b"PGRADE" in head:
                data = _UPGRADE.sub(b"\r\nx-not-taken:", head) + data[end:]
        else:
            self._stuck += len(data)
            self._body_due = min(now + BEHIND_S, self._body_due + len(data) / LEAST_RATE)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # raised by on_...
            if not isinstance(cause, ServingError):
                cause = Malformed(NOT_HTTP)
            self._refuse(cause)
        else:
            if self._stuck > MAX_HEAD and self._incoming:
                self._refuse(HeadTooLarge(MAX_HEAD))
        self._advance()

    @property
    def _incoming(self) -> bool:
        """Whether the parser is in the middle of a request."""
        return self._reading is not None or self._headers is not None

    def _advance(self) -> None:
        """Process the received bytes."""
        if not self._request:
            self._answer_next()
        elif self._request.streamed and self._answering:
            self._answering.body_arrived()
        self._invite()
        if len(self._waiting) >= PIPELINE:
            self.pause()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answering:
            self._answering.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._touched = time.monotonic()
        if self._answering:
            self._answering.resume()
        self._answer_next()

    def connection_lost(self, exception: Exception | None) -> None:
        self._stage = _CLOSING
        self._clients.discard(self)
        self._place.release()
        for request in {self._reading, self._request, *self._waiting}:
            if request:
                request.release()
        self._waiting.clear()
        if self._answering:
            self._answering.cancel()
            self._answering = None
        self._parser = None  # type: ignore[assignment]  # it keeps this connection

    # called by the parser: data_received gets exceptions of these

    def on_message_begin(self) -> None:
        if len(self._waiting) >= AHEAD:
            raise Malformed(TOO_MANY_AHEAD)
        self._headers = []
        self._stuck = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self._headers
        if headers is not None:  # else it is a trailer
            if len(headers) == MAX_HEADERS:
                raise HeadTooLarge(MAX_HEAD)
            headers.append((name.lower(), value.rstrip()))

    def on_headers_complete(self) -> None:
        assert self._headers is not None
        parser = self._parser
        version = parser.get_http_version()
        request = self._reading = Request(
            parser.get_method(),
            self._target,
            version,
            self._headers,
            self._buffers,
            keep_alive=parser.should_keep_alive(),
        )
        self._target, self._headers = b"", None
        self._stuck = 0
        self._body_due = time.monotonic() + BEHIND_S
        self._place.busy()
        if request.path not in ROUTER_PROBES:
            if refusal := self._place.refusal:
                raise Overloaded(refusal)
            if self._buffers.heads_full:
                raise Overloaded(
                    "there are more requests than the router has memory for; try again"
                )
        if version not in ("1.0", "1.1") or parser.should_upgrade():
            raise Malformed(NOT_HTTP)
        if request.http10 and b"transfer-encoding" in request.named:
            raise Malformed(NO_CODING)
        if request.named.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise Malformed("Transfer-Encoding should be chunked, or left out")
        request.check(self._rules)

    def on_body(self, body: bytes) -> None:
        request = self._reading
        assert request
        self._stuck = 0
        room = request.receive(body)
        self._rules.check_size(request.path, request.size)
        if not room:
            if self._request is None and not self._waiting:
                self._waiting.append(request)
            elif self._request is not request:
                self.pause()

    def on_message_complete(self) -> None:
        request, self._reading = self._reading, None
        assert request
        request.end_body()
        if request is not self._request and request not in self._waiting:
            self._waiting.append(request)

    # handling of requests

    def _answer_next(self) -> None:
        """Answer the next request, if one has come, and the answers before were read."""
        if self._stage is _CLOSING or self._request or self.full or not self._waiting:
            return
        request = self._request = self._waiting.popleft()
        self._keep_alive = request.keep_alive and not self._retired
        request.take_turn()
        try:
            if request.refusal:
                raise request.refusal
            answering = self._answering = self._dispatch(self, request)
            if answering:
                answering.start()
        except ServingError as error:
            self.fail(without_frames(error))
        except Exception:
            self._give_up(errors.unforeseen())

    def _give_up(self, error: ServingError) -> None:
        """End the answer in flight: with an error, or in the middle if it has begun."""
        if self._answering:
            self._answering.cancel()
            if self._answering.begun:
                self.abort()
                return
        self.fail(error)

    def _invite(self) -> None:
        """Ask for a body that the client keeps until it is asked, when its turn has come."""
        request = self._reading
        if self._stage is not _OPEN or self._request or self._waiting:
            return
        if request and request.expects:
            request.invite()
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refuse(self, error: ServingError) -> None:
        """Answer the earlier requests, then this one, and close."""
        self._stage = _REFUSED
        request = self._reading
        if request is None:
            # Its head is not whole. Of it the answer has the id, and the shape of the path's API.
            headers = [header for header in self._headers or () if header[0] == REQUEST_ID]
            request = Request(
                *(b"GET", self._target, "1.1", headers, self._buffers),
                keep_alive=False,
                refusal=error,
            )
        request.refuse(error)
        if request is self._request:
            self._give_up(error)
        elif request not in self._waiting:
            self._waiting.append(request)

    def _retire(self) -> None:
        """Close after the answer in flight, or the answer to the request being read."""
        self._retired, self._keep_alive = True, False
        reading = self._start or self._incoming
        if self._stage is _OPEN and not (self._request or self._waiting or reading):
            self._close(sending=False)

    def _close(self, *, sending: bool) -> None:
        """End the connection once all writes are sent, and the client has read them. sending:
        whether the client may not know yet that it ends.
        """
        lingers = sending or self._incoming or self._stage is _REFUSED
        self._stage = _CLOSING
        if not lingers:
            self.transport.close()
            return
        self.resume()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.transport.close)

    # the Responder

    def start(self, lines: list[bytes], *, keep_alive: bool, body: bytes) -> None:
        assert self._request
        self._keep_alive = self._keep_alive and keep_alive
        lines.append(b"%b: %b" % (REQUEST_ID, self._request.id))
        if not self._keep_alive:
            lines.append(b"connection: close")
        self.transport.write(b"\r\n".join((*lines, b"", body)))

    def finish(self, *, keep_alive: bool) -> None:
        self._answering = None
        request, self._request = self._request, None
        assert request
        request.release()
        self._touched = self._start_at = time.monotonic()
        if self._stage is _CLOSING:
            return
        if not (self._waiting or self._incoming):
            self._place.idle()
        if not (keep_alive and self._keep_alive):
            self._close(sending=request.keep_alive)
            return
        if len(self._waiting) < PIPELINE:
            self.resume()
        self._invite()
        if self._waiting:
            # Not at once: a client with many requests in one packet is no reason to recurse.
            asyncio.get_running_loop().call_soon(self._answer_next)

    def respond(self, status: int, content_type: bytes, body: bytes, *lines: bytes) -> None:
        request = self._request
        assert request
        if self._stage is _CLOSING:  # the client has left in the meantime
            return
        phrase = http.HTTPStatus(status).phrase.encode()
        head = [b"HTTP/1.1 %d %b" % (status, phrase), b"content-type: " + content_type]
        head += [b"content-length: %d" % len(body), *lines]
        shown = b"" if request.method == b"HEAD" else body
        self.start(head, keep_alive=request.complete, body=shown)
        self.finish(keep_alive=request.complete)

    def fail(self, error: ServingError) -> None:
        assert self._request
        shape = errors.shape(self._request.path)
        lines = [f"{name}: {value}".encode() for name, value in errors.headers(error).items()]
        self.respond(shape.status(error), b"application/json", shape.body(error), *lines)

    def abort(self) -> None:
        self.transport.abort()

    # time limits

    def check_timeouts(self, now: float, elapsed: float) -> None:
        """End connections that have waited for too long. elapsed: seconds since the last check."""
        if self._stage is _OPEN:
            if self._incoming:
                self._check_body(now, elapsed)
                return
            if self._start:
                if not self._request and now - self._start_at > HEAD_S:
                    self._refuse(TooSlow(f"the request's head was not whole after {HEAD_S:g} s"))
                    self._advance()
                return
        if self._request or now - self._touched < KEEP_ALIVE_S:
            return
        if self._stage is _CLOSING:
            self.abort()
            return
        self._stage = _CLOSING
        self._touched = now
        self.transport.close()

    def _check_body(self, now: float, elapsed: float) -> None:
        waits = self._reading is not None and self._reading.expects
        if self.paused or waits:  # it is not the client that keeps us waiting
            self._body_due += elapsed
        elif now > self._body_due:
            self._refuse(TooSlow(f"the body comes at less than {LEAST_RATE} bytes a second"))
            self._advance()
