# SPDX-License-Identifier: Apache-2.0
"""The HTTP/1.1 of `serve`: uvicorn's connections, with limits of size, time and number.

The app answers invalid requests, like all other errors. If the head of a request cannot be read,
the request reaches the app with a `send` that has the error (bodies.Sender). If its body cannot be
read, `receive` raises the error.
"""

import asyncio
import contextlib
import socket
import urllib.parse
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import httptools
import uvicorn
from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveEvent,
    ASGISendEvent,
    HTTPResponseStartEvent,
)
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from serving import errors
from serving.errors import (
    HeadTooLarge,
    Malformed,
    NotReady,
    Overloaded,
    ServerFailed,
    ServingError,
    TooSlow,
    without_frames,
)
from serving.http.http1 import (
    AHEAD,
    BEHIND_S,
    CHUNK,
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
from serving.http.listener import Listener
from serving.http.patches import registry as patches
from serving.http.sockets import Connections, Place
from serving.http.tls import ServerTls
from serving.protocol import PROBES

STALL_S = 300.0
"""Seconds that a client may leave a waiting answer unread."""
JOINED = 64 * 1024
"""Most bytes of a body's first part that are copied, to be written together with the head."""


class HttpServer(uvicorn.Server):
    """Uvicorn's server, with our connections.

    most: the most connections. shutdown_s: seconds for the remaining answers at shutdown. tls: the
    certificate for clients. The caller handles signals: uvicorn would stop listening at once, and
    then wait without a limit. Raises Unfit if the installed uvicorn does not fit.
    """

    def __init__(self, app: Any, most: int, shutdown_s: int, tls: ServerTls) -> None:
        patches.apply()
        super().__init__(
            Config(
                app,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=shutdown_s,
            )
        )
        self._connections = Connections(most)
        self._tls = tls
        self._swept: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets

        def protocol(place: Place) -> Connection:
            return Connection(place, self.config, self.server_state, self.lifespan.state)

        self.servers = cast(
            list[asyncio.Server],
            [Listener(it, self._connections, protocol, self._tls) for it in sockets],
        )
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second; cheaper than a timer for each connection
            now = asyncio.get_running_loop().time()
            elapsed = now - (self._swept or now)
            self._swept = now
            for connection in [*self.server_state.connections]:
                cast(Connection, connection).overdue(now, elapsed)
        return await super().on_tick(counter)


class Connection(HttpToolsProtocol):
    """A client's connection: uvicorn's, with limits.

    It also differs from uvicorn's in three points. All pipelined requests learn that the client has
    disconnected. Trailers do not become headers. A request with an ignored Upgrade (RFC 9110, 7.8)
    is handled like any other.
    """

    def __init__(
        self,
        place: Place,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._place = place
        self._cycles: deque[Cycle] = deque()
        """Unanswered requests; the first is being answered."""
        self._reading = ""
        """The part that is being read: "head", "body", or "" between two requests."""
        self._waiting_since = self.loop.time()
        """When the head began, or the connection became idle."""
        self._answered = False
        self._unparsed = 0
        """Bytes since the head began, or since the last part of the body."""
        self._head = 0
        """Parsed bytes of the head."""
        self._upgrading = False
        """Whether the parser reads the same head again."""
        self._discarding = False
        """Whether further bytes are dropped."""
        self._due = 0.0
        """The deadline for the next part of the body."""
        self._unsent, self._stalled = 0, 0.0
        self._retired = False

    # the transport's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        self._place.opened(transport, self._retire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.release()
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]  # it keeps this connection

    def data_received(self, data: bytes) -> None:
        if self._reading == "body":
            latest = self.loop.time() + BEHIND_S
            self._due = min(latest, self._due + len(data) / LEAST_RATE)
        while data and not self._discarding:
            data = self._parse(data)

    def _parse(self, data: bytes) -> bytes:
        """Parse data. Returns the rest, which a new parser must read."""
        self._unparsed += len(data)
        try:
            self.parser.feed_data(data)
            if self._unparsed > MAX_HEAD:
                raise HeadTooLarge(MAX_HEAD)
        except httptools.HttpParserUpgrade as upgrade:
            if self._read_on():
                return data[upgrade.args[0] :]
            self._refuse(Malformed(NOT_HTTP))
        except HeadTooLarge as error:
            self._refuse(error)
        except httptools.HttpParserError as error:
            cause = error.__context__  # raised by on_...
            self._refuse(cause if isinstance(cause, ServingError) else Malformed(NOT_HTTP))
        return b""

    def _read_on(self) -> bool:
        """Continue after a head with an Upgrade, which stops the parser. A new parser first reads
        the same head without the Upgrade. Returns whether it can.
        """
        framing = (b"content-length", b"transfer-encoding")
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] in framing]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._upgrading = True
        try:
            self.parser.feed_data(b"".join((b"POST / HTTP/1.1\r\n", *lines, b"\r\n")))
        except httptools.HttpParserError:
            return False
        finally:
            self._upgrading = False
        return True

    # the parser's side: _parse() gets the exceptions that are raised here

    def on_message_begin(self) -> None:
        if self._upgrading:
            return
        super().on_message_begin()
        self._reading = "head"
        self._waiting_since = self.loop.time()
        self._head = 0

    def on_url(self, url: bytes) -> None:
        if not self._upgrading:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading == "head":  # otherwise it is a trailer
            self._count(len(name) + len(value) + 4)
            if len(self.headers) == MAX_HEADERS:
                raise HeadTooLarge(MAX_HEAD)
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD:
            raise HeadTooLarge(MAX_HEAD)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        if self._upgrading:
            return
        scope = self.scope
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Malformed(NOT_HTTP)
        if version == "1.0":
            self.expect_100_continue = False  # RFC 9110, 10.1.1
            if any(name == b"transfer-encoding" for name, _ in self.headers):
                raise Malformed(NO_CODING)
        url = httptools.parse_url(self.url)
        scope["raw_path"] = url.path
        scope["path"] = urllib.parse.unquote(url.path.decode("ascii"))
        scope["query_string"] = url.query or b""
        if scope["path"] not in PROBES and (refusal := self._place.refusal):
            raise Overloaded(refusal)
        if len(self._cycles) == AHEAD:
            raise Malformed(TOO_MANY_AHEAD)
        self._reading = "body"
        self._due = self.loop.time() + BEHIND_S
        self._take(version != "1.0" and self.parser.should_keep_alive())

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body follows
        self._unparsed = 0
        self._reading = ""
        super().on_message_complete()

    # requests and answers

    def _take(self, keep_alive: bool, refusal: ServingError | None = None) -> None:
        """Queue the request whose head was read; requests are answered in order. refusal: the error
        to answer with if the request cannot be read.
        """
        self.cycle = cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=keep_alive and not self._retired,
            on_response=self.on_response_complete,
        )
        cycle.refusal = refusal
        self._cycles.append(cycle)
        if len(self._cycles) == 1:
            self._place.busy()
            self._start_asgi_task(cycle, self.app)
        else:
            self.flow.pause_reading()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._answered = True
        self._cycles.popleft()
        if not self._cycles:
            self._become_idle()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._cycles:
            self._start_asgi_task(self._cycles[0], self.app)

    def _become_idle(self) -> None:
        self._waiting_since = self.loop.time()
        self._place.idle()

    def _refuse(self, error: ServingError) -> None:
        """Answer the request that is being read with an error, and stop reading."""
        self._discarding = True
        if self._reading == "body":
            cycle = cast(Cycle, self.cycle)
            if cycle.response_complete:
                self._linger()
                return
        else:
            if not self._reading:
                self.on_message_begin()
            self.expect_100_continue = False
            path = self.url.partition(b"?")[0].decode("latin-1")
            scope = cast(dict[str, Any], self.scope)
            scope["method"] = self.parser.get_method().decode() if path else "GET"
            scope.setdefault("path", path if path.startswith("/") else "/")
            scope |= {"raw_path": b"", "query_string": b""}
            self._take(keep_alive=False, refusal=without_frames(error))
            cycle = cast(Cycle, self.cycle)
        cycle.break_off(error, self._linger)

    def _linger(self) -> None:
        """Close, after the written bytes were sent and the client has had time to read them."""
        self.flow.resume_reading()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    # for the server

    def overdue(self, now: float, elapsed: float) -> None:
        """End whatever has taken too long. elapsed: seconds since the last call."""
        unsent = self.transport.get_write_buffer_size()
        self._stalled = self._stalled + elapsed if unsent and unsent == self._unsent else 0.0
        self._unsent = unsent
        if self._stalled > STALL_S:
            self.transport.abort()
        if self._discarding:
            return
        if self.flow.read_paused or (self.cycle and self.cycle.waiting_for_100_continue):
            self._due += elapsed
        elif self._reading == "body":
            if now > self._due:
                self._refuse(TooSlow(f"the body comes at less than {LEAST_RATE} bytes a second"))
        elif self._reading == "head":
            if now - self._waiting_since > HEAD_S:
                self._refuse(TooSlow(f"the request's head was not whole after {HEAD_S:g} s"))
        elif not self._cycles and now - self._waiting_since > (
            KEEP_ALIVE_S if self._answered else HEAD_S
        ):
            self.transport.close()

    def _retire(self) -> None:
        """Close after the answers in flight, and after the answer to the request that is being
        read.
        """
        self._retired = True
        if self._cycles:
            self._cycles[-1].keep_alive = False
        elif not self._reading:
            self.transport.close()

    def shutdown(self) -> None:
        """Close, now or after the answers in flight. It does not wait for a body."""
        if not self._cycles:
            self.transport.close()
            return
        self._cycles[-1].keep_alive = False
        if self._reading == "body" and not self.cycle.response_started:
            self._refuse(NotReady("the server is stopping"))


class Cycle(RequestResponseCycle):
    """A request and its answer."""

    _fault: ServingError | None = None
    _until_closed = False
    """Whether closing the connection ends the answer's body."""

    refusal: ServingError | None = None
    """Why the request cannot be read (Sender)."""

    async def run_asgi(self, app: ASGI3Application) -> None:
        async def with_sender(scope: Any, receive: Any, _: Any) -> None:
            await app(scope, receive, self)

        await super().run_asgi(with_sender)

    def __call__(self, message: ASGISendEvent) -> Awaitable[None]:
        """Call send()."""
        return self.send(message)

    async def send(self, message: ASGISendEvent) -> None:
        # Uvicorn also waits here. Otherwise _HeadHeld would take another write for the head.
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.transport.is_closing():  # uvloop refuses writes before it reports the disconnect
            self.disconnected = True
        if message["type"] == "http.response.start" and not self.response_started:
            self.transport = cast(asyncio.Transport, _HeadHeld(self))
            if self.scope["http_version"] == "1.0":
                self._end_with_connection(message)
        elif self._until_closed and not message.get("more_body"):
            self.expected_content_length = len(cast(dict[str, Any], message).get("body", b""))
        await super().send(message)
        held = isinstance(self.transport, _HeadHeld) and not self.disconnected
        if message["type"] == "http.response.body" and held:
            cast(_HeadHeld, self.transport).flush()  # the answer to HEAD has no body

    def _end_with_connection(self, message: HTTPResponseStartEvent) -> None:
        """End the body of an answer of unknown length with the connection. HTTP/1.0 has no other
        way (RFC 9112, 6.1), but uvicorn would send chunks.
        """
        headers = [it for it in message.get("headers", ()) if it[0].lower() != b"transfer-encoding"]
        message["headers"] = headers
        if message["status"] not in (204, 304) and b"content-length" not in dict(headers):
            self._until_closed = True
            self.chunked_encoding = False
            self.expected_content_length = 2**62

    def takes(self) -> bool:
        """Whether a part of the body can be written without waiting (Writer)."""
        return bool(self.chunked_encoding) and not (
            self.flow.write_paused
            or self.disconnected
            or self.response_complete
            or self.transport.is_closing()
        )

    def write(self, part: bytes) -> None:
        """Write a part of the body."""
        if part:  # an empty chunk would end the body
            self.transport.write(CHUNK % (len(part), part))

    def break_off(self, error: ServingError, close: Callable[[], None]) -> None:
        """Break off the body: `receive` raises the error. close: closes the connection after the
        answer is written.
        """
        self._fault = error
        self.keep_alive = False
        self.transport = cast(asyncio.Transport, _Closing(self.transport, close))
        self.message_event.set()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if self._fault and message["type"] == "http.request":
            self.message_event.set()  # for the next call
            raise self._fault
        return message

    async def send_500_response(self) -> None:
        error = ServerFailed("the server broke off the request")
        await errors.shape(self.scope["path"]).response(error)(
            cast(Any, self.scope), cast(Any, self.receive), cast(Any, self.send)
        )


class _HeadHeld:
    """A cycle's transport that holds an answer's head until the first part of its body, because two
    system calls take twice the time of one. Then the cycle gets its own transport back.
    """

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: bytes | None = None
        self.is_closing = self._transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
            return
        if self._transport.is_closing():  # uvloop would raise
            return
        if cast(object, self._cycle.transport) is self:
            self._cycle.transport = self._transport
        head, self._head = self._head, b""
        if len(data) > JOINED:
            self._transport.write(head)
            head = b""
        self._transport.write(head + data)

    def flush(self) -> None:
        self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()


class _Closing:
    """A cycle's transport whose close() calls `close` instead."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close
