# SPDX-License-Identifier: Apache-2.0
"""HTTP requests in a closed loop, as cheap as Python can be: each connection sends the next request
when it has a whole answer.
"""

import abc
import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

import httptools

KEPT = 3000  # bytes of the end of an answer


class Failed(Exception):
    """An answer that is wrong or cut short."""


class Answer(NamedTuple):
    """A whole answer. size: bytes of the body; lines: ends of line in it; last: its end, of at most
    KEPT bytes. An event of a stream has two ends of line.
    """

    status: int
    size: int
    lines: int
    last: bytes


class ClosedLoop(abc.ABC):
    """The requests of some connections. times: seconds until each answer was whole."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._done = asyncio.get_running_loop().create_future()

    @abc.abstractmethod
    def request(self) -> bytes | None:
        """The next request with its head; None if the connection has no more to send."""

    @abc.abstractmethod
    def check(self, answer: Answer) -> None:
        """Look at a whole answer. Raises Failed."""

    async def load(self, ports: Sequence[int], connections: int, limit_s: float) -> float:
        """Send everything, over connections that are spread over the ports. Returns the seconds
        that it took. Raises Failed, and TimeoutError after limit_s.
        """
        loop, clients = asyncio.get_running_loop(), []
        for number in range(connections):
            port = ports[number % len(ports)]
            opened = await loop.create_connection(lambda: _Client(self), "127.0.0.1", port)
            clients.append(opened[1])
        self._busy = connections
        began = time.perf_counter()
        for client in clients:
            client.ask()
        try:
            async with asyncio.timeout(limit_s):
                await self._done
        finally:
            for client in clients:
                client.transport.abort()
        return time.perf_counter() - began

    def fail(self, why: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(why)

    def has_all(self) -> None:
        """A connection has no more to send."""
        self._busy -= 1
        if not self._busy and not self._done.done():
            self._done.set_result(None)


class _Client(asyncio.Protocol):
    """One connection. began: the time of its request; 0 while it waits for nothing."""

    transport: asyncio.Transport
    began = 0.0
    size = lines = 0
    last = b""

    def __init__(self, loop: ClosedLoop) -> None:
        self.loop = loop
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self) -> None:
        self.size = self.lines = 0
        self.last, self.began = b"", 0.0
        if (request := self.loop.request()) is None:
            self.loop.has_all()
            return
        self.began = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.loop.fail(Failed(f"not HTTP: {error} in {data[:300]!r}"))

    def on_body(self, body: bytes) -> None:
        self.size += len(body)
        self.lines += body.count(b"\n")
        self.last = (self.last + body)[-KEPT:]

    def on_message_complete(self) -> None:
        took = time.perf_counter() - self.began
        status = self.parser.get_status_code()
        try:
            self.loop.check(Answer(status, self.size, self.lines, self.last))
        except Failed as error:
            self.loop.fail(error)
            return
        self.loop.times.append(took)
        self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        if self.began:
            self.loop.fail(Failed(f"a connection was cut: {error or 'closed'}"))
