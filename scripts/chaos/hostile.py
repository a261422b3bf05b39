"""Hostile clients for `scripts/dev chaos --hostile`: what one client does to harm all the others.

Each attack is bounded in time and size, and goes to a server or to the router. What comes back has
to be a refusal or an answer in a documented shape; a connection that is closed is one too, where
the other side may not speak. Whether others were harmed is what the usual traffic shows, the watch
over /ping, and the memory afterwards.
"""

import asyncio
import base64
import contextlib
import functools
import gzip
import http.client
import json
import random
import struct
import sys
import tarfile
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.chaos.ledger import End, Ledger, Verdict
from scripts.chaos.traffic import SESSION, completion, connected, error_of, lmi, posted, words

PING_S = 2.0
"""SageMaker's limit to an answer of /ping."""
PATIENCE_S = 20.0
"""How long an attack goes on, and waits for an answer."""
HELD_S = 5.0
"""How long connections are held on which nothing is sent or read."""
REFUSALS = frozenset(
    (400, 403, 404, 405, 408, 409, 413, 415, 422, 424, 426, 429, 431, 503, 504, 507)
)
"""Statuses that tell a client that it is not answered as asked."""


@dataclass
class Target:
    """Who is attacked. limit: file descriptors that its process may have.

    pings: seconds that /ping took, each. slowest: the longest of them, and when it was answered.
    failures: answers of /ping that were none, or not 200.
    """

    name: str
    port: int
    limit: int
    pings: list[float] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    failures: list[str] = field(default_factory=list)


@dataclass
class Hostile:
    """One attack's means. archives: files that the servers may be told to load adapters from."""

    target: Target
    drawn: random.Random
    ledger: Ledger
    archives: list[Path]

    def count(self, kind: str, end: End, told: str = "") -> None:
        self.ledger.count(f"hostile: {kind}", Verdict(end, told))

    async def send(self, kind: str, data: bytes, also: frozenset[int] = frozenset()) -> None:
        """Send bytes and see that they are refused, or answered with one of these statuses too.

        A closed connection is a refusal of what is no whole request.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await connected(self.target.port)
                try:
                    with contextlib.suppress(ConnectionError):
                        writer.write(data)
                        await writer.drain()
                    head, body = await answered(reader)
                finally:
                    writer.transport.abort()
        except (OSError, asyncio.IncompleteReadError):
            self.count(kind, End.HONEST, f"{kind}: closed without an answer")
            return
        except TimeoutError:
            self.count(kind, End.LOST, f"{self.target.name}, {kind}: no answer")
            return
        self.judge(kind, head, body, also)

    def judge(self, kind: str, status: int, body: bytes, also: frozenset[int]) -> None:
        error = error_of(body)
        if status in also:
            self.count(kind, End.HONEST, f"{kind}: answered {status}")
        elif status in REFUSALS and error and error[0] == status:
            self.count(kind, End.HONEST, f"{kind}: refused with {status}")
        else:
            told = f"{self.target.name}, {kind}: {status} {body[:200]!r}"
            self.count(kind, End.UNEXPLAINED, told)

    async def post(
        self,
        kind: str,
        body: Any,
        path: bytes = b"/invocations",
        *headers: bytes,
        also: frozenset[int] = frozenset(),
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.send(kind, posted(data, path, *headers), also)

    @contextlib.asynccontextmanager
    async def many(self, count: int) -> Any:
        """So many connections, as far as there are any to be had."""
        opened = []
        try:
            for _ in range(count):
                try:
                    async with asyncio.timeout(2):
                        opened.append(await connected(self.target.port))
                except (OSError, TimeoutError):
                    break
            yield opened
        finally:
            for _, writer in opened:
                writer.transport.abort()


async def answered(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and body of an answer, whole or chunked; a stream is read to its end."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ", 2)[1])
    for line in head.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return status, await reader.readexactly(int(line.partition(b":")[2]))
    return status, await reader.read()


# attacks


async def heads_that_never_end(it: Hostile) -> None:
    """Header after header, or one URL, until somebody has enough."""
    kind = "head without an end"
    try:
        reader, writer = await connected(it.target.port)
    except OSError:
        return
    begin, piece = it.drawn.choice(
        [
            (b"GET /ping HTTP/1.1\r\nhost: a\r\n", b"a:b\r\n" * 4000),
            (b"GET /ping HTTP/1.1\r\nx: ", b"y" * 20_000),
            (b"GET /", b"z" * 20_000),
        ]
    )
    sent = 0
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(begin)
            while sent < 16 << 20 and not writer.is_closing():
                writer.write(piece)
                sent += len(piece)
                await writer.drain()
                await asyncio.sleep(0)
            status, body = await answered(reader)
        it.judge(kind, status, body, frozenset())
    except (OSError, asyncio.IncompleteReadError):
        it.count(kind, End.HONEST, f"{kind}: closed")
    except TimeoutError:
        it.count(kind, End.LOST, f"{it.target.name}, {kind}: {sent} bytes, and no end")
    finally:
        writer.transport.abort()


async def silent_connections(it: Hostile) -> None:
    """As many as there are descriptors, some of them in the middle of a head or of a body."""
    beginnings = (
        b"",
        b"",
        b"POST /invocations HTTP/1.1\r\nhost: a\r\n",
        b"POST /invocations HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{",
    )
    async with it.many(min(it.target.limit, 3000)) as opened:
        for _, writer in opened:
            with contextlib.suppress(OSError):
                writer.write(it.drawn.choice(beginnings))
        await asyncio.sleep(HELD_S)
    it.count("silent connections", End.DROPPED)


async def slow_bytes(it: Hostile) -> None:
    """A byte every half second."""
    data = posted(json.dumps(lmi("slow")).encode())
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(PATIENCE_S):
            _, writer = await connected(it.target.port)
            try:
                for byte in data:
                    writer.write(bytes((byte,)))
                    await writer.drain()
                    await asyncio.sleep(0.5)
            finally:
                writer.transport.abort()
    it.count("a byte every half second", End.DROPPED)


async def lists(it: Hostile) -> None:
    """Lists of inputs, adapters, lines and records that are far too long."""
    n = it.drawn.choice([5_000, 50_000])
    body: Any
    match it.drawn.randrange(6):
        case 0:
            body = {"inputs": ["a"] * n, "adapters": [""] * n, "parameters": {"max_new_tokens": 1}}
            await it.post("list with adapters", body)
        case 1:
            await it.post("list of prompts", {"prompt": ["a"] * n, "n": 2}, b"/v1/completions")
        case 2:
            body = b"inputs\n" + b"a\n" * 10 * n
            await it.post("CSV", body, b"/invocations", b"content-type: text/csv")
        case 3:
            body = b"{}\n" * 10 * n
            kind = b"content-type: application/jsonlines"
            await it.post("JSON lines", body, b"/invocations", kind)
        case 4:
            body = {"input": ["a"] * n}
            await it.post("embeddings", body, b"/v1/embeddings")
        case 5:
            body = completion("a", stop=["x" * 9] * n, bad_words=["y"] * n)
            await it.post("stops and bad words", body, b"/v1/completions")


async def lines_for_nobody(it: Hostile) -> None:
    """Many lines of a client that leaves at once."""
    line = json.dumps(lmi("leaves", stream=False)).encode()
    body = b"\n".join([line] * it.drawn.choice([500, 2000]))
    kind = b"content-type: application/jsonlines"
    with contextlib.suppress(OSError):
        _, writer = await connected(it.target.port)
        writer.write(posted(body, b"/invocations", kind))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(writer.drain(), 2)
        await asyncio.sleep(0.3)
        writer.transport.abort()
    it.count("lines for nobody", End.DROPPED)


async def archives(it: Hostile) -> None:
    """Adapters in archives that are larger, or other, than they look."""
    src = it.drawn.choice(it.archives)
    name = f"hostile-{it.drawn.randrange(10**6)}"
    path = f"/adapters?name={name}&src={src}".encode()
    await it.post(f"archive {src.name}", b"", path)


async def templates(it: Hostile) -> None:
    """Templates of the client's own, in both places where there might be one."""
    bomb = it.drawn.choice(
        [
            "{{ 'a' * 10**9 }}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        ]
    )
    message = [{"role": "user", "content": "hello"}]
    body: dict[str, Any] = {"messages": message, "max_tokens": 1}
    if it.drawn.random() < 0.5:
        body["chat_template"] = bomb
    else:
        body["chat_template_kwargs"] = {"chat_template": bomb}
    await it.post("template", body, b"/v1/chat/completions")


async def pictures(it: Hostile) -> None:
    """Pictures that are small to send and large to decode."""
    bomb = base64.b64encode(png(13_000)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{bomb}"}}
    count = it.drawn.choice([1, 40, 200])
    message = [{"role": "user", "content": [part] * count}]
    await it.post("pictures", {"messages": message, "max_tokens": 1}, b"/v1/chat/completions")


async def salts(it: Hostile) -> None:
    """A hundred requests, each with a salt of its own."""
    for _ in range(100):
        body = completion("salted", cache_salt=f"{it.drawn.random()}", max_tokens=1)
        await it.post("salts", body, b"/v1/completions", also=frozenset((200,)))


async def sessions(it: Hostile) -> None:
    """Sessions that are never used, and ids that nobody gave out."""
    new = {"requestType": "NEW_SESSION"}
    for _ in range(50):
        await it.post("sessions", new, b"/invocations", also=frozenset((200,)))
    header = SESSION.encode() + b": " + f"{it.drawn.random()}".encode() * 100
    await it.post("session made up", lmi("a"), b"/invocations", header)


async def leaving(it: Hostile) -> None:
    """Leave at every stage of a request."""
    body = json.dumps(lmi(words(it.drawn.random(), 200), stream=True)).encode()
    data = posted(body)
    head = data.index(b"\r\n\r\n") + 4
    for sent in (3, head - 5, head, head + len(body) // 2, len(data) - 1, len(data)):
        with contextlib.suppress(OSError):
            reader, writer = await connected(it.target.port)
            writer.write(data[:sent])
            await writer.drain()
            if sent == len(data) and it.drawn.random() < 0.7:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(50), 5)
            if it.drawn.random() < 0.5:
                writer.transport.abort()
            writer.close()
        it.count("leaving", End.DROPPED)
        await asyncio.sleep(it.drawn.random() / 10)


async def costly(it: Hostile) -> None:
    """Fields that cost the engine more than they cost the client."""
    more: Mapping[str, Any] = it.drawn.choice(
        [
            {"repetition_detection": {"max_pattern_size": 10**9, "min_count": 2}},
            {"n": 100_000},
            {"logprobs": 10**6},
            {"best_of": 10**6, "n": 10**6},
            {"bad_words": ["a b c"] * 10_000},
            {"logit_bias": {str(n): 1 for n in range(100_000)}},
            {"structured_outputs": {"regex": "(a{1,999}){1,999}"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a" * 10**6}}},
            {"kv_transfer_params": {"do_remote_prefill": True}},
        ]
    )
    answered = "logit_bias" in more or "structured_outputs" in more  # they fit the limits
    also = frozenset((200,)) if answered else frozenset()
    await it.post("costly fields", completion("a", **more), b"/v1/completions", also=also)


async def reading_nothing(it: Hostile) -> None:
    """Ask for long streams and read none of them."""
    body = json.dumps(completion("a", stream=True, max_tokens=300)).encode()
    async with it.many(5) as opened:
        for reader, writer in opened:
            reader._transport.pause_reading()
            with contextlib.suppress(OSError):
                writer.write(posted(body, b"/v1/completions"))
        await asyncio.sleep(HELD_S)
    it.count("reading nothing", End.DROPPED)


async def strangers(it: Hostile) -> None:
    """A page of another origin, and a client that wants a WebSocket."""
    origin = b"origin: https://elsewhere.example"
    await it.post("foreign origin", b"", b"/adapters?name=evil&src=/tmp", origin)
    head = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    key = b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    await it.send("websocket", head + key, also=frozenset((200,)))


ATTACKS: tuple[Callable[[Hostile], Awaitable[None]], ...] = (
    heads_that_never_end,
    silent_connections,
    slow_bytes,
    lists,
    lines_for_nobody,
    archives,
    templates,
    pictures,
    salts,
    sessions,
    leaving,
    costly,
    reading_nothing,
    strangers,
)


async def attack(
    targets: list[Target], seed: str, ledger: Ledger, archives: list[Path], until: float
) -> None:
    """One attack after the other, in an order of its own, until that time (monotonic)."""
    drawn = random.Random(seed)
    order: list[Callable[[Hostile], Awaitable[None]]] = []
    while time.monotonic() < until:
        order = order or drawn.sample(ATTACKS, len(ATTACKS))
        await order.pop()(Hostile(drawn.choice(targets), drawn, ledger, archives))
        await asyncio.sleep(drawn.random() / 2)


async def watch(target: Target) -> None:
    """Ask for /ping, until this is cancelled.

    In a process of its own: what holds up the attackers, even for a moment, is not to be measured.
    """
    command = (sys.executable, "-m", __name__, "ping", str(target.port))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    try:
        async for line in process.stdout:
            took, failure = json.loads(line)
            target.pings.append(took)
            if took > target.slowest[0]:
                target.slowest = took, time.strftime("%H:%M:%S")
            if failure:
                target.failures.append(failure)
    finally:
        process.kill()
        await process.wait()


def ping(port: int) -> None:
    """Ask for /ping four times a second, on a connection of its own each time, and print how many
    seconds each took and what was wrong with it.
    """
    while True:
        time.sleep(0.25)
        failure = ""
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4 * PING_S)
        try:
            connection.request("GET", "/ping")
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                failure = f"{answer.status} {body[:100]!r}"
        except (OSError, http.client.HTTPException) as error:
            failure = repr(error)
        finally:
            connection.close()
        print(json.dumps([time.monotonic() - began, failure]), flush=True)


def pings(targets: list[Target], bystander: Target) -> tuple[str, list[str]]:
    """How /ping was answered, as a table, and what was wrong with it.

    bystander: a process that does nothing but answer. How long it took is the machine's, which has
    fewer CPUs than there are processes here.
    """
    lines = [f"{'/ping':12}{'asked':>10}{'median ms':>12}{'worst ms':>12}{'failed':>10}"]
    problems = []
    allowed = PING_S + bystander.slowest[0]
    for it in (*targets, bystander):
        took = sorted(it.pings)
        median, worst = took[len(took) // 2], took[-1]
        cells = f"{len(took):>10}{1000 * median:>12.0f}{1000 * worst:>12.0f}"
        lines.append(f"{it.name:12}{cells}{len(it.failures):>10}")
        if worst > allowed:
            problems.append(f"/ping of {it.name} took {worst:.1f} s, until {it.slowest[1]}")
        if it.failures:
            told = f"{len(it.failures)} times: {it.failures[0]}"
            problems.append(f"/ping of {it.name} was not answered with 200 {told}")
    return "\n".join(lines), problems


# what is sent


@functools.cache
def png(side: int) -> bytes:
    """A black square: some bytes for each thousand pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    rows = zlib.compress(bytes((side + 7) // 8 + 1) * side, 9)
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", rows), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bombs(folder: Path) -> list[Path]:
    """Archives that no server should unpack."""
    folder.mkdir()
    found = []
    for name, data in _archives():
        path = folder / f"{name}.tar.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            for piece in data:
                file.write(piece)
        found.append(path)
    return found


def _archives() -> Iterator[tuple[str, Iterator[bytes]]]:
    mib = bytes(1 << 20)

    def header(name: str, size: int, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
        found = tarfile.TarInfo(name)
        found.size, found.type, found.linkname = max(size, 0), kind, link
        block = bytearray(found.tobuf(tarfile.GNU_FORMAT))
        if size < 0:  # in base 256, as GNU tar has large ones
            block[124:136] = b"\xff" + size.to_bytes(11, "big", signed=True)
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
        return bytes(block)

    def large_pax() -> Iterator[bytes]:
        yield header("pax", 300 << 20, tarfile.XHDTYPE)
        yield from (mib for _ in range(300))

    def large_file() -> Iterator[bytes]:
        yield header("adapter_model.safetensors", 400 << 20)
        yield from (mib for _ in range(400))

    def negative() -> Iterator[bytes]:
        yield header("folder", -(1 << 30), tarfile.DIRTYPE)
        yield from large_file()

    def links() -> Iterator[bytes]:
        yield header("adapter_config.json", 0, tarfile.SYMTYPE, "/etc/passwd")

    def members() -> Iterator[bytes]:
        for n in range(20_000):
            yield header(f"{n}", 0)

    def paths() -> Iterator[bytes]:
        yield header("../../../../tmp/hostile-was-here", 512)
        yield bytes(512)

    yield "pax", large_pax()
    yield "large", large_file()
    yield "negative", negative()
    yield "links", links()
    yield "members", members()
    yield "paths", paths()
    yield "broken", iter([b"no archive at all"])


async def answer_only(port: int) -> None:
    """Answer whatever is asked with 200, and do nothing else."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["ping", port]:
            ping(int(port))
        case ["answer", port]:
            asyncio.run(answer_only(int(port)))
