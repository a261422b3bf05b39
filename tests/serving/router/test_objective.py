# SPDX-License-Identifier: Apache-2.0
"""Objectives for the first token, and forecasts of it, through the router's door."""

import itertools
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serving.router import placement
from serving.router.forecast import first_token
from tests.serving.router.conftest import END, STREAM, FakeReplica, Routed, chunk, routing

pytestmark = pytest.mark.anyio

SLOW_S = 100.0
WITHIN = "x-slipway-slo-ttft-ms"
GOAL_MS, FAR_MS = 50_000, 200_000
RATIOS = "slipway_router_first_token_forecast_ratio_count"
_numbers = itertools.count()


class Clock:
    """The clock of placements. A slow replica sets it forward."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Little is enough to learn, and any forecast is trusted: machines are noisy."""
    it = Clock()
    monkeypatch.setattr(placement, "time", it)
    monkeypatch.setattr(first_token, "LEAST", 2)
    monkeypatch.setattr(first_token, "MEMORY_S", 1e9)
    monkeypatch.setattr(first_token, "RATIOS", 2)
    monkeypatch.setattr(first_token, "LOOKED_AT", 1)
    monkeypatch.setattr(first_token, "TRUSTED", (0.0, 1e9))
    return it


@asynccontextmanager
async def unequal(clock: Clock, **settings: Any) -> AsyncIterator[Routed]:
    """A router with one quick replica and one slow one."""

    async def answer(replica, asked, writer):
        clock.ahead += SLOW_S * (replica is it.fleet[1])
        writer.write(STREAM + chunk(b"data: 1\n\n") + END)

    async with routing(2, **settings) as it:
        for replica in it.fleet:
            replica.answer = answer
        yield it


async def ask(
    it: Routed, count: int, *, stream: bool = True, within_ms: int | None = None
) -> Counter[int]:
    """Send new prompts, one after another. Returns the number that each replica got, by place."""
    headers = {} if within_ms is None else {WITHIN: str(within_ms)}
    before = [len(replica.asked) for replica in it.fleet]
    for _ in range(count):
        body = {"prompt": f"{next(_numbers)} new", "stream": stream}
        assert (await it.post(body, headers=headers)).status_code == 200
    return Counter({n: len(it.fleet[n].asked) - before[n] for n in range(2)})


async def reported(it: Routed) -> float:
    found = re.search(rf"^{RATIOS} (\S+)$", (await it.client.get("/metrics")).text, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def test_forecasts_of_streams_are_reported_once_enough_is_known(clock):
    async with unequal(clock) as it:
        before = await reported(it)
        assert await ask(it, 4) == {0: 2, 1: 2}
        assert await reported(it) == before
        await ask(it, 6)
        assert await reported(it) == before + 6
        await ask(it, 2, stream=False)
        assert await reported(it) == before + 6


async def test_a_failure_is_no_measured_time(clock):
    async def fail(replica: FakeReplica, asked, writer):
        writer.write(b"HTTP/1.1 400 No\r\ncontent-length: 2\r\n\r\nno")

    async with unequal(clock) as it:
        await ask(it, 4)
        before = await reported(it)
        for replica in it.fleet:
            replica.answer = fail
        for _ in range(4):
            body = {"prompt": f"{next(_numbers)} new", "stream": True}
            assert (await it.post(body)).status_code == 400
        assert await reported(it) == before


async def test_a_request_goes_where_its_objective_is_expected_to_be_met(clock):
    async with unequal(clock) as it:
        assert await ask(it, 8) == {0: 4, 1: 4}
        assert await ask(it, 4, within_ms=GOAL_MS) == {0: 4, 1: 0}
        assert await ask(it, 4, stream=False, within_ms=GOAL_MS) == {0: 4, 1: 0}
        assert (await ask(it, 4))[1] > 0
        # Where none is expected to meet it, the choice is as without it.
        it.router.pool.named[it.fleet[0].url].first_token.base = SLOW_S
        assert (await ask(it, 4, within_ms=GOAL_MS))[1] > 0


async def test_the_option_is_the_objective_of_requests_that_name_none(clock):
    async with unequal(clock, slo_ttft_ms=GOAL_MS) as it:
        assert await ask(it, 4) == {0: 2, 1: 2}
        await ask(it, 4, within_ms=FAR_MS)
        assert await ask(it, 4) == {0: 4, 1: 0}
        assert (await ask(it, 4, within_ms=FAR_MS))[1] > 0


async def test_forecasts_that_are_not_good_enough_change_no_choice(clock, monkeypatch):
    monkeypatch.setattr(first_token, "TRUSTED", (1e9, 1e9))
    async with unequal(clock, slo_ttft_ms=GOAL_MS) as it:
        assert await ask(it, 12) == {0: 6, 1: 6}


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "", "1" * 10])
async def test_an_objective_that_is_none_is_refused_by_name(value):
    async with routing(1) as it:
        answer = await it.post({"prompt": "a"}, headers={WITHIN: value})
        assert answer.status_code == 400
        assert WITHIN in answer.text
        assert "like 500" in answer.text
        assert not it.fleet[0].asked
