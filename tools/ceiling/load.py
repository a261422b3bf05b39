# SPDX-License-Identifier: Apache-2.0
"""A closed loop over a few connections, as cheap as Python can be, and its measurements."""

import asyncio
import json
import time
from typing import Any, NamedTuple, cast

import httptools
import psutil
import uvloop

from tests.support.harness.process import Program, cpu_seconds
from tests.support.harness.stats import percentiles


class Failed(Exception):
    """An answer that is wrong or cut short."""


class Round(NamedTuple):
    """One round of one arm. rate: of requests or tokens in a second; cpu: seconds of the serving
    process (a model.py's included, the engine's not) for each; busy: cores that it used; events:
    for each token of a stream; p50, p99: seconds that a request took; memory: bytes.
    """

    rate: float
    cpu: float
    busy: float
    events: float
    p50: float
    p99: float
    memory: int


class Load:
    """So many requests, one after the other on each connection. tokens: of each answer. key: what
    all of them have; "" is none.
    """

    def __init__(
        self, path: str, body: dict[str, Any], tokens: int, count: int, key: str = ""
    ) -> None:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n"
        )
        credentials = f"authorization: Bearer {key}\r\n" if key else ""
        self.request = f"{head}{credentials}\r\n".encode() + data
        self.tokens, self.left, self.unanswered = tokens, count, count
        self.events = 0
        self.times: list[float] = []
        self.done = asyncio.get_running_loop().create_future()

    def fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(Failed(why))

    async def run(self, port: int, connections: int) -> float:
        """The seconds that it took. Raises Failed and TimeoutError."""
        loop = asyncio.get_running_loop()
        clients = [
            (await loop.create_connection(lambda: Client(self), "127.0.0.1", port))[1]
            for _ in range(connections)
        ]
        began = time.perf_counter()
        for client in clients:
            client.ask()
        try:
            async with asyncio.timeout(300):
                await self.done
        finally:
            for client in clients:
                client.transport.abort()
        return time.perf_counter() - began


class Client(asyncio.Protocol):
    """One connection, which asks again when it has the whole answer."""

    transport: asyncio.Transport
    began = 0.0
    last = b""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self) -> None:
        if self.load.left:
            self.load.left -= 1
            self.began = time.perf_counter()
            self.transport.write(self.load.request)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.load.fail(f"not HTTP: {error} in {data[:300]!r}")

    def on_body(self, body: bytes) -> None:
        self.load.events += body.count(b"\n\n") or body.count(b"\n")
        self.last = (self.last + body)[-3000:]

    def on_message_complete(self) -> None:
        load, last, self.last = self.load, self.last, b""
        # It ended because it was long enough: by OpenAI's word for it, or by LMI's object for it.
        if self.parser.get_status_code() != 200 or not (
            b'"length"' in last or b'"generated_text":"' in last
        ):
            load.fail(f"answer {self.parser.get_status_code()}: {last[-500:]!r}")
            return
        load.times.append(time.perf_counter() - self.began)
        self.began = 0.0
        load.unanswered -= 1
        self.ask()
        if not load.unanswered and not load.done.done():
            load.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.began:
            self.load.fail(f"a connection was cut: {error or 'closed'}")


def measured(
    server: Program,
    path: str,
    body: dict[str, Any],
    tokens: int,
    connections: int,
    count: int,
    key: str = "",
) -> Round:
    """Put the load on a server. tokens: of each answer, if they count; otherwise 0."""

    async def run() -> tuple[Load, float]:
        load = Load(path, body, tokens, count, key)
        return load, await load.run(server.port, connections)

    processes: list[psutil.Process] = [server.own]
    for name in ("handlers.custom", "VLLM::APIServer", "vllm-rs"):
        processes += server.children(name)
    before = cpu_seconds(processes)
    load, elapsed = uvloop.run(run())
    cpu = cpu_seconds(processes) - before
    units = count * (tokens or 1)
    memory = sum(process.memory_info().rss for process in processes)
    return Round(
        units / elapsed,
        cpu / units,
        cpu / elapsed,
        load.events / units,
        *percentiles(load.times),
        memory,
    )
