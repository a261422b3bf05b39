# SPDX-License-Identifier: Apache-2.0
"""Requests that the router holds because no replica is ready or all are full: all their ends."""

import asyncio
import json
import logging
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.router.http import buffers
from tests.serving.access.test_access import SECRET, bearer, written
from tests.serving.router.conftest import FakeReplica, Routed, routing, whole
from tests.support.harness import stub_replica
from tests.support.harness.process import ROUTE, Program
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

LATE_S = 120.0  # machines are noisy
HELD_MS = "x-slipway-held-ms"


def full(fleet: list[FakeReplica], slots: int = 1) -> None:
    """Each replica has room for this number of requests."""
    for it in fleet:
        it.tiers = f"slipway_request_slots {slots}"


class Steps:
    """Answers of replicas, released one by one by the test."""

    def __init__(self, *fleet: FakeReplica) -> None:
        self.prompts: list[str] = []  # of the requests that replicas have got, in order
        self._go = asyncio.Semaphore(0)
        for it in fleet:
            it.answer = self._answer

    async def _answer(self, replica, asked, writer):
        self.prompts.append(asked.json()["prompt"])
        await self._go.acquire()
        # Otherwise its connection is used again before the fake has noticed the end of its answer.
        writer.write(whole(200, b"{}", "connection: close"))

    def more(self, count: int = 1) -> None:
        for _ in range(count):
            self._go.release()

    async def got(self, count: int) -> None:
        await until_async(lambda: len(self.prompts) == count)


def ask(it: Routed, prompt: str, **more) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(it.post({"prompt": prompt}, **more))


async def held(it: Routed, count: int) -> None:
    await until_async(lambda: len(it.router.routing.held) == count)


async def series(client: httpx.AsyncClient, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", (await client.get("/metrics")).text, re.M)
    return float(found[1]) if found else 0.0


@asynccontextmanager
async def holding(slots: int = 1, **settings: Any) -> AsyncIterator[Routed]:
    """A router that holds requests, and its only replica. slots: the replica's room."""
    async with routing(1, wait=False, **({"router_hold": 60} | settings)) as it:
        full(it.fleet, slots)
        await it.ready()
        yield it


@pytest.fixture
async def one():
    async with holding() as it:
        yield it


@pytest.fixture
def lines(caplog):
    """The facts of the lines about requests so far."""
    caplog.set_level(logging.INFO, "serving.access")
    return lambda: [it.facts for it in caplog.records if it.name == "serving.access"]


async def test_without_the_option_nothing_is_held_and_ping_says_so():
    async with holding(router_hold=0) as it:
        steps = Steps(*it.fleet)
        asked = [ask(it, str(n)) for n in range(3)]
        await steps.got(3)
        assert not len(it.router.routing.held)
        steps.more(3)
        for answer in asked:
            assert HELD_MS not in (await answer).headers
        await it.fleet[0].stop()
        await it.ready(0)
        assert (await it.client.get("/ping")).status_code == 503


async def test_with_room_for_it_no_request_is_held(one):
    answer = await one.post({"prompt": "a"})
    assert answer.status_code == 200
    assert HELD_MS not in answer.headers


async def test_what_no_replica_has_room_for_waits_for_its_turn(one):
    steps = Steps(*one.fleet)
    asked = []
    for number in range(4):
        asked.append(ask(one, str(number)))
        if number:
            await held(one, number)
        else:
            await steps.got(1)
    assert await series(one.client, "slipway_router_held") == 3
    for count in range(4):
        steps.more()
        assert (await asked[count]).status_code == 200
        if count < 3:
            await steps.got(count + 2)
            assert len(one.router.routing.held) == 2 - count
    assert steps.prompts == ["0", "1", "2", "3"]
    assert HELD_MS not in (await asked[0]).headers
    assert int((await asked[3]).headers[HELD_MS]) >= 0
    assert await series(one.client, "slipway_router_held_wait_seconds_count") >= 3
    # Requests that every replica answers in the same way are not held.
    assert (await one.client.get("/v1/models")).status_code == 200


async def test_requests_that_replicas_do_not_choose_by_are_not_held():
    async with routing(1, wait=False, router_hold=60) as it:
        await it.fleet[0].stop()
        await it.ready(0)
        assert (await it.client.get("/v1/models")).status_code == 503


async def test_a_client_that_leaves_while_it_is_held(one, caplog):
    steps = Steps(*one.fleet)
    first = ask(one, "first")
    await steps.got(1)
    body = b'{"prompt": "gone"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    _, writer = await one.raw(head + body)
    await held(one, 1)
    last = ask(one, "last")
    await held(one, 2)
    writer.close()
    await held(one, 1)
    steps.more(2)
    for it in (first, last):
        assert (await it).status_code == 200
    assert steps.prompts == ["first", "last"]
    assert (len(one.router.routing.held), one.router.routing.held.bytes) == (0, 0)


async def test_a_request_that_is_held_for_too_long(lines):
    async with routing(1, router_hold=1) as it:
        await it.fleet[0].stop()
        await it.ready(0)
        before = await series(it.client, 'slipway_router_held_refused_total{reason="expired"}')
        answer = await it.post({"prompt": "a"})
        assert answer.status_code == 503
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert "no server could take the request within" in answer.json()["error"]["message"]
        expired = await series(it.client, 'slipway_router_held_refused_total{reason="expired"}')
        assert expired == before + 1
        (line,) = [line for line in lines() if line["path"] == "/v1/completions"]
        assert line["error"] == "Overloaded"
        assert line["held_ms"] >= 1000


@pytest.mark.parametrize("what", ["requests", "bytes"])
async def test_beyond_its_bounds_nothing_is_held(monkeypatch, what):
    bounds = {"requests": ("MOST_HELD", 3), "bytes": ("MOST_HELD_BYTES", 150)}
    name, value = bounds[what]
    monkeypatch.setattr(f"serving.router.router.{name}", value)
    async with routing(1, router_hold=60) as it:
        await it.fleet[0].stop()
        await it.ready(0)
        body = {"prompt": "a" * 30}
        asked = [asyncio.create_task(it.post(body)) for _ in range(3)]
        await held(it, 3)
        answer = await it.post(body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        told = "3 requests wait for a server, as many as there is room for; try again"
        assert answer.json()["error"]["message"] == told
        await it.fleet[0].start()
        for found in asked:
            assert (await found).status_code == 200


async def test_a_body_of_any_size_is_held_and_not_read_further():
    async with routing(1, router_hold=60) as it:
        await it.fleet[0].stop()
        await it.ready(0)
        body = json.dumps({"prompt": "a" * (3 * buffers.MAX_BODY)}).encode()
        asked = asyncio.create_task(it.post(body))
        await held(it, 1)
        await asyncio.sleep(0.2)
        assert it.router.buffers.bodies < 2 * buffers.MAX_BODY
        await it.fleet[0].start()
        assert (await asked).json()["size"] == len(body)


async def test_a_router_that_stops_fails_what_it_holds_at_once(one):
    steps = Steps(*one.fleet)
    inside = ask(one, "inside")
    await steps.got(1)
    waiting = [ask(one, "held") for _ in range(3)]
    await held(one, 3)
    one.router.stop()
    for it in waiting:
        answer = await it
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == "the router is stopping"
    steps.more()
    assert (await inside).status_code == 200
    await asyncio.wait_for(one.task, 10)


async def die(replica, asked, writer):
    writer.transport.abort()


async def refuse(replica, asked, writer):
    writer.write(whole(503, b"{}"))


@pytest.mark.parametrize("fails", [die, refuse])
async def test_a_replica_that_fails_at_once_does_not_take_the_whole_queue(one, fails):
    """It gets no second request before it has been probed, which happens once a second."""
    steps = Steps(*one.fleet)
    replica = one.fleet[0]
    inside = ask(one, "inside")
    await steps.got(1)
    waiting = []
    for number in range(6):
        waiting.append(ask(one, str(number)))
        await held(one, number + 1)
    failed: list[str] = []

    async def fail(fake, asked, writer):
        failed.append(asked.json()["prompt"])
        fake.ping = 500, {}
        await fails(fake, asked, writer)

    replica.answer = fail
    steps.more()
    assert (await inside).status_code == 200
    assert (await waiting[0]).status_code in (502, 503)
    await one.ready(0)
    left = len(one.router.routing.held)
    assert left >= 3  # a ping may have come in between
    assert failed == [str(n) for n in range(6 - left)]
    replica.answer, replica.ping = None, (200, {})
    for answer in waiting[6 - left :]:
        assert (await answer).status_code == 200


async def test_with_keys_a_flood_of_one_does_not_hold_up_the_others(tmp_path):
    keys = written(tmp_path / "keys.json")
    async with holding(api_keys_file=keys, router_secret=SECRET) as it:
        steps = Steps(*it.fleet)
        asked = [ask(it, "inside", headers=bearer("team-a"))]
        await steps.got(1)
        noisy = [f"a{n}" for n in range(6)]
        for count, prompt in enumerate([*noisy, "b0", "b1"], 1):
            key = "team-a" if prompt in noisy else "team-b"
            asked.append(ask(it, prompt, headers=bearer(key)))
            await held(it, count)
        steps.more(len(asked))
        for answer in asked:
            assert (await answer).status_code == 200
        assert steps.prompts[1:] == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


OBJECTIVES = """
kind: InferenceObjective
metadata: {name: urgent}
spec: {priority: 10}
---
kind: InferenceObjective
metadata: {name: bulk}
spec: {priority: -10}
"""


async def test_priorities_go_first_and_what_may_be_shed_is_not_held(tmp_path):
    objectives = tmp_path / "objectives.yaml"
    objectives.write_text(OBJECTIVES)

    def named(name):
        return {"x-gateway-inference-objective": name}

    async with holding(router_objectives=str(objectives), router_secret=SECRET) as it:
        steps = Steps(*it.fleet)
        asked = [ask(it, "inside")]
        await steps.got(1)
        for count, prompt in enumerate(["plain", "urgent", "plain2", "urgent2"], 1):
            asked.append(ask(it, prompt, headers=named(prompt.rstrip("2"))))
            await held(it, count)
        answer = await ask(it, "bulk", headers=named("bulk"))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        steps.more(len(asked))
        for found in asked:
            assert (await found).status_code == 200
        assert steps.prompts == ["inside", "urgent", "urgent2", "plain", "plain2"]


async def test_in_a_full_queue_the_longest_lane_loses_its_newest_request(tmp_path, monkeypatch):
    monkeypatch.setattr("serving.router.router.MOST_HELD", 3)
    keys = written(tmp_path / "keys.json")
    async with holding(api_keys_file=keys, router_secret=SECRET) as it:
        steps = Steps(*it.fleet)
        asked = [ask(it, "inside", headers=bearer("team-a"))]
        await steps.got(1)
        for count in range(1, 4):
            asked.append(ask(it, f"a{count}", headers=bearer("team-a")))
            await held(it, count)
        other = ask(it, "b1", headers=bearer("team-b"))
        answer = await asked.pop()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await ask(it, "a4", headers=bearer("team-a"))).status_code == 503
        steps.more(4)
        for found in (*asked, other):
            assert (await found).status_code == 200
        assert steps.prompts == ["inside", "a1", "b1", "a2"]


class Container:
    """A router process that holds requests, and a server that is not started yet."""

    def __init__(self, stub: Program, router: Program, client: httpx.AsyncClient) -> None:
        self.stub, self.router, self.client = stub, router, client
        self.woken = False

    async def ask(self, number: int) -> httpx.Response:
        body = {"prompt": f"{number}", "stream": True, "max_tokens": 2}
        headers = {"x-request-id": f"number-{number}"}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def ended(self, count: int) -> list[str]:
        """The requests by their ends, from the router's log."""
        log = self.router.log
        assert log
        found: list[str] = []
        async with asyncio.timeout(LATE_S):
            while len(found) < count:
                await asyncio.sleep(0.05)
                found = re.findall(r'"request_id":\s?"(number-\d+)"', log.read_text())
        return found

    async def held(self, count: int) -> None:
        async with asyncio.timeout(LATE_S):
            while await series(self.client, "slipway_router_held") != count:
                await asyncio.sleep(0.02)

    def end(self) -> None:
        if self.woken:
            self.stub.end()

    async def scaler(self) -> None:
        """A stand-in for KEDA with autoscaling.yaml: it polls the series, and starts a server."""
        async with asyncio.timeout(LATE_S):
            while not await series(self.client, "slipway_router_held"):
                await asyncio.sleep(0.05)
        self.woken = True
        await asyncio.to_thread(self.stub.start)


@asynccontextmanager
async def scaled_to_zero(folder: Path, **environ: str) -> AsyncIterator[Container]:
    stub = Program(sys.executable, stub_replica.__file__, "{port}", "--slots=1", "--rate=200")
    options = {"OPTION_ROUTER_REPLICAS": stub.url, "OPTION_ROUTER_HOLD_S": "90"}
    router = Program(*ROUTE, environ=options | environ, log=folder / "router.log")
    async with AsyncExitStack() as stack:
        router.start()
        stack.callback(router.end)
        client = httpx.AsyncClient(base_url=router.url, timeout=LATE_S)
        await stack.enter_async_context(client)
        await asyncio.to_thread(router.ready, LATE_S)
        it = Container(stub, router, client)
        stack.callback(it.end)
        yield it


async def test_at_zero_a_server_is_woken_and_answers_in_order(tmp_path):
    async with scaled_to_zero(tmp_path) as it:
        answer = await it.client.get("/ping")
        assert answer.status_code == 200
        assert "requests wait for one for at most 90 s" in answer.json()["detail"]
        assert await series(it.client, "slipway_router_held") == 0
        asked = []
        for number in range(8):
            asked.append(asyncio.create_task(it.ask(number)))
            await it.held(number + 1)
        await it.scaler()
        for found in asked:
            assert (await found).status_code == 200
        assert await it.ended(8) == [f"number-{number}" for number in range(8)]
        assert await series(it.client, "slipway_router_held") == 0


async def test_at_zero_each_of_several_processes_holds_and_the_sum_is_told(tmp_path):
    async with scaled_to_zero(tmp_path, OPTION_ROUTER_PROCESSES="2") as it:
        asked = [asyncio.create_task(it.ask(number)) for number in range(12)]
        await it.held(12)
        await it.scaler()
        for answer in asked:
            assert (await answer).status_code == 200
        await it.held(0)


async def test_a_router_that_is_stopped_at_zero_answers_what_it_holds(tmp_path):
    async with scaled_to_zero(tmp_path) as it:
        asked = [asyncio.create_task(it.ask(number)) for number in range(5)]
        await it.held(5)
        it.router.kill(signal.SIGTERM)
        for found in asked:
            assert (await found).status_code == 503
            assert (await found).headers["retry-after"] == "1"
        assert await asyncio.to_thread(it.router.process.wait, LATE_S) == 0
