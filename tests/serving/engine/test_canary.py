# SPDX-License-Identifier: Apache-2.0
"""The verification of hits of the KV cache tiers: which answers count as different, and the
consequences.

The engine here is a stand-in for vLLM's client, which returns the candidates that the test sets;
tests/e2e has the real one.
"""

import asyncio
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.canary import canary
from serving.engine.canary.canary import Canary
from serving.engine.canary.comparison import WITHOUT_TIERS, Tally, Verification, differs

pytestmark = pytest.mark.anyio
TOP, ANY = 0.5, 2.0
LIKELY = {1: -0.1, 2: -3.0, 3: -5.0}
candidates = st.dictionaries(st.integers(0, 30), st.floats(-30, 0), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("computed", "different"),
    [
        (LIKELY, False),
        ({1: -0.2, 2: -2.9, 3: -5.4}, False),
        ({1: -0.9, 2: -0.8, 3: -5.0}, True),  # another token is first, by 2.2
        ({1: -0.5, 2: -0.4, 3: -5.0}, True),
        ({1: -0.1, 2: -5.1, 3: -5.0}, True),  # any token, by 2.1
        ({1: -0.1, 2: -4.9, 3: -5.0}, False),
        ({1: -0.1, 2: -3.0, 9: -2.5}, True),  # 9 had at most -5.0
        ({1: -0.1, 2: -3.0, 9: -4.9}, False),
        ({7: -0.1, 8: -3.0, 9: -5.0}, True),
        ({}, True),
    ],
)
def test_what_is_different(computed, different):
    assert differs(LIKELY, computed, TOP, ANY) is different


def test_two_tokens_that_are_as_likely_are_not_different():
    assert not differs({1: -0.69, 2: -0.70}, {1: -0.70, 2: -0.69}, TOP, ANY)


@given(candidates, candidates)
def test_sides_can_be_swapped(one, other):
    assert differs(one, other, TOP, ANY) == differs(other, one, TOP, ANY)
    assert not differs(one, one, TOP, ANY)


@given(candidates)
def test_limits_that_nothing_exceeds(one):
    assert not differs(one, {1: -1.0}, math.inf, math.inf)


@pytest.mark.parametrize(
    ("came", "off"),
    [
        ([1, 1, 1], True),
        ([1, 1], False),
        ([1, *[0] * 17, 1, 1], True),
        ([1, *[0] * 18, 1, 1], False),
        ([1, 1, 1, *[0] * 30], True),
    ],
)
def test_three_of_twenty(came, off):
    tally = Tally()
    for it in came:
        tally.add(bool(it))
    assert tally.off is off


class Client:
    """vLLM's client, as far as the canary uses it."""

    def __init__(self, wrong: bool = False, cached: int = 128) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                logprobs_mode="raw_logprobs", max_logprobs=20, architecture="Tiny"
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=4, policy="fcfs"),
            parallel_config=SimpleNamespace(data_parallel_size=1),
        )
        self.wrong, self.cached = wrong, cached
        self.asked: list[tuple[Mapping[str, Any], Any]] = []
        self.going_on = asyncio.Event()
        self.going_on.set()
        self.fault: Exception | None = None

    async def generate(self, prompt, sampling, name, *, lora_request, priority):
        self.asked.append((prompt, sampling))
        await self.going_on.wait()
        if self.fault:
            raise self.fault
        loaded = prompt.get("cache_salt") == "own"
        found = {9: -0.1} if loaded and self.wrong else {1: -0.1, 2: -3.0}
        places = [{token: SimpleNamespace(logprob=it) for token, it in found.items()}]
        yield SimpleNamespace(
            num_cached_tokens=self.cached if loaded else 0,
            outputs=[SimpleNamespace(logprobs=places)],
        )


def asked(**more: Any) -> Any:
    made: dict[str, Any] = {
        "sampling_params": SimpleNamespace(extra_args=None),
        "prompt_token_ids": [1, 2, 3],
        "cache_salt": "own",
        "lora_request": None,
        "prompt_embeds": None,
        "mm_features": None,
        "resumable": False,
    }
    return SimpleNamespace(**made | more)


def made(client: Client, every: int = 1) -> Canary:
    return Canary(client, Verification(every, TOP, ANY, "l1+disk"))


async def hits(watch: Canary, count: int = 1, **more: Any) -> None:
    for _ in range(count):
        watch.hit(asked(**more), 1)
        if watch._task:
            await asyncio.wait([watch._task])


def verified(watch: Canary) -> asyncio.Task[None]:
    assert watch._task
    return watch._task


def counted(result: str) -> float:
    value: float = canary._VERIFIED.labels("Tiny", "l1+disk", result)._value.get()
    return value


async def test_a_hit_is_computed_with_its_own_salt_and_with_one_that_nothing_has(caplog):
    client, before = Client(), counted("same")
    watch = made(client)
    await hits(watch)
    (loaded, sampling), (computed, _) = client.asked
    assert loaded["cache_salt"] == "own"
    assert len(computed["cache_salt"]) == 32
    assert loaded["prompt_token_ids"] == computed["prompt_token_ids"] == [1, 2, 3]
    assert sampling.max_tokens == 1
    assert sampling.extra_args["kv_transfer_params"] == {WITHOUT_TIERS: True}
    assert counted("same") == before + 1
    assert not caplog.records


async def test_one_hit_in_four_is_verified(caplog):
    client = Client()
    await hits(made(client, every=4), 11)
    assert len(client.asked) == 2 * 2


async def test_after_three_that_differ_requests_are_marked_and_no_prompt_is_logged(caplog):
    watch = made(Client(wrong=True))
    marked = asked()
    await hits(watch, 2)
    watch.begin(marked)
    assert marked.sampling_params.extra_args is None
    await hits(watch)
    watch.begin(marked)
    assert marked.sampling_params.extra_args == {"kv_transfer_params": {WITHOUT_TIERS: True}}
    assert marked.cache_salt.endswith("own")  # KV that was loaded before is no longer found
    assert len(marked.cache_salt) > 16
    kept, other, plain = marked.cache_salt, asked(), asked(cache_salt=None)
    for request in (marked, other, plain):
        watch.begin(request)
    assert marked.cache_salt == other.cache_salt == kept  # each tenant keeps its salt
    assert plain.cache_salt == kept.removesuffix("own")
    assert canary._OFF._value.get() == 1
    text = caplog.text
    assert all(it in text for it in ("l1+disk", "Tiny", "used no more"))
    assert "[1, 2, 3]" not in text
    await hits(watch)
    assert len(watch._client.asked) == 2 * 3


async def test_what_a_request_says_itself_stays():
    watch = made(Client(wrong=True))
    await hits(watch, 3)
    request = asked(
        sampling_params=SimpleNamespace(extra_args={"a": 1, "kv_transfer_params": {"b": 2}})
    )
    watch.begin(request)
    assert request.sampling_params.extra_args == {
        "a": 1,
        "kv_transfer_params": {"b": 2, WITHOUT_TIERS: True},
    }


@pytest.mark.parametrize(
    "more",
    [
        {"sampling_params": None},
        {"prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"mm_features": [object()]},
        {"resumable": True},
    ],
)
async def test_what_cannot_be_verified_is_not(more):
    client = Client()
    await hits(made(client), **more)
    assert not client.asked


async def test_one_at_a_time_and_none_where_the_engine_is_busy():
    client, before = Client(), counted("skipped")
    watch = made(client)
    watch.hit(asked(), 5)
    assert not client.asked
    client.going_on.clear()
    watch.hit(asked(), 4)
    await asyncio.sleep(0)
    watch.hit(asked(), 1)
    client.going_on.set()
    await asyncio.wait([verified(watch)])
    assert len(client.asked) == 2
    assert counted("skipped") == before + 2


async def test_what_has_been_evicted_or_fails_is_not_compared():
    before = counted("skipped")
    evicted, failing = Client(wrong=True, cached=0), Client(wrong=True)
    failing.fault = RuntimeError("the prompt")
    for client in (evicted, failing):
        watch = made(client)
        await hits(watch, 4)
        assert not watch.tally.off
    assert counted("skipped") == before + 8


async def test_a_stop_gives_up_what_is_verified():
    client = Client()
    client.going_on.clear()
    watch = made(client)
    watch.hit(asked(), 1)
    await asyncio.sleep(0)
    await watch.stop()
    assert verified(watch).cancelled()


async def test_an_engine_without_log_probabilities_is_not_asked(caplog):
    client = Client()
    client.vllm_config.model_config.max_logprobs = 0
    await hits(made(client))
    assert not client.asked
    assert "max_logprobs" in caplog.text
