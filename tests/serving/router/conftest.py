# SPDX-License-Identifier: Apache-2.0
"""Replicas that a test controls, and a router in front of them, all on real sockets."""

import asyncio
import functools
import json
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import pytest

from lmi_config.options.declared import Settings
from serving.access.caller import Caller
from serving.access.signed_identity import Signer
from serving.router import router as router_module
from serving.router.fleet import health
from serving.router.models.model_messages import Door
from serving.router.peers import Link
from serving.router.router import Router
from tests.support.harness.wait import until_async

# Otherwise every router reads all authorities again: 40 ms, as long as the rest of its start.
setattr(router_module, "_authorities", functools.cache(router_module._authorities))  # noqa: B010

Answer = Callable[["FakeReplica", "Asked", asyncio.StreamWriter], Awaitable[None]]


class Asked(NamedTuple):
    """A request as a replica received it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    called: str = ""  # the name in the replica's signed identities

    def json(self) -> Any:
        return json.loads(self.body)

    def caller(self, secret: str) -> Caller:
        """The caller that the router has signed."""
        return Signer(secret, self.called).caller(self.headers["x-slipway-identity"].encode())


def whole(status: int, body: bytes, *lines: str) -> bytes:
    """An answer with a length."""
    head = [f"HTTP/1.1 {status} Something", f"content-length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def sends(content: bytes = b"", then_s: float = 0):
    """A replica that sends these bytes, and ends its work some seconds later."""

    async def answer(replica, asked, writer):
        writer.write(content)
        await asyncio.sleep(then_s)

    return answer


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


async def close(server: asyncio.Server) -> None:
    """Close the server. Without this, asyncio loses a connection that arrives at that moment, and
    never closes it: https://github.com/python/cpython/issues/109564.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(2):  # accepted connections are attached
        await asyncio.sleep(0)
    server.close()


class FakeReplica:
    """A replica behind the real interface, HTTP. It answers with its name, and `answer` can make it
    misbehave.
    """

    def __init__(self) -> None:
        self.ping: tuple[int, dict[str, object]] = (200, {"status": "ready"})
        self.models: list[dict[str, object]] = [{"id": "base"}]
        self.born = 1.0
        self.tokens = 100_000
        self.blocks = ""  # replaces its report of its cache by nonsense
        self.tiers = ""  # the series of its tiers
        self.asked: list[Asked] = []
        self.secret: str | None = None  # the secret that it shares with the router, as `serve` does
        self.called = ""  # the name that it proves
        self.pings = 0
        self.probed: dict[str, Asked] = {}  # the router's last probes, by path
        self.statuses: dict[str, int] = {}  # for foreign servers, by path
        self.answer: Answer | None = None
        self.connections: set[asyncio.StreamWriter] = set()
        self.gone = 0  # clients that left before they were answered
        self.port = 0
        self._server: asyncio.Server | None = None
        self._place: socket.socket | None = None
        """Keeps the port while it is dead, since another program could get it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        if self._place:
            self._place.close()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: accept no connections, and abort the existing ones."""
        server, self._server = self._server, None
        if server:
            await close(server)
            self._place = socket.socket()
            self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._place.bind(("127.0.0.1", self.port))
            weakref.finalize(self, self._place.close)
            for writer in [*self.connections]:
                writer.transport.abort()
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._server:  # it was accepted before the replica died, and served after
            writer.transport.abort()
            return
        self.connections.add(writer)
        try:
            while asked := await _read(reader):
                await self._answer(asked, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _answer(
        self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        asked = asked._replace(called=self.called or self.url)
        if asked.target in ("/ping", "/health", "/metrics", "/v1/models"):
            self.probed[asked.target] = asked
        if (status := self.statuses.get(asked.target, 200)) != 200:
            writer.write(whole(status, b"" if status < 300 else b'{"error":"no"}'))
            await writer.drain()
            return
        match asked.target:
            case "/ping":
                self.pings += 1
                lines = []
                if self.secret and (challenge := asked.headers.get("x-slipway-challenge")):
                    signer = Signer(self.secret, self.called or self.url)
                    proof = signer.introduced(challenge.encode())
                    assert proof
                    lines.append(f"x-slipway-introduction: {proof.decode()}")
                writer.write(whole(self.ping[0], json.dumps(self.ping[1]).encode(), *lines))
            case "/metrics":
                cache = f'block_size="100",num_gpu_blocks="{self.blocks or self.tokens // 100}"'
                info = f"vllm:cache_config_info{{{cache}}} 1"
                born = f"process_start_time_seconds {self.born}"
                writer.write(whole(200, f"{born}\n{info}\n{self.tiers}".encode()))
            case "/v1/models":
                writer.write(whole(200, json.dumps({"data": self.models}).encode()))
            case "/health":
                writer.write(whole(200, b""))
            case _:
                self.asked.append(asked)
                if self.answer:
                    work = asyncio.ensure_future(self.answer(self, asked, writer))
                    left = asyncio.ensure_future(reader.read(1))
                    await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
                    if not work.done():
                        work.cancel()
                        self.gone += 1
                        raise ConnectionError
                    left.cancel()
                    await asyncio.wait([left])
                    await work
                else:
                    body = json.dumps({"replica": self.url, "size": len(asked.body)}).encode()
                    writer.write(whole(200, body, "content-type: application/json"))
        await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, target, headers, body)


class Routed:
    """A router, its replicas, and a client of it."""

    def __init__(
        self,
        fleet: list[FakeReplica],
        settings: dict[str, Any],
        models: Door | None = None,
        link: Link | None = None,
    ) -> None:
        self.fleet = fleet
        listener = socket.create_server(("127.0.0.1", 0))
        # Asyncio sets it only on sockets made with TCP's number; without it each body waits 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        urls = ",".join(it.url for it in fleet)
        options = Settings(**{"router_replicas": urls} | settings)
        self.router = Router(options, {}, link, models=models)
        self.task = asyncio.create_task(self.router.run(listener))
        self.client = httpx.AsyncClient(base_url=self.url, timeout=60)

    async def ready(self, count: int | None = None) -> None:
        """Wait until this number of replicas is ready, or all of them."""
        count = len(self.fleet) if count is None else count
        await until_async(
            lambda: sum(it.state == "ready" for it in self.router.pool.replicas) == count
        )

    async def post(
        self, body: object, path: str = "/v1/completions", **more: Any
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(path, content=content, **more)

    async def raw(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send the bytes on a new connection. Returns the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def answer(self, data: bytes) -> bytes:
        """All bytes that come back until the router closes the connection."""
        reader, writer = await self.raw(data)
        found = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return found


@asynccontextmanager
async def routing(
    count: int = 2,
    wait: bool = True,
    models: Door | None = None,
    link: Link | None = None,
    **settings: Any,
) -> AsyncIterator[Routed]:
    """A router in front of this number of replicas. models: the door of a container with several.
    link: to another of its processes. settings: `knows` decides whether the replicas have the
    router's secret.
    """
    knows = settings.pop("knows", True)
    fleet = [FakeReplica() for _ in range(count)]
    for it in fleet:
        it.secret = settings.get("router_secret") if knows else None
        await it.start()
    routed = Routed(fleet, settings, models, link)
    try:
        if wait:
            await routed.ready()
        yield routed
    finally:
        await routed.client.aclose()
        if not routed.task.done():
            routed.router.stop()
            routed.router.stop()
        await asyncio.wait_for(routed.task, 60)
        for it in fleet:
            await it.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Looks at replicas often."""
    monkeypatch.setattr(health, "PING_S", 0.02)
