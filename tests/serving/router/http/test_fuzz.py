# SPDX-License-Identifier: Apache-2.0
"""Random HTTP, from clients and from replicas, on both event loops.

Another implementation of HTTP (h11) checks the messages that replicas and clients get. In ordinary
runs the examples are the same; SLIPWAY_FUZZ=30 tries thirty times as many.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import h11
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from serving.http.http1 import AHEAD
from serving.protocol import REQUEST_ID
from serving.router import router as module
from serving.router.http import buffers, downstream
from serving.router.http.upstream import HOP_BY_HOP
from serving.router.placement import Timeouts
from tests.fuzzing import examples
from tests.serving.router.conftest import END, STREAM, Routed, chunk, close, whole
from tests.support.harness.wait import until_async

BUFFER = 600  # so that some bodies are streamed
LIMIT = 20_000
STALL_S = 0.3
NUMBER = b"x-number"  # of a request, and of its answer
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

Headers = list[tuple[bytes, bytes]]


# Messages


class Message(NamedTuple):
    """A request or an answer as it is sent. ends: whether its connection ends after it. shown: the
    headers that must arrive.
    """

    first: tuple[bytes, bytes]  # method and target, or status and nothing
    data: bytes
    body: bytes = b""
    ends: bool = False
    shown: tuple[tuple[bytes, bytes], ...] = ()


tokens = st.sampled_from([b"X-Some", b"x-other", b"Accept", b"traceparent", b"X-A!#$%&'*+-.^_`|~9"])
values = st.sampled_from([b"", b"1", b"a b", b"\x80\xff", b'"a, b"', b"x" * 200, b"a:b"])
headers = st.lists(st.tuples(tokens, values), max_size=4)
bodies = st.one_of(
    st.binary(max_size=40),
    st.integers(1, 5_000).map(lambda size: random.Random(size).randbytes(size)),
    st.just(b"0\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n"),
)
cuts = st.lists(st.integers(1, 400), max_size=12)


def parts(data: bytes, sizes: list[int]) -> list[bytes]:
    """The data cut into pieces of these sizes, and the rest."""
    found = []
    for size in sizes:
        found.append(data[:size])
        data = data[size:]
    return [part for part in [*found, data] if part]


def written(first: bytes, lines: Headers, body: bytes) -> bytes:
    head = b"".join(b"%b:%b%b\r\n" % (name, b" " * (len(name) % 3), it) for name, it in lines)
    return first + b"\r\n" + head + b"\r\n" + body


@st.composite
def chunked(draw: Any, body: bytes) -> bytes:
    extension, trailer = draw(st.sampled_from([b"", b";a", b';a="b"'])), draw(st.booleans())
    pieces: list[bytes] = [
        b"%X%b\r\n%b\r\n" % (len(part), extension, part) for part in parts(body, draw(cuts))
    ]
    end = b"0\r\nx-trailer: 1\r\n\r\n" if trailer else END
    return b"".join(pieces) + end


PASSED = [
    (b"POST", b"/v1/completions"),
    (b"POST", b"/v1/chat/completions?a=b%2f&c=../d"),
    (b"POST", b"/invocations"),
    (b"POST", b"/models/%2e%2e/invoke"),
    (b"GET", b"/v1/models"),
    (b"HEAD", b"/v1/models"),
    (b"GET", b"/execution-parameters"),
]
OWN = {
    (b"GET", b"/ping"): b"200",
    (b"HEAD", b"/replicas"): b"200",
    (b"POST", b"/nowhere"): b"404",
    (b"GET", b"/invocations"): b"405",
}
numbers = itertools.count()


@st.composite
def requests(draw: Any) -> Message:
    method, target = first = draw(st.sampled_from([*PASSED, *PASSED, *OWN]))
    body = draw(bodies) if method == b"POST" or draw(st.booleans()) else b""
    if first in OWN:
        body = body[:BUFFER]
    shown = [*draw(headers), (NUMBER, b"%09d" % next(numbers))]  # cuts are drawn from its length
    own: Headers = [(b"Host", b"any"), (b"TE", b"trailers")]
    version = draw(st.sampled_from([b"1.1"] * 9 + [b"1.0"]))
    ends = version == b"1.0" or draw(st.integers(0, 9)) == 9
    if ends and draw(st.booleans()) and version == b"1.1":
        own += [(b"Connection", b"x-hop"), (b"Connection", b"close, X-Hop-2")]
        own += [(b"X-Hop", b"1"), (b"x-hop-2", b"2")]
    elif ends and version == b"1.1":
        own.append((b"Connection", b"close"))
    elif draw(st.booleans()):
        own.append((b"Connection", b"keep-alive"))
    if draw(st.booleans()):
        own.append((b"Expect", b"100-continue"))
    sent = body
    if version == b"1.1" and draw(st.booleans()):
        own.append((b"Transfer-Encoding", b"chunked"))
        sent = draw(chunked(body))
    elif body or draw(st.booleans()):
        own.append((b"Content-Length", b"%d" % len(body)))
    line = b"%b %b HTTP/%b" % (method, target, version)
    return Message(
        first, written(line, draw(st.permutations(own)) + shown, sent), body, ends, (*shown,)
    )


@st.composite
def answers(draw: Any, method: bytes) -> Message:
    status = draw(st.sampled_from([200, 200, 200, 201, 204, 304, 400, 404, 500]))
    shown = draw(headers)
    own: Headers = [(b"Keep-Alive", b"timeout=5"), (b"X-Request-Id", b"not this")]
    bodiless = method == b"HEAD" or status in (204, 304)
    body = b"" if bodiless else draw(bodies)
    ends, sent = draw(st.booleans()), body
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.0"]))
    if ends and version == b"1.1":
        own.append((b"Connection", b"close"))
    if framing == "chunked" and version == b"1.1" and not bodiless:
        own.append((b"Transfer-Encoding", b"chunked"))
        sent = draw(chunked(body))
    elif framing == "length" and status != 204:
        own.append((b"Content-Length", b"%d" % (len(body) or 7 * bodiless)))
    else:
        ends = ends or not bodiless
    interim = draw(st.lists(st.sampled_from([b"100 C", b"102 P", b"103 E"]), max_size=2))
    before = b"".join(written(b"HTTP/1.1 " + it, [(b"x-early", b"1")], b"") for it in interim)
    line = b"HTTP/%b %d %b" % (version, status, draw(st.sampled_from([b"OK", b"", b"a: b"])))
    return Message(
        (b"%d" % status, b""),
        before + written(line, [*own, *shown, (NUMBER, b"%(number)b")], sent),
        body,
        ends or version == b"1.0",
        (*shown,),
    )


@st.composite
def exchanges(draw: Any) -> tuple[Message, Message, list[int]]:
    """A request, its answer, and the places where the answer is cut."""
    request = draw(requests())
    if request.first in OWN:
        return request, Message((OWN[request.first], b""), b""), []
    return request, draw(answers(request.first[0])), draw(cuts)


@st.composite
def mutated(draw: Any, data: bytes) -> bytes:
    """The data with some bytes changed, removed or doubled."""
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        size = draw(st.sampled_from([1, 1, 1, 2, 5, 50]))
        middle = data[place : place + size]
        kind = draw(st.sampled_from(["flip", "insert", "delete", "twice"]))
        if kind == "flip":
            middle = bytes(byte ^ (1 << draw(st.integers(0, 7))) for byte in middle)
        elif kind == "insert":
            odd = st.sampled_from(
                [b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\x80", b"9", b"\r\n\r\n"]
            )
            middle = draw(st.one_of(st.binary(min_size=1, max_size=4), odd)) + middle
        elif kind == "delete":
            middle = b""
        else:
            middle *= 2
        data = data[:place] + middle + data[place + size :]
    return data


# The world that they are sent in


class Got(NamedTuple):
    """A message as h11 has read it."""

    first: tuple[bytes, bytes]
    headers: Headers
    body: bytes


class Replica:
    """Gives a request with a planned answer that answer, found by its number; other requests get a
    plain one.
    """

    def __init__(self) -> None:
        self.plans: dict[bytes, tuple[bytes, list[int], bool]] = {}
        self.got: list[Got] = []
        self.faults: list[Exception] = []

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.tasks: set[asyncio.Task[None] | None] = set()
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        await close(self.server)
        for task in self.tasks:
            if task:
                task.cancel()
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self.tasks.add(task)
        rest = b""
        try:
            while True:
                parser = h11.Connection(h11.SERVER)
                got = await read(parser, reader, rest)
                if got is None:
                    break
                rest = parser.trailing_data[0]
                if rest:
                    raise h11.RemoteProtocolError("more than one request came")
                if await self._answer(got, writer):
                    break
        except h11.RemoteProtocolError as error:
            self.faults.append(error)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.tasks.discard(task)
            writer.close()

    async def _answer(self, got: Got, writer: asyncio.StreamWriter) -> bool:
        """Answer a request. Returns whether the connection ends."""
        number = dict(got.headers).get(NUMBER)
        if number is None:
            writer.write(whole(200, b"{}"))
            return False
        self.got.append(got)
        if number not in self.plans:
            writer.write(whole(200, number))
            return False
        data, sizes, ends = self.plans[number]
        for part in parts(data.replace(b"%(number)b", number), sizes):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        return ends


async def read(parser: h11.Connection, reader: asyncio.StreamReader, data: bytes) -> Got | None:
    """The next message, or None if the connection ends before it is complete."""
    first, found, body = (b"", b""), [], b""
    ended = False
    if data:
        parser.receive_data(data)
    while True:
        try:
            event = parser.next_event()
        except h11.RemoteProtocolError:
            if ended:
                return None  # in the middle of a message
            raise
        if event is h11.NEED_DATA:
            data = await reader.read(65_536)
            ended = not data
            parser.receive_data(data)
        elif isinstance(event, h11.Request):
            first, found = (event.method, event.target), [*event.headers]
        elif isinstance(event, h11.Response):
            first, found = (b"%d" % event.status_code, b""), [*event.headers]
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return Got(first, found, body)
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            return None


class World(Routed):
    """A router with two such replicas, in a separate event loop."""

    def __init__(self, runner: asyncio.Runner, patched: pytest.MonkeyPatch) -> None:
        self.runner = runner
        self.patched = patched
        self.replica = Replica()  # this one is both
        self.faults: list[dict[str, Any]] = []

    def patience(self, seconds: float) -> None:
        """How long the router waits for clients and replicas."""
        timeouts = Timeouts(seconds, seconds)  # type: ignore[arg-type]
        self.router.routing = dataclasses.replace(self.router.routing, timeouts=timeouts)
        for name in ("KEEP_ALIVE_S", "HEAD_S", "BEHIND_S"):
            self.patched.setattr(downstream, name, seconds)

    def run(self, work: Awaitable[None], patience: float = 20.0) -> None:
        async def watched() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: self.faults.append(context))
            async with asyncio.timeout(30):
                await work
            await self.settled()

        self.patience(patience)
        self.replica.plans.clear()
        self.replica.got.clear()
        self.runner.run(watched())

    async def settled(self) -> None:
        """Wait until the router has freed everything that belongs to the messages sent."""
        router = self.router

        def nothing() -> bool:
            loads = [(it.in_flight, it.queued) for it in router.pool.replicas]
            return not (
                router.proxied
                or router.clients
                or router.buffers.bodies
                or router.buffers.heads
                or router.connections.idle
                or any(map(any, loads))
            )

        await until_async(nothing)
        assert not self.faults
        assert not self.replica.faults

    async def talk(self, data: list[bytes], methods: list[bytes]) -> list[Got]:
        """Send the data, and read the answers to these requests, until the connection ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)

        async def send() -> None:
            for part in data:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        rest = b""
        found: list[Got] = []
        try:
            for method in methods:
                parser = h11.Connection(h11.CLIENT)
                parser.send(h11.Request(method=method, target=b"/", headers=[(b"host", b"x")]))
                parser.send(h11.EndOfMessage())
                got = await read(parser, reader, rest)
                if got is None:
                    return found
                found.append(got)
                rest = parser.trailing_data[0]
            with contextlib.suppress(ConnectionError):  # if it is still sending
                assert not rest + await reader.read(), found
            return found
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            writer.close()

    async def serves(self) -> None:
        """Check that the next client is served."""
        self.patience(20.0)
        data = b"POST /v1/completions HTTP/1.1\r\nx-number: plain\r\nconnection: close\r\n"
        (got,) = await self.talk([data + b"content-length: 2\r\n\r\nHi"], [b"POST"])
        assert (got.first[0], got.body) == (b"200", b"plain")


@pytest.fixture(scope="module", params=[*LOOPS])
def world(request):
    with (
        pytest.MonkeyPatch.context() as patched,
        asyncio.Runner(loop_factory=LOOPS[request.param]) as runner,
    ):
        patched.setattr(buffers, "MAX_BODY", BUFFER)
        patched.setattr(downstream, "LINGER_S", 0.4)
        patched.setattr(module, "SWEEP_S", 0.05)
        it = World(runner, patched)

        async def start() -> None:
            urls = ",".join([await it.replica.start()])
            Routed.__init__(
                it,
                [],
                {
                    "router_replicas": urls,
                    "max_request_size": LIMIT,
                },
            )
            await it.ready(1)

        async def stop() -> None:
            await it.client.aclose()
            it.router.stop()
            it.router.stop()
            await it.task
            await it.replica.stop()

        runner.run(start())
        yield it
        runner.run(stop())


def expected(talks: list[tuple[Message, Message, list[int]]]) -> list[tuple[Message, Message]]:
    """The pairs that are answered: all until one ends the connection."""
    found = []
    for request, answer, _ in talks:
        found.append((request, answer))
        unframed = answer.data and not any(
            it in answer.data.partition(b"%(number)b")[0]
            for it in (b"Content-Length", b"Transfer-Encoding")
        )
        bodiless = request.first[0] == b"HEAD" or answer.first[0] in (b"204", b"304")
        if request.ends or (unframed and not bodiless):
            break
    return found


def end_to_end(got: Headers) -> Headers:
    own = {*HOP_BY_HOP, b"host", b"content-length", b"expect", REQUEST_ID}
    return [(name, it) for name, it in got if name not in own]


LAST = b"GET /ping HTTP/1.1\r\nconnection: close\r\n\r\n"


@examples(50)
@given(
    st.lists(st.tuples(st.lists(exchanges(), min_size=1, max_size=6), cuts), min_size=1, max_size=4)
)
def test_each_client_gets_its_answers_and_replicas_what_was_sent(world, clients):
    async def one(talks: list[tuple[Message, Message, list[int]]], sizes: list[int]) -> None:
        answered = expected(talks)
        closes = len(answered) < len(talks) or talks[-1][0].ends
        data = b"".join(request.data for request, _, _ in talks) + LAST * (not talks[-1][0].ends)
        methods = [request.first[0] for request, _ in answered]
        found = await world.talk(parts(data, sizes), methods if closes else [*methods, b"GET"])
        for (request, answer), got in zip(answered, found[: len(answered)], strict=True):
            assert (got.first, got.body if answer.data else b"") == (answer.first, answer.body)
            if answer.data:
                shown = [(name.lower(), it) for name, it in answer.shown]
                assert end_to_end(got.headers) == [*shown, request.shown[-1]]
            assert [name for name, _ in got.headers].count(REQUEST_ID) == 1
        sent = {request.shown[-1]: request for request, answer in answered if answer.data}
        for number, request in sent.items():
            (got,) = [it for it in world.replica.got if number in it.headers]
            assert (got.first, got.body) == (request.first, request.body)
            assert end_to_end(got.headers) == [(name.lower(), it) for name, it in request.shown]
        for request, _, _ in talks[len(answered) :]:
            assert not [it for it in world.replica.got if request.shown[-1] in it.headers]

    async def work() -> None:
        for talks, _ in clients:
            for request, answer, sizes in talks:
                world.replica.plans[request.shown[-1][1]] = answer.data, sizes, answer.ends
        await asyncio.gather(*(one(*it) for it in clients))

    world.run(work())


async def end(world: World, data: list[bytes]) -> None:
    """Send the data, and wait for the end of the connection, whatever comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    try:
        for part in data:
            writer.write(part)
            await asyncio.sleep(0)
        async with asyncio.timeout(15):
            while await reader.read(65_536):
                pass
    except ConnectionError:
        pass
    finally:
        writer.close()


@examples(4)
@given(
    st.lists(
        st.tuples(
            st.lists(requests(), min_size=1, max_size=3)
            .map(lambda found: b"".join(it.data for it in found))
            .flatmap(mutated),
            cuts,
        ),
        min_size=40,
        max_size=40,
    )
)
def test_broken_requests(world, clients):
    async def work() -> None:
        await asyncio.gather(*(end(world, parts(data, sizes)) for data, sizes in clients))
        await world.serves()

    world.run(work(), STALL_S)


@examples(4)
@given(
    st.lists(
        st.tuples(
            answers(b"POST").map(lambda it: it.data).flatmap(mutated),
            cuts,
            st.booleans(),
            st.sampled_from([b"1.1", b"1.0"]),
        ),
        min_size=40,
        max_size=40,
    )
)
def test_broken_answers(world, plans):
    async def work() -> None:
        sent = []
        for data, sizes, ends, version in plans:
            number = b"%d" % next(numbers)
            world.replica.plans[number] = data, sizes, ends
            form = b"POST /invocations HTTP/%b\r\nx-number: %b\r\ncontent-length: 2\r\n\r\nHi"
            sent.append([form % (version, number)] * 2)
        await asyncio.gather(*(end(world, it) for it in sent))
        await world.serves()

    world.run(work(), STALL_S)


HEAD = b"POST /v1/completions HTTP/1.1\r\nx-number: first\r\n"
HIDDEN = b"GET /v1/models HTTP/1.1\r\nx-number: hidden\r\n\r\n"


SHAPES = [
    HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n" + END,
    HEAD + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n" + END,
    HEAD + b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % len(HIDDEN),
    HEAD + b"content-length: 0, 0\r\n\r\n",
    HEAD + b"content-length: +0\r\n\r\n",
    HEAD + b"content-length: 0x0\r\n\r\n",
    HEAD + b"content-length : %d\r\n\r\n" % len(HIDDEN),
    HEAD + b"transfer-encoding : chunked\r\n\r\n" + END,
    HEAD + b"transfer-encoding: xchunked\r\n\r\n" + END,
    HEAD + b"transfer-encoding:\tchunked\r\n\r\n" + END,
    HEAD + b"transfer-encoding:\x0bchunked\r\n\r\n" + END,
    HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + END,
    HEAD + b"transfer-encoding: chunked, identity\r\n\r\n" + END,
    HEAD + b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\n" + END,
    HEAD + b"x: y\r\n transfer-encoding: chunked\r\n\r\n" + END,
    HEAD + b"x: y\ntransfer-encoding: chunked\r\n\r\n" + END,
    HEAD + b"x: y\rtransfer-encoding: chunked\r\n\r\n" + END,
    HEAD + b"transfer-encoding: chunked\r\n\r\n0;\n\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n0\n\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n00000000000000000\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\naa" + END,
    HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\ncontent-length: 4\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx-number: trailer\r\n\r\n",
    HEAD.replace(b"\r\n", b"\n") + b"\n",
    HEAD + b"x: a\0b\r\n\r\n",
    HEAD + b"x\0: b\r\n\r\n",
    HEAD + b"x y: b\r\n\r\n",
    HEAD + b" x: b\r\n\r\n",
    HEAD + b"x\x80: b\r\n\r\n",
    HEAD + b"x: \x80\xff\r\n\r\n",
    HEAD + b": b\r\n\r\n",
    HEAD + b"no colon\r\n\r\n",
    HEAD + b"connection: content-length, x-number\r\ncontent-length: 0\r\n\r\n",
    HEAD + b"connection: upgrade\r\nupgrade: x\r\ncontent-length: 4\r\n\r\nabcd",
    b"\r\n" + HEAD + b"connection: upgrade\r\nupgrade: x\r\ncontent-length: 4\r\n\r\nabcd",
    HEAD.replace(b" /v1", b" http://any/v1") + b"\r\n",
    HEAD.replace(b" /v1", b" HTTP://any:1@b/v1") + b"\r\n",
    HEAD.replace(b" /v1", b" http://any?/v1") + b"\r\n",
    HEAD.replace(b"/v1/", b"/v1%2f") + b"\r\n",
    HEAD.replace(b"/v1/", b"/v1/../v1/") + b"\r\n",
    HEAD.replace(b"/v1/", b"//v1/") + b"\r\n",
    HEAD.replace(b"/v1/", b"/v1/\x80") + b"\r\n",
    HEAD.replace(b"/v1/", b"/v1/\0") + b"\r\n",
    HEAD.replace(b" HTTP", b"?a b HTTP") + b"\r\n",
    HEAD.replace(b" HTTP", b"?a\rb HTTP") + b"\r\n",
    HEAD.replace(b"HTTP/1.1", b"HTTP/0.9") + b"\r\n",
    HEAD.replace(b"HTTP/1.1", b"HTTP/2.0") + b"\r\n",
    HEAD.replace(b"HTTP/1.1", b"HTTP/1.10") + b"\r\n",
    HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"transfer-encoding: chunked\r\n\r\n" + END,
    HEAD.replace(b" HTTP/1.1", b"") + b"\r\n",
]


def test_requests_that_proxies_and_servers_may_read_otherwise(world):
    """A replica gets one request, or none. (`world` checks how it is written.)"""

    async def one(number: bytes, data: bytes) -> None:
        await end(world, [data.replace(b"first", number) + HIDDEN])
        got = [it for it in world.replica.got if (NUMBER, number) in it.headers]
        assert len(got) <= 1, data
        assert all(it.first[1] in (b"/v1/completions", b"/v1/completions?a") for it in got), data
        assert not any(name == b"transfer-encoding" for it in got for name, _ in it.headers), data
        assert not any(it.body.startswith(b"GET") for it in got), data

    async def work() -> None:
        sent = {b"%d" % next(numbers): data for data in SHAPES}
        await asyncio.gather(*(one(*it) for it in sent.items()))
        known = {*sent, b"hidden"}
        assert all(known & {value for _, value in it.headers} for it in world.replica.got)
        await world.serves()

    world.run(work(), STALL_S)


def test_what_follows_a_streamed_body_is_not_part_of_it(world):
    async def work() -> None:
        big = chunk(b"x" * 2 * BUFFER)
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        world.replica.plans[b"first"] = (
            STREAM.replace(b"\r\n", b"\r\nx-number: 1\r\n", 1),
            [],
            False,
        )
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + big)
        await asyncio.sleep(0.02)
        writer.write(END)
        await asyncio.sleep(0.02)
        for place in range(len(HIDDEN)):
            if writer.is_closing():
                break
            writer.write(HIDDEN[place : place + 1])
            await asyncio.sleep(0.001)
        await reader.read()  # cut: the answer does not go on
        writer.close()

    world.run(work(), STALL_S)


def test_a_connection_with_half_a_request_on_it_is_not_used_again(world):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(whole(413, b"no"))
        seen.append(await reader.read())  # to the connection's end
        writer.close()

    seen: list[bytes] = []

    async def work() -> None:
        early = await asyncio.start_server(serve, "127.0.0.1", 0)
        (replica,) = world.router.pool.replicas
        port, replica.port = replica.port, early.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        body = b"x" * 2 * BUFFER
        writer.write(HEAD + b"content-length: 9999\r\n\r\n" + body)
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        replica.port = port
        writer.close()
        await world.serves()
        await until_async(lambda: seen == [body])
        await close(early)

    world.run(work())


@pytest.mark.parametrize(
    ("rest", "statuses"),
    [(b"zz\r\n", b"400"), (chunk(b"x" * LIMIT), b"413"), (b"", b"504 408")],
)
def test_a_streamed_body_that_goes_wrong(world, rest, statuses):
    """If both client and replica are silent, it depends on the moment whose time is over first."""

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"x" * 2 * BUFFER))
        await asyncio.sleep(0.02)
        writer.write(rest)
        assert (await reader.read()).split(b" ")[1] in statuses.split()
        writer.close()

    world.run(work(), STALL_S)


def test_what_comes_before_a_broken_request_is_answered(world):
    async def work() -> None:
        head = b"GET /v1/models HTTP/1.1\r\nx-number: %d\r\n\r\n"
        data = b"".join(head % n for n in range(5)) + b"nonsense\r\n\r\n" + HIDDEN
        found = await world.talk([data], [b"GET"] * 6)
        assert [it.first[0] for it in found] == [b"200"] * 5 + [b"400"]
        assert [it.body for it in found[:5]] == [b"%d" % n for n in range(5)]
        assert len(world.replica.got) == 5

    world.run(work())


def test_the_end_of_a_streamed_body_that_comes_with_nonsense(world):
    async def work() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"x" * 2 * BUFFER))
        await asyncio.sleep(0.02)
        writer.write(END + b"nonsense\r\n\r\n")
        await until_async(lambda: len(world.replica.got) == 1)
        writer.close()

    world.run(work())


def test_clients_are_asked_for_their_bodies_in_turn(world):
    async def work() -> None:
        world.replica.plans[b"slow"] = whole(200, b"slow"), [1] * 20, False
        slow = HEAD.replace(b"first", b"slow") + b"content-length: 0\r\n\r\n"
        expects = HEAD + b"expect: 100-continue\r\nconnection: close\r\ncontent-length: 2\r\n\r\n"
        for together in (True, False):
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            writer.write(slow)
            await asyncio.sleep(0 if together else 0.005)
            writer.write(expects)
            assert (await reader.readuntil(b"slow")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"Hi")
            assert (await reader.read()).endswith(b"\r\n\r\nfirst")
            writer.close()

    world.run(work())


@pytest.mark.parametrize("data", [b"GET /replicas HTTP/1.1\r\n\r\n" * 20_000, HIDDEN * 20_000])
def test_a_client_that_asks_and_does_not_read(world, data):
    """Neither its requests nor their answers are piled up."""

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1)
        writer.write(data)  # the reader stops at twice its limit
        most = 0
        for _ in range(60):
            await asyncio.sleep(0.005)
            for it in world.router.clients:
                assert len(it._waiting) <= AHEAD + downstream.PIPELINE
                most = max(most, it.transport.get_write_buffer_size())
        assert most < 200_000
        assert not reader.at_eof()
        writer.transport.abort()

    world.run(work())


@pytest.mark.parametrize("piece", [b"x-t: 1\r\n", b"x" * 20])
def test_trailers_without_end(world, piece):
    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx-t: ")
        for _ in range(20):
            writer.write(piece * 1_000)
            await asyncio.sleep(0.001)
        assert (await reader.read()).startswith(b"HTTP/1.1 4")
        writer.close()

    world.run(work())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nhello",
        b"HTTP/1.1 099 Early\r\ncontent-length: 0\r\n\r\n",
        whole(200, b"and") + whole(200, b"more"),
    ],
)
def test_answers_that_are_none(world, answer):
    async def work() -> None:
        world.replica.plans[b"first"] = answer, [], False
        got = await world.talk(
            [HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n"], [b"POST"]
        )
        assert got[0].first[0] == b"502"
        await world.serves()

    world.run(work())


def test_lines_before_an_answer(world):
    async def work() -> None:
        world.replica.plans[b"first"] = b"\r\n\r\n" + whole(200, b"late"), [], False
        got = await world.talk(
            [HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n"], [b"POST"]
        )
        assert (got[0].first[0], got[0].body) == (b"200", b"late")

    world.run(work())
