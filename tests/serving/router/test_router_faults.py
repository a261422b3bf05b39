# SPDX-License-Identifier: Apache-2.0
"""The router as a process, in front of replicas that are killed, suspended and restarted."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from serving.http.sockets import most_routed, raise_open_files
from serving.router.fleet import health
from serving.router.http import buffers, upstream
from tests.serving.router.conftest import STREAM, FakeReplica, chunk, routing, whole
from tests.support.harness import stub_replica
from tests.support.harness.process import ROUTE, Program
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

STUB = (sys.executable, stub_replica.__file__, "{port}")
LATE_S = 120.0  # machines are noisy


class Routed:
    """stubs: the replicas. router: the router's process."""

    def __init__(self, stubs: list[Program], router: Program, client: httpx.AsyncClient) -> None:
        self.stubs, self.router, self.client = stubs, router, client

    async def post(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "Hi"} | body)

    async def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.client.get("/replicas")).json()["replicas"]
        return found

    async def ready(self, count: int) -> None:
        """Wait until this number of replicas is ready."""
        async with asyncio.timeout(LATE_S):
            while sum(it["state"] == "ready" for it in await self.replicas()) != count:
                await asyncio.sleep(0.05)

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        async with asyncio.timeout(LATE_S):
            while any(it["requests_under_way"] for it in await self.replicas()):
                await asyncio.sleep(0.05)
        assert not any(it["prompt_tokens_queued"] for it in await self.replicas())

    async def under_way(self, count: int) -> None:
        """Wait until the replicas have this number of requests."""
        async with asyncio.timeout(LATE_S):
            while sum(it["requests_under_way"] for it in await self.replicas()) != count:
                await asyncio.sleep(0.02)

    async def stream(self, events: int) -> tuple[str, int, bool]:
        """A stream's replica, its events, and whether it was complete."""
        body = {"prompt": "Hi", "stream": True, "max_tokens": events}
        found = 0
        replica = ""
        try:
            async with self.client.stream("POST", "/v1/completions", json=body) as answer:
                replica = answer.headers["x-replica"]
                async for line in answer.aiter_lines():
                    found += line.startswith("data: {")
        except httpx.TransportError:
            return replica, found, False
        return replica, found, True


@asynccontextmanager
async def routed(
    count: int = 2, others: Sequence[str] = (), **environ: str
) -> AsyncIterator[Routed]:
    """A router in front of this number of replicas, and of others."""
    stubs = [Program(*STUB) for _ in range(count)]
    urls = ",".join([*(it.url for it in stubs), *others])
    options = {"OPTION_ROUTING_STRATEGY": "roundrobin", "OPTION_ROUTER_REPLICAS": urls} | environ
    router = Program(*ROUTE, environ=options)
    limits = httpx.Limits(max_connections=None)
    async with AsyncExitStack() as stack:
        for it in (*stubs, router):
            it.start()
            stack.callback(it.end)
        stack.callback(stopped, router)
        client = httpx.AsyncClient(base_url=router.url, timeout=LATE_S, limits=limits)
        found = Routed(stubs, router, await stack.enter_async_context(client))
        await ready(router)
        await found.ready(count + len(others))
        yield found


def stopped(router: Program) -> None:
    """The stop does not wait for requests in flight: that takes a second signal."""
    router.kill(signal.SIGTERM)
    router.stop()


async def ready(program: Program) -> None:
    await asyncio.to_thread(program.ready, LATE_S)


async def end_of(program: Program) -> int:
    """Wait for the process's end. Returns its exit code."""
    return await asyncio.to_thread(program.process.wait, LATE_S)


def memory(program: Program) -> int:
    """The resident memory of a process in bytes."""
    return int(program.own.memory_info().rss)


async def test_replicas_that_are_killed_restarted_and_all_gone():
    async with routed() as it:
        victim, other = it.stubs
        streams = [asyncio.create_task(it.stream(120)) for _ in range(10)]
        await it.under_way(10)
        victim.kill(signal.SIGSTOP)  # so that some clients wait for their answers as it dies
        waiting = [asyncio.create_task(it.post()) for _ in range(20)]
        await asyncio.sleep(0.2)
        victim.kill()
        answers = await asyncio.gather(*waiting)
        assert {answer.headers["x-replica"] for answer in answers} == {str(other.port)}
        for replica, events, complete in await asyncio.gather(*streams):
            assert complete is (replica == str(other.port))
            assert events == 120 if complete else events < 120
        await it.ready(1)
        await it.idle()

        other.kill()
        await it.ready(0)
        answer = await it.post()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        victim.start()
        other.start()
        await it.ready(2)
        ports = {(await it.post()).headers["x-replica"] for _ in range(10)}
        assert ports == {str(victim.port), str(other.port)}


async def test_a_frozen_replica_and_its_thaw():
    async with routed() as it:
        frozen, other = it.stubs
        frozen.kill(signal.SIGSTOP)
        answers = await asyncio.gather(*(it.post() for _ in range(20)))  # after two pings, 11 s
        assert {answer.headers["x-replica"] for answer in answers} == {str(other.port)}
        began = time.monotonic()
        assert (await it.post()).status_code == 200
        assert time.monotonic() - began < 10  # what two pings take
        frozen.kill(signal.SIGCONT)
        await it.ready(2)
        ports = {(await it.post()).headers["x-replica"] for _ in range(10)}
        assert ports == {str(frozen.port), str(other.port)}
        await it.idle()


async def test_a_router_that_is_killed_and_one_that_is_stopped():
    async with routed() as it:
        streams = [asyncio.create_task(it.stream(500)) for _ in range(10)]
        await it.under_way(10)
        it.router.kill()
        assert not any(complete for _, _, complete in await asyncio.gather(*streams))
        it.router.start()  # at once
        await ready(it.router)
        await it.ready(2)

        streams = [asyncio.create_task(it.stream(100)) for _ in range(10)]
        await it.under_way(10)
        it.router.kill(signal.SIGTERM)
        async with asyncio.timeout(LATE_S):
            while (await it.post()).status_code != 503:
                pass
        assert {found[1:] for found in await asyncio.gather(*streams)} == {(100, True)}
        assert await end_of(it.router) == 0
        it.router.start()
        await ready(it.router)


def workers(router: Program) -> list[int]:
    return [it.pid for it in router.own.children()]


async def test_processes_on_one_port():
    async def shown() -> list[int]:
        """The requests in flight, as the process of a new connection knows them."""
        close = {"connection": "close"}
        answer = await it.client.get("/replicas", headers=close)
        return [row["requests_under_way"] for row in answer.json()["replicas"]]

    async with routed(OPTION_ROUTER_PROCESSES="2") as it:
        close = {"connection": "close"}
        for _ in range(40):
            answer = await it.client.post("/v1/completions", json={"prompt": "Hi"}, headers=close)
            assert answer.status_code == 200

        async def counted() -> bool:
            """Whether every process shows all requests: each publishes its counts once a second."""
            series = [(await it.client.get("/metrics", headers=close)).text for _ in range(6)]
            done = (
                re.findall(r'requests_total\{[^}]*end="finished"[^}]*\} (\S+)', text)
                for text in series
            )
            return [sum(map(float, found)) for found in done] == [40] * 6

        async def known() -> bool:
            return [sum(await shown()) for _ in range(8)] == [16] * 8

        await until_async(counted, LATE_S)
        streams = [asyncio.create_task(it.stream(200)) for _ in range(16)]
        await until_async(known, LATE_S)
        victim, _ = before = workers(it.router)
        os.kill(victim, signal.SIGKILL)
        await until_async(lambda: len(set(workers(it.router)) - {victim}) == 2, LATE_S)
        assert set(workers(it.router)) & set(before)
        for _ in range(40):
            answer = await it.client.post("/v1/completions", json={"prompt": "Hi"}, headers=close)
            assert answer.status_code == 200
        assert any(complete for _, _, complete in await asyncio.gather(*streams))
        async with asyncio.timeout(LATE_S):
            while any([sum(await shown()) for _ in range(8)]):
                await asyncio.sleep(0.1)
        it.router.kill(signal.SIGTERM)
        assert await end_of(it.router) == 0


async def test_a_process_that_cannot_run_ends_the_router():
    async with routed(OPTION_ROUTER_PROCESSES="2") as it:
        stays, _ = workers(it.router)
        async with asyncio.timeout(LATE_S):
            while it.router.process.poll() is None:
                for victim in set(workers(it.router)) - {stays}:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
                await asyncio.sleep(0.05)
        assert it.router.process.returncode == 1


async def test_series_of_several_processes_forget_replicas_too(tmp_path):
    file = tmp_path / "replicas"
    async with routed(2) as other:
        stays, gone = other.stubs
        file.write_text(stays.url)
        more = {"OPTION_ROUTER_REPLICAS": file.as_uri(), "OPTION_ROUTER_PROCESSES": "2"}
        async with routed(0, [stays.url], **more) as it:
            file.write_text(f"{stays.url}\n{gone.url}")
            await it.ready(2)
            for _ in range(4):
                assert (await it.post()).status_code == 200
            file.write_text(stays.url)
            await it.ready(1)

            async def shown() -> bool:
                close = {"connection": "close"}
                series = [(await it.client.get("/metrics", headers=close)).text for _ in range(6)]
                return any(f'in_flight{{replica="{gone.url}"}}' in text for text in series)

            async with asyncio.timeout(LATE_S):
                while await shown():
                    await asyncio.sleep(0.1)


@pytest.fixture
def told(capsys):
    """Prints measurements, even if pytest captures the output."""

    def say(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{text}\n")

    return say


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.nightly)])
async def test_idle_connections(told, count):
    raise_open_files()
    count = min(count, most_routed() - 500)
    async with routed() as it:
        before = memory(it.router)
        request = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"
        idle = []
        try:
            for place in range(count):
                connection = socket.create_connection(("127.0.0.1", it.router.port), 10)
                connection.sendall(request)
                idle.append(connection)
                if place % 500 == 499:
                    await asyncio.sleep(0)
            for connection in idle:
                assert connection.recv(200).startswith(b"HTTP/1.1 200 ")
            each = (memory(it.router) - before) / count
            began = time.monotonic()
            for _ in range(20):
                assert (await it.post()).status_code == 200
            took = (time.monotonic() - began) / 20
            told(f"{count} idle connections: {each:.0f} bytes each, then {took:.4f} s a request")
            assert each < 16_384
            assert took < 10  # without any it takes some ms
        finally:
            for connection in idle:
                connection.close()


# More connections would fill the kernel's memory for TCP: each takes 8 MB of it in transit.
@pytest.mark.parametrize("count", [40, pytest.param(100, marks=pytest.mark.nightly)])
async def test_slow_readers(told, count):
    sent = 0

    async def answer(replica, asked, writer):
        nonlocal sent
        writer.write(STREAM)
        while True:
            writer.write(chunk(b"x" * 65_536))
            await writer.drain()
            sent += 65_536

    fake = FakeReplica()
    await fake.start()
    fake.answer = answer
    slow = []
    async with routed(0, [fake.url]) as it:
        before = memory(it.router)
        request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nHi"
        try:
            for _ in range(count):
                connection = socket.socket()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", it.router.port))
                connection.sendall(request)
                slow.append(connection)
            async with asyncio.timeout(LATE_S):
                last = -1
                while len(fake.asked) < count or sent > last:  # until all are suspended
                    last = sent
                    await asyncio.sleep(0.5)
            each = (memory(it.router) - before) / count
            told(f"{count} slow readers of {sent / count:.0f} bytes: {each:.0f} of memory each")
            assert each < 1_000_000
            assert (await it.client.get("/ping")).status_code == 200
        finally:
            for connection in slow:
                connection.close()
        await it.idle()
    await fake.stop()


async def test_a_replica_that_goes_down_while_it_is_connected_to(monkeypatch):
    """The request is with another replica by then, and stays there."""
    monkeypatch.setattr(upstream, "CONNECT_S", 10)

    async def slow(replica, asked, writer):
        await asyncio.sleep(0.5)
        writer.write(whole(200, b"slow"))

    async with routing(2, routing_strategy="roundrobin") as it:
        full, other = it.router.pool.replicas
        for fake in it.fleet:
            fake.answer = slow
        with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
            waiting = [socket.socket() for _ in range(3)]
            for connection in waiting:
                connection.setblocking(False)
                connection.connect_ex(silent.getsockname())
            full.port = silent.getsockname()[1]
            answers = [asyncio.create_task(it.post({"prompt": "Hi"})) for _ in range(2)]
            await until_async(lambda: full.in_flight == 1 and other.in_flight == 1)
            it.router._on_gone(full)
            assert [(await answer).text for answer in answers] == ["slow"] * 2
            for connection in waiting:
                connection.close()
        assert sum(len(fake.asked) for fake in it.fleet) == 2
        await until_async(lambda: not it.router.proxied)
        assert (full.in_flight, other.in_flight) == (0, 0)


async def test_a_streamed_request_that_no_replica_has_seen_goes_to_another(monkeypatch):
    monkeypatch.setattr(buffers, "MAX_BODY", 1_000)
    monkeypatch.setattr(health, "PING_S", 60.0)
    async with routing(2, routing_strategy="roundrobin") as it:
        await it.fleet[0].stop()

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b"x" * 5_000
                await asyncio.sleep(0.01)

        for _ in range(4):
            answer = await it.client.post("/v1/completions", content=parts())
            assert answer.json() == {"replica": it.fleet[1].url, "size": 50_000}


async def test_a_router_that_has_just_started():
    """It holds a request that it can serve in a moment."""
    async with routing(2, wait=False) as it:
        answers = await asyncio.gather(*(it.post({"prompt": "Hi"}) for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200}


@pytest.mark.parametrize("path", ["/v1/completions", "/adapters?name=poet&src=/poet"])
async def test_a_replica_that_has_just_become_ready(path, monkeypatch):
    """A client that has learned of it, perhaps from another process of the router, is not
    refused.
    """
    monkeypatch.setattr(health, "PING_S", 60.0)
    async with routing(1, wait=False) as it:
        (replica,) = it.fleet
        replica.ping = (503, {"status": "starting"})
        answers = await asyncio.gather(*(it.post({}, path) for _ in range(50)))
        assert {answer.status_code for answer in answers} == {503}
        assert replica.pings < 10  # their load is negligible
        replica.ping = (200, {"status": "ready"})
        assert (await it.post({}, path)).status_code == 200
