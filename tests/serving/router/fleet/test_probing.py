# SPDX-License-Identifier: Apache-2.0
"""The rate of a replica's probes, and the process that makes them."""

import asyncio

import pytest

from serving.router.fleet import health
from serving.router.fleet.health import Seen, pause
from serving.router.fleet.replicas import State
from tests.serving.router.conftest import FakeReplica, routing, sends, whole
from tests.support.harness.process import ROUTE, Program
from tests.support.harness.wait import turns, until_async

pytestmark = pytest.mark.anyio


def test_a_large_fleet_is_asked_less_often(monkeypatch):
    monkeypatch.setattr(health, "PING_S", 1.0)
    assert [pause(count) for count in (1, 100, 200, 1_000)] == [1, 1, 2, 10]


async def test_a_replica_that_answers_is_not_asked_whether_it_can(monkeypatch):
    async with routing(1) as it:
        (replica,) = it.router.pool.replicas
        probe = it.router._health._probes[replica.name]
        monkeypatch.setattr(health, "PING_S", 60.0)
        await turns()
        now = probe._checked_at
        replica.answered_at = now - 61
        assert probe._is_due(now, 60)
        before = replica.answered_at
        assert (await it.post({"prompt": "Hi"})).status_code == 200
        assert replica.answered_at > before
        now = probe._checked_at
        replica.answered_at = now - 59
        assert not probe._is_due(now, 60)
        # Now and then it is probed all the same.
        replica.answered_at = now + health.LISTED * 60
        assert probe._is_due(now + health.LISTED * 60, 60)
        # A busy answer, or an error, shows nothing about its health.
        replica.answered_at = now - 61
        it.fleet[0].answer = sends(whole(503, b"busy"))
        await it.post({"prompt": "Hi"})
        assert replica.answered_at == now - 61


async def test_what_another_process_has_seen_is_not_asked_again(monkeypatch):
    async with routing(1) as it:
        (replica,), checks = it.router.pool.replicas, it.router._health
        probe = checks._probes[replica.name]
        monkeypatch.setattr(health, "PING_S", 60.0)
        (fake,) = it.fleet
        await turns()
        before = fake.pings
        checks.on_seen(probe._seen())
        checks.on_seen(Seen("http://127.0.0.1:9", State.DOWN, "", "", 0))  # not ours yet
        await turns()
        assert fake.pings == before
        # Each process verifies a difference itself, and at once.
        fake.ping = 503, {"status": "draining"}
        checks.on_seen(Seen(replica.name, State.DRAINING, "", "", 0))
        await until_async(lambda: replica.state is State.DRAINING)
        fake.ping = 200, {"status": "ready"}
        checks.on_seen(Seen(replica.name, State.READY, "", "", 0))
        await until_async(lambda: replica.state is State.READY)
        fake.models = [{"id": "base"}, {"id": "new", "parent": "base"}]
        checks.on_seen(Seen(replica.name, State.READY, "", "", 1))
        await until_async(lambda: replica.adapters == {"new"})


@pytest.fixture
async def fakes():
    found = [FakeReplica(), FakeReplica()]
    for it in found:
        await it.start()
    yield found
    for it in found:
        await it.stop()


async def test_one_process_asks_for_all(fakes):
    """Four processes probe hardly more often than one."""
    alone, together = fakes
    routers = [
        Program(*ROUTE, environ={"OPTION_ROUTER_REPLICAS": it.url, "OPTION_ROUTER_PROCESSES": n})
        for it, n in ((alone, "1"), (together, "4"))
    ]
    try:
        for router in routers:
            router.start()
        for router in routers:
            await asyncio.to_thread(router.ready)
        await until_async(lambda: alone.pings > 5 and together.pings > 12)  # each for itself
        before = alone.pings, together.pings
        await until_async(lambda: alone.pings >= before[0] + 12)
        assert together.pings - before[1] <= 2 * (alone.pings - before[0])
    finally:
        for router in routers:
            router.end()
