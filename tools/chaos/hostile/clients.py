# SPDX-License-Identifier: Apache-2.0
"""Hostile clients for `scripts/dev chaos --hostile`: attacks of one client that could harm all
others.

Each attack is bounded in time and size, and goes to a server or to the router. The response must be
a refusal or an answer in a documented shape. A closed connection also counts as a refusal if the
other side may not speak. Harm to others is measured by the usual traffic, the watch over /ping, and
the memory afterwards.
"""

import asyncio
import base64
import contextlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.chaos.hostile.bombs import png
from tools.chaos.ledger import End, Ledger, Verdict
from tools.chaos.traffic import (
    ADAPTER,
    SESSION,
    Connected,
    completion,
    error_of,
    lmi,
    posted,
    words,
)
from tools.chaos.watch import Target

PATIENCE_S = 20.0
"""How long an attack goes on, and waits for an answer."""
HELD_S = 5.0
"""Seconds that an idle connection is held; no bytes are sent or read on it."""
REFUSALS = frozenset(
    (400, 403, 404, 405, 408, 409, 413, 415, 422, 424, 426, 429, 431, 503, 504, 507)
)
"""Statuses that tell a client that it is not answered as asked."""


@dataclass
class Hostile:
    """One attack's means. archives: files and folders that the servers may be told to load adapters
    from. code: folders of adapters whose code is hostile.
    """

    target: Target
    drawn: random.Random
    ledger: Ledger
    archives: list[Path]
    code: Sequence[Path]

    async def connected(self) -> Connected:
        """A connection, with TLS where the target has it."""
        return Connected(
            *await asyncio.open_connection("127.0.0.1", self.target.port, ssl=self.target.tls)
        )

    def count(self, kind: str, end: End, told: str = "") -> None:
        self.ledger.count(f"hostile: {kind}", Verdict(end, told))

    async def send(self, kind: str, data: bytes, also: frozenset[int] = frozenset()) -> None:
        """Send bytes, and check that they are refused or answered with one of the statuses in
        `also`.

        A closed connection counts as a refusal of an incomplete request.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await self.connected()
                try:
                    with contextlib.suppress(ConnectionError):
                        writer.write(data)
                        await writer.drain()
                    head, body = await answered(reader)
                finally:
                    writer.transport.abort()
        except TimeoutError:  # an OSError, too
            self.count(kind, End.LOST, f"{self.target.name}, {kind}: no answer")
            return
        except (OSError, asyncio.IncompleteReadError) as error:
            told = f"{kind}: closed without an answer ({type(error).__name__})"
            self.count(kind, End.EXPLAINED, told)
            return
        self.judge(kind, head, body, also)

    def judge(self, kind: str, status: int, body: bytes, also: frozenset[int]) -> None:
        error = error_of(body)
        if status in also | self.target.answers:
            self.count(kind, End.EXPLAINED, f"{kind}: answered {status}")
        elif status in REFUSALS and error and error[0] == status:
            self.count(kind, End.EXPLAINED, f"{kind}: refused with {status}")
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
        await self.send(kind, posted(data, path, *self.key, *headers), also)

    @property
    def key(self) -> list[bytes]:
        """The header that has the target's key."""
        return [b"authorization: Bearer " + self.target.key.encode()] if self.target.key else []

    @contextlib.asynccontextmanager
    async def many(self, count: int) -> Any:
        """So many connections, as far as there are any to be had."""
        opened = []
        try:
            for _ in range(count):
                try:
                    async with asyncio.timeout(2):
                        opened.append(await self.connected())
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
    if b"transfer-encoding: chunked" not in head:
        return status, await reader.read()
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return status, body


# attacks


async def heads_that_never_end(it: Hostile) -> None:
    """Header after header, or one URL, until somebody has enough."""
    kind = "head without an end"
    try:
        reader, writer = await it.connected()
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
    except TimeoutError:  # an OSError, too
        it.count(kind, End.LOST, f"{it.target.name}, {kind}: {sent} bytes, and no end")
    except (OSError, asyncio.IncompleteReadError):
        it.count(kind, End.EXPLAINED, f"{kind}: closed")
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
            _, writer = await it.connected()
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
        _, writer = await it.connected()
        writer.write(posted(body, b"/invocations", kind))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await writer.drain()
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
    """A hundred requests, each with a different salt."""
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
            reader, writer = await it.connected()
            writer.write(data[:sent])
            await writer.drain()
            if sent == len(data) and it.drawn.random() < 0.7:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5):
                        await reader.read(50)
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


async def handshakes(it: Hostile) -> None:
    """TLS handshakes that begin and do not end; on a port without TLS they are no HTTP."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(505)
    opened: list[asyncio.StreamWriter] = []
    try:
        for _ in range(min(it.target.limit, 1000)):
            async with asyncio.timeout(2):
                _, writer = await asyncio.open_connection("127.0.0.1", it.target.port)
            opened.append(writer)
            writer.write(hello[: it.drawn.choice((0, 3, 200, len(hello) - 1, len(hello)))])
    except (OSError, TimeoutError):
        pass
    await asyncio.sleep(HELD_S)
    for writer in opened:
        writer.transport.abort()
    it.count("handshakes without an end", End.DROPPED)


async def old_clients(it: Hostile) -> None:
    """HTTP/1.0 requests that use features of HTTP/1.1."""
    body = json.dumps(completion("old", max_tokens=2)).encode()
    heads = (
        b"",
        b"connection: keep-alive\r\n",
        b"expect: 100-continue\r\n",
        b"transfer-encoding: chunked\r\n",
        b"upgrade: h2c\r\n",
    )
    for more in heads:
        length = b"" if b"transfer" in more else b"content-length: %d\r\n" % len(body)
        head = b"POST /v1/completions HTTP/1.0\r\n" + more + length
        await it.send("HTTP/1.0", head + b"\r\n" + body, frozenset((200, 401, 411)))
    await it.send("HTTP/1.0", b"GET /ping HTTP/1.0\r\n\r\n", frozenset((200,)))


async def items(it: Hostile) -> None:
    """Items of the Responses API that fit none of its forms, or all of them."""
    n = it.drawn.choice((500, 5_000))
    item: Any = it.drawn.choice(
        [
            {"type": "reasoning", "x": [{}] * 60},
            {"type": "message", "role": "user", "content": [{}] * 30},
            {"type": "function_call_output", "output": [[]] * 50},
            {"x": "y"},
            [],
            "a",
        ]
    )
    await it.post("items", {"input": [item] * n}, b"/v1/responses")


async def template_keywords(it: Hostile) -> None:
    """Keyword arguments for the model's template: deep, wide, or with names that the template uses
    itself.
    """
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    keywords: dict[str, Any] = it.drawn.choice(
        [
            {"tools": [{"x": "y" * 1000}] * 2000},
            {"a": deep},
            {f"k{n}": n for n in range(50_000)},
            {"messages": [{"role": "user", "content": "z"}] * 20_000},
            {"add_generation_prompt": ["x"] * 100_000, "tokenize": {"a": 1}},
        ]
    )
    message = [{"role": "user", "content": "hello"}]
    body = {"messages": message, "max_tokens": 1, "chat_template_kwargs": keywords}
    path = b"/v1/chat/completions"
    await it.post("template keywords", body, path, also=frozenset((200,)))


async def scoring(it: Hostile) -> None:
    """Log probabilities of the prompt, as evaluation harnesses ask for them, with adapters."""
    more: Mapping[str, Any] = it.drawn.choice(
        [
            {"prompt_logprobs": 5},
            {"prompt_logprobs": 0},
            {"echo": True, "logprobs": 5},
            {"echo": True, "logprobs": 0, "max_tokens": 0},
        ]
    )
    body = completion(words(it.drawn.random(), 60), **{"max_tokens": 1, **more})
    adapter = it.drawn.choice([[], [f"{ADAPTER}: one".encode()]])
    await it.post("scoring", body, b"/v1/completions", *adapter, also=frozenset((200,)))


async def hostile_code(it: Hostile) -> None:
    """Adapters whose code harms its server when it is asked."""
    folder = it.drawn.choice(it.code)
    name = f"{folder.name}-{it.drawn.randrange(10**6)}"
    kind = f"code that {folder.name}"
    ready = frozenset((200,))
    await it.post(kind, b"", f"/adapters?name={name}&src={folder}".encode(), also=ready)
    header = f"{ADAPTER}: {name}".encode()
    for _ in range(2):
        await it.post(kind, lmi("evil"), b"/invocations", header, also=ready)
    head = b"DELETE /adapters/%b HTTP/1.1" % name.encode()
    await it.send(kind, b"\r\n".join((head, b"host: a", *it.key, b"", b"")), ready)


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
    handshakes,
    old_clients,
    items,
    template_keywords,
    scoring,
    hostile_code,
)
