# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 on the wire: unreadable requests, endless ones and slow ones. Only the engine is
a fake.
"""

import asyncio
import contextlib
import json
import logging
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.responses import JSONResponse

from lmi_config.options.declared import Settings
from serving.http import connections, sockets
from serving.http.http1 import MAX_HEAD
from serving.http.tls import ServerTls
from serving.server import server as server_module
from tests.serving.conftest import running
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
BODY = b'{"inputs":"a b"}'
POST = b"POST /invocations HTTP/1.1\r\nhost: x\r\n"
WHOLE = POST + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
PING = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n10\r\n" + BODY + b"\r\n"


class Connection:
    """A client's connection, used byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """The next answer's status, headers and body. The answer must declare its length."""
        async with asyncio.timeout(20):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            body = await self.reader.readexactly(int(headers["content-length"]))
        assert headers["content-type"] == "application/json"
        return int(first.split()[1]), headers, json.loads(body)

    async def closed(self) -> bool:
        """Wait for the connection's end. Returns whether no bytes came before it."""
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                return not await self.reader.read()
        return True


@contextlib.asynccontextmanager
async def connected(served):
    host, port = served.url.removeprefix("http://").split(":")
    connection = Connection(*await asyncio.open_connection(host, int(port)))
    try:
        yield connection
    finally:
        connection.writer.transport.abort()


def message(answer: Any) -> str:
    error = answer.get("error", answer)
    return error if isinstance(error, str) else error["message"]


# HTTP/1.0


@pytest.mark.parametrize(
    ("first", "lines", "body", "end"),
    [
        (b"POST /invocations", b"", b'{"inputs":"a b"}', b'{"generated_text":"b a"}'),
        (b"POST /invocations", b"", b'{"inputs":"a b","stream":true}', b"}\n"),
        (b"POST /invocations", b"connection: keep-alive\r\n", b'{"prompt":"a b"}', b"}"),
        (b"POST /v1/completions", b"te: trailers\r\n", b'{"prompt":"a b","stream":true}',
         b"data: [DONE]\n\n"),
        (b"POST /v1/completions", b"", b'{"prompt":"a fault b","stream":true}',
         b"data: [DONE]\n\n"),
        (b"POST /invocations", b"expect: 100-continue\r\n", b'{"inputs":"a b"}', b"b a\"}"),
        (b"POST /invocations", b"Expect: 100-Continue, x\r\n", b'{"inputs":"a b"}', b"b a\"}"),
        (b"POST /invocations", b"", b"", b"}"),
        (b"GET /ping", b"connection: keep-alive\r\n", b"", b"}"),
        (b"GET /v1/models", b"", b"", b"}"),
        (b"GET /metrics", b"", b"", b"\n"),
        (b"HEAD /ping", b"", b"", b"\r\n\r\n"),
        (b"GET /nowhere", b"", b"", b"}"),
    ],
)  # fmt: skip
async def test_a_client_of_http_1_0_gets_plain_bodies(shared, first, lines, body, end):
    """RFC 9112, 6.1: no chunks; RFC 9110, 10.1.1: no 100 Continue. The end of the connection ends
    the body.
    """
    async with connected(shared) as client:
        size = b"content-length: %d\r\n" % len(body) if body else b""
        client.send(first + b" HTTP/1.0\r\nhost: x\r\n" + size + lines + b"\r\n" + body + PING)
        async with asyncio.timeout(20):
            found = await client.reader.read()
    head, blank, content = found.partition(b"\r\n\r\n")
    assert b" 100 " not in head
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert (blank + content).endswith(end)
    assert found.count(b"HTTP/1.1 ") == 1  # the request that the client sent ahead is not answered
    assert not content[:1].isdigit()


async def test_a_body_in_chunks_is_none_in_http_1_0(shared):
    async with connected(shared) as client:
        client.send(CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n")
        status, _, answer = await client.answer()
        assert (status, await client.closed()) == (400, True)
        assert "HTTP/1.0 has no Transfer-Encoding" in message(answer)


# heads


@pytest.mark.parametrize(
    ("beginning", "more"),
    [
        (POST, b"x-long: " + b"a" * 8_000 + b"\r\n"),
        (POST, b"a:b\r\n" * 2_000),
        (POST + b"x-long: ", b"a" * 8_000),
        (POST, b"x" * 8_000),
        (b"GET /", b"a" * 8_000),
        (b"\r\n", b"\r\n" * 4_000),
        (CHUNKED + b"0\r\n", b"x-trailer: " + b"a" * 8_000 + b"\r\n"),
        (CHUNKED + b"1;", b"a" * 8_000),
    ],
    ids=["headers", "short", "value", "name", "url", "lines", "trailers", "extension"],
)
async def test_a_head_without_end_is_431(shared, beginning, more):
    async with connected(shared) as it:
        it.send(beginning)
        for _ in range(16 * MAX_HEAD // len(more)):  # more than is read at once
            it.send(more)
        status, headers, told = await it.answer()
        assert (status, headers["connection"]) == (431, "close")
        assert message(told) == "the request's line and headers are longer than 65536 bytes"
        assert await it.closed()
    assert (await shared.invoke({"inputs": "a"})).status_code == 200


async def test_a_head_that_is_whole_has_the_same_limit(shared):
    """Even if it comes in one packet."""
    for size, status in ((MAX_HEAD - 500, 200), (MAX_HEAD, 431)):
        answer = await shared.invoke({"inputs": "a"}, headers={"x-long": "a" * size})
        assert answer.status_code == status
    many = {f"x-{number}": "" for number in range(1_100)}
    assert (await shared.invoke({"inputs": "a"}, headers=many)).status_code == 431


async def test_ordinary_heads_pass(shared):
    headers = {f"x-{number}": "a" * 200 for number in range(200)}
    assert (await shared.invoke({"inputs": "a"}, headers=headers)).status_code == 200
    async with connected(shared) as it:
        for byte in WHOLE:
            it.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await it.answer())[0] == 200


# invalid HTTP


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\r\n\r\n",
        POST + b"content-length : 16\r\n\r\n" + BODY,
        POST + b"content-length: 16\r\ncontent-length: 3\r\n\r\n" + BODY,
        POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n10\r\n" + BODY,
        POST + b"transfer-encoding: chunked\r\n\r\nnonsense\r\n",
        POST + b"connection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: gzip\r\n\r\na",
        b"GET nowhere HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /adapters\r\n\r\n",
        b"GET /adapters HTTP/2.0\r\nhost: x\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_malformed_requests_are_told_in_json(shared, request_):
    async with connected(shared) as it:
        it.send(request_)
        status, headers, told = await it.answer()
        invocations = request_.startswith(b"POST /invocations")
        assert (status, headers["connection"]) == (400, "close")
        assert "x-request-id" in headers
        assert set(told) == ({"code", "error"} if invocations else {"code", "type", "message"})
        assert message(told) == "the request is not HTTP/1.1"
        assert await it.closed()


async def test_each_api_has_its_shape_for_them(shared):
    async with connected(shared) as it:
        it.send(b"POST /v1/completions?a HTTP/1.1\r\nhost : x\r\n\r\n")
        status, _, told = await it.answer()
    assert (status, told["error"]["code"]) == (400, 400)


async def test_what_was_asked_before_is_answered_before(shared):
    async with connected(shared) as it:
        it.send(WHOLE + b"nonsense\r\n\r\n")
        assert (await it.answer())[2] == {"generated_text": "b a"}
        assert (await it.answer())[0] == 400
        assert await it.closed()


async def test_malformed_requests_are_logged_and_counted(shared, caplog):
    caplog.set_level(logging.INFO, "serving.access")
    async with connected(shared) as it:
        it.send(POST + b"x-request-id: mine\r\na: b\r\nhost : x\r\n\r\n")
        assert (await it.answer())[1]["x-request-id"] == "mine"
    (record,) = [record for record in caplog.records if record.name == "serving.access"]
    facts = {key: record.facts[key] for key in ("method", "path", "status", "error")}
    assert list(facts.values()) == ["POST", "/invocations", 400, "Malformed"]


async def test_a_trailer_is_no_header(shared):
    """Gateways that replace a client's headers do not look at its trailers."""
    async with connected(shared) as it:
        it.send(CHUNKED + b"0\r\nx-request-id: from-the-trailer\r\n\r\n")
        status, headers, _ = await it.answer()
    assert status == 200
    assert headers["x-request-id"] != "from-the-trailer"


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
async def test_an_upgrade_is_not_taken_up(shared, protocol, caplog):
    """The request gets its normal answer, and the connection continues."""
    caplog.set_level(logging.INFO)
    upgrade = (
        b"connection: upgrade, http2-settings\r\nupgrade: %b\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n" % protocol
    )
    async with connected(shared) as it:
        it.send(b"GET /x HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n")
        assert (await it.answer())[0] == 404
        for _ in range(2):
            it.send(POST + upgrade + b"content-length: 16\r\n\r\n" + BODY[:5])
            it.send(BODY[5:] + PING)
            assert (await it.answer())[2] == {"generated_text": "b a"}
            assert (await it.answer())[0] == 200
        it.send(CHUNKED.replace(b"\r\n\r\n", b"\r\n" + upgrade + b"\r\n", 1) + b"0\r\n\r\n" + WHOLE)
        for _ in range(2):
            assert (await it.answer())[2] == {"generated_text": "b a"}
    await until_async(
        lambda: len([it for it in caplog.records if it.name == "serving.access"]) == 5
    )
    assert "Traceback" not in caplog.text


async def test_head_is_answered_where_get_is(shared):
    for path in ("/v1/models", "/execution-parameters", "/ping", "/metrics", "/kv_event_sources"):
        got, head = [await shared.client.request(it, path) for it in ("GET", "HEAD")]
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
    assert (await shared.client.head("/invocations")).status_code == 405


# several requests on one connection


@pytest.mark.parametrize(
    "request_",
    [
        WHOLE,
        PING,
        PING.replace(b"GET", b"HEAD"),
        WHOLE.replace(b"length: 16", b"length: 30").replace(b"}", b',"stream":true}'),
        PING.replace(b"ping", b"nowhere").replace(b"x\r\n", b"x\r\nconnection: close\r\n"),
        b"GET / HTTP/1.1\r\n: no name\r\n\r\n",
    ],
    ids=["answer", "ping", "head", "stream", "last", "refused"],
)
async def test_a_head_is_written_with_what_follows_it(shared, monkeypatch, request_):
    """The kernel takes twice as long for two writes."""
    written: list[bytes] = []

    class Kept:
        def __init__(self, transport: asyncio.Transport) -> None:
            self._transport = transport

        def write(self, data: bytes) -> None:
            written.append(data)
            self._transport.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

    made = connections.Connection.connection_made
    monkeypatch.setattr(
        *(connections.Connection, "connection_made"),
        lambda it, transport: made(it, cast(Any, Kept(transport))),
    )
    async with connected(shared) as client:
        client.send(request_)
        await until_async(lambda: written)
        head, _, body = written[0].partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 ")
        assert bool(body) != request_.startswith(b"HEAD")
        if b"connection: close" not in head:
            client.send(PING)
            await until_async(lambda: written[-1].startswith(b"HTTP/1.1 200 OK\r\n"))


async def test_what_is_written_as_the_client_leaves_is_no_fault(served, monkeypatch, caplog):
    """A transport of uvloop's that has just been closed refuses the write, before
    connection_lost.
    """
    closed = asyncio.Event()

    class Leaving:
        def __init__(self, transport: asyncio.Transport) -> None:
            self._transport = transport

        def write(self, data: bytes) -> None:
            if closed.is_set():
                raise RuntimeError("the handler is closed")
            self._transport.write(data)

        def is_closing(self) -> bool:
            return closed.is_set() or self._transport.is_closing()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

    made = connections.Connection.connection_made
    monkeypatch.setattr(
        *(connections.Connection, "connection_made"),
        lambda it, transport: made(it, cast(Any, Leaving(transport))),
    )
    body = b'{"inputs":"wait"}\n' * 2
    kind = b"content-type: application/jsonlines\r\n"
    async with connected(served) as it:
        it.send(POST + kind + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await until_async(lambda: served.engine.running == 2)
        closed.set()
        served.engine.gate.set()
        await until_async(lambda: served.engine.running == 0)
        assert await served.pipeline.admission.drained(60)
        await asyncio.sleep(0.1)
    assert "unexpectedly" not in caplog.text


async def test_a_client_that_leaves_ends_all_it_has_asked(shared):
    body = b'{"inputs":"wait"}'
    one = POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    async with connected(shared) as it:
        it.send(one * 3)
        await until_async(lambda: shared.engine.running == 1)
    await until_async(lambda: shared.engine.running == 0)
    assert await shared.pipeline.admission.drained(60)


async def test_there_is_a_limit_to_requests_ahead_of_their_answers(shared):
    async with connected(shared) as it:
        it.send(PING * 2_000)
        found: list[int] = []
        while not found or found[-1] == 200:
            found.append((await it.answer())[0])
        assert found[-1] == 400
        assert await it.closed()


# time


@pytest.fixture
async def hasty(anyio_backend, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 1.0)
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 2.0)
    monkeypatch.setattr(connections, "BEHIND_S", 1.0)
    monkeypatch.setattr(connections, "STALL_S", 1.0)
    async with running(max_request_size=10_000_000) as it:
        yield it


async def test_a_connection_on_which_nothing_comes_is_closed(hasty):
    async with connected(hasty) as silent, connected(hasty) as idle:
        idle.send(PING)
        assert (await idle.answer())[0] == 200
        assert await silent.closed()
        assert await idle.closed()


@pytest.mark.parametrize("trickles", [False, True])
async def test_a_head_that_is_not_sent_to_its_end_is_408(hasty, trickles):
    async with connected(hasty) as it:
        it.send(POST)
        if trickles:
            trickling = asyncio.create_task(trickle(it, b"x-a: b\r\n"))
        status, _, told = await it.answer()
        assert (status, message(told)) == (408, "the request's head was not whole after 1 s")
        if trickles:
            trickling.cancel()
        assert await it.closed()


async def trickle(connection, piece):
    while True:
        connection.send(piece)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("trickles", [False, True])
@pytest.mark.parametrize("path", [b"/invocations", b"/v1/completions"])
async def test_a_body_that_is_not_sent_to_its_end_is_408(hasty, trickles, path):
    async with connected(hasty) as it:
        it.send(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 20000\r\n\r\n{" % path)
        if trickles:
            trickling = asyncio.create_task(trickle(it, b" "))
        status, headers, told = await it.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert message(told) == "the body comes at less than 8192 bytes a second"
        if trickles:
            trickling.cancel()
        assert await it.closed()
    await until_async(lambda: not hasty.pipeline.admission.in_flight)


async def test_a_slow_body_is_waited_for(hasty):
    async with connected(hasty) as it:
        it.send(POST + b"content-length: 60000\r\n\r\n")
        for _ in range(25):  # 3 s, thrice the longest silence allowed
            it.send(b" " * 2_398)
            await asyncio.sleep(0.12)
        it.send(b" " * (50 - len(BODY)) + BODY)
        assert (await it.answer())[0] == 200


@pytest.mark.parametrize("waits", [False, True])
async def test_time_in_which_the_server_does_not_read_does_not_count(monkeypatch, waits):
    """waits: whether the client waits for a 100 Continue before it sends the body."""
    monkeypatch.setattr(connections, "BEHIND_S", 2.5)
    reads = asyncio.Event()

    async def app(scope, receive, send):
        await reads.wait()
        while (await receive())["more_body"]:
            pass
        await JSONResponse({})(scope, receive, send)

    server = connections.HttpServer(app, 20, 1, ServerTls(Settings()))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    port = listener.getsockname()[1]
    it = Connection(*await asyncio.open_connection("127.0.0.1", port))
    expect = b"expect: 100-continue\r\n" if waits else b""
    it.send(POST + expect + b"content-length: 1000000\r\n\r\n")
    it.send(b"" if waits else b"a" * 900_000)
    await asyncio.sleep(3)
    reads.set()
    if waits:
        assert b" 100 " in await it.reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(1.3)  # so that the server checks for late clients
    if waits:
        it.send(b"a" * 900_000)
    it.send(b"a" * 100_000)
    assert (await it.answer())[0] == 200
    it.writer.close()
    server.should_exit = True
    await serving


async def test_a_client_that_reads_nothing_is_let_go(hasty):
    """A stream that nobody reads would keep its place at the engine."""
    body = json.dumps({"prompt": ("a" * 50_000 + " ") * 100, "stream": True}).encode()
    async with connected(hasty) as it:
        it.writer.transport.pause_reading()
        for _ in range(4):
            it.send(POST + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        connections = hasty.server._http.server_state.connections
        await until_async(lambda: any(it.flow.write_paused for it in connections))
        await until_async(lambda: hasty.engine.running == 0)
        assert await hasty.pipeline.admission.drained(60)


async def test_a_body_that_is_being_sent_does_not_hold_up_the_end(served, caplog):
    async with connected(served) as it:
        it.send(POST + b"content-length: 1000\r\n\r\n{")
        await until_async(lambda: len(served.server._http.server_state.tasks) == 1)
        served.server.stop()
        status, _, told = await it.answer()
        assert (status, message(told)) == (503, "the server is stopping")
        assert await it.closed()
    await asyncio.wait_for(served.task, 15)
    assert "Cancel" not in caplog.text  # uvicorn logs this about tasks that it cancels


# number


@pytest.fixture
async def small(anyio_backend, monkeypatch):
    """A server that takes twenty connections."""
    monkeypatch.setattr(server_module, "most_connections", lambda queue: 20)
    async with running() as it:
        yield it


DESCRIPTORS = """
import resource, socket, sys
from types import SimpleNamespace
from lmi_config.options.declared import Settings
from serving.server.server import serve

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
with socket.create_server(("127.0.0.1", 0)) as taken:
    settings = Settings(port=taken.getsockname()[1])
    plan = SimpleNamespace(settings=settings)
    print(serve(SimpleNamespace(plan=plan, shared=None)).stage)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


def test_it_takes_as_many_descriptors_as_it_may():
    command = [sys.executable, "-c", DESCRIPTORS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("start\n", "")


@pytest.mark.parametrize(
    ("soft", "queue", "most"),
    [(20_000, 1_000, 8_192), (20_000, 4_000, 16_000), (1_024, 1_000, 768), (100, 1_000, 50)],
)
def test_some_descriptors_are_left(monkeypatch, soft, queue, most):
    monkeypatch.setattr(resource, "getrlimit", lambda of: (soft, soft))
    assert sockets.most_connections(queue) == most


async def test_silent_connections_keep_nobody_out(small):
    async with contextlib.AsyncExitStack() as kept:
        silent = [await kept.enter_async_context(connected(small)) for _ in range(200)]
        async with connected(small) as it:
            for request, status in ((PING, 200), (WHOLE, 200), (PING, 200)):
                it.send(request)
                assert (await it.answer())[0] == status
        assert all([await it.closed() for it in silent[:150]])
        assert not silent[-1].reader.at_eof()
    await small.client.get("/ping")


async def test_with_as_many_requests_as_connections_ping_is_answered(small):
    body = b'{"inputs":"wait"}'
    one = POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    async with contextlib.AsyncExitStack() as kept:
        busy = [await kept.enter_async_context(connected(small)) for _ in range(20)]
        for it in busy:
            it.send(one)
        await until_async(lambda: len(small.pipeline.admission.in_flight) == 20)
        for _ in range(100):
            async with connected(small) as it:
                it.send(PING)
                assert (await it.answer())[0] == 200
        silent = [await kept.enter_async_context(connected(small)) for _ in range(200)]
        async with connected(small) as it:
            it.send(PING)
            assert (await it.answer())[0] == 200
        async with connected(small) as it:
            it.send(WHOLE)
            status, headers, told = await it.answer()
            assert (status, headers["retry-after"]) == (503, "1")
            assert message(told) == "there are 20 connections, as many as the server accepts"
            assert await it.closed()
        assert len(silent) == 200
        small.engine.gate.set()
        assert {(await it.answer())[0] for it in busy} == {200}
