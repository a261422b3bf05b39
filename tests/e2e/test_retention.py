# SPDX-License-Identifier: Apache-2.0
"""Conversations' KV in the memory tier, on the real engine and LMCache: pauses, ends, compaction.

vLLM's own prefix cache is off. The tier has room for 1.5 prompts of the longest length.
"""

import itertools
import time

import pytest

from tests.e2e.conftest import serving
from tests.e2e.test_kv_tiers import CHUNK, ask

TOKEN = 2048
"""Bytes of a token's KV in the tiny model."""
LONG = 28 * CHUNK
L1 = 1.5 * LONG * TOKEN
_seeds = itertools.count()


def prompt(count, seed=None):
    """So many tokens that no other prompt begins with."""
    seed = next(_seeds) if seed is None else seed
    return [2 + (seed * 7919 + place * place) % 4000 for place in range(count)]


def say(served, tokens, session=None, **more):
    """The cached tokens of a prompt, after it was stored."""
    headers = {"X-Session-ID": session} if session else {}
    _, cached = ask(served, tokens, {**headers, **more.pop("headers", {})}, max_tokens=1, **more)
    return cached


def flood(served):
    """One-shot prompts, three times as much as the tier has room for."""
    for _ in range(6):
        say(served, prompt(3 * LONG // 4))
        time.sleep(1)  # LMCache evicts once a second


@pytest.fixture(scope="module")
def small(tiny_options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("retention")
    (folder / "lmcache.yaml").write_text(f"max_local_cpu_size: {L1 / (1 << 30)}\n")
    options = {
        **tiny_options,
        "OPTION_ENABLE_PREFIX_CACHING": "false",
        "OPTION_LMCACHE_CONFIG_FILE": str(folder / "lmcache.yaml"),
    }
    with serving(folder / "log", **options) as served:
        served.ready()
        yield served


@pytest.mark.parametrize("session", ["paused", None])
def test_a_paused_conversation_outlasts_one_shots(small, session):
    tokens = prompt(LONG)
    say(small, tokens, session)
    time.sleep(1.5)
    flood(small)
    cached = say(small, [*tokens, *prompt(8)], session)
    assert cached >= 0.95 * LONG if session else cached < 0.3 * LONG
    say(small, prompt(8), session, headers={"X-Slipway-Session-Final": "true"})


def test_an_ended_conversation_goes_first(small):
    tail = prompt(LONG // 2)
    shared = prompt(LONG // 4)
    say(small, [*shared, *tail], "ends")
    say(small, [*shared, *prompt(CHUNK)], "sibling")
    say(small, prompt(8), "ends", headers={"X-Slipway-Session-Final": "true"})
    flood(small)
    cached = say(small, [*shared, *tail])
    assert len(shared) // CHUNK * CHUNK <= cached <= len(shared) + CHUNK
    say(small, prompt(8), "sibling", headers={"X-Slipway-Session-Final": "true"})


def test_leases_are_told(small):
    say(small, prompt(2 * CHUNK), "told")
    deadline = time.monotonic() + 10
    while not small.metric("slipway_kv_leases") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert small.metric("slipway_kv_leases") >= 1
    assert small.total("slipway_kv_evicted_chunks_total") > 0
