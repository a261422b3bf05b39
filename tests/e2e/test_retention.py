# SPDX-License-Identifier: Apache-2.0
"""Conversations' KV in the memory tier, on the real engine and LMCache: pauses, ends, compaction.

vLLM's own prefix cache is off. The tier has room for 60 chunks. While it is nearly full, LMCache
evicts 12 of them once a second.
"""

import itertools
import time

import pytest

from tests.e2e.conftest import serving
from tests.e2e.test_kv_tiers import CHUNK, ask
from tests.support.harness.wait import until

TOKEN = 2048
"""Bytes of a token's KV in the tiny model."""
LONG = 8 * CHUNK
L1 = 60 * CHUNK * TOKEN
_seeds = itertools.count()


def prompt(count):
    """A prompt of this number of tokens. No other prompt begins with them."""
    seed = next(_seeds)
    return [2 + (seed * 7919 + place * place) % 4000 for place in range(count)]


def say(served, tokens, session=None, headers=()):
    """The cached tokens of a prompt."""
    named = {"X-Session-ID": session} if session else {}
    return ask(served, tokens, {**named, **dict(headers)}, max_tokens=1)[1]


def store(served, tokens, session):
    """Ask until the tier has the prompt: LMCache stores nothing while the tier is full."""
    until(lambda: say(served, tokens, session) >= (len(tokens) - 1) // CHUNK * CHUNK)


def end(served, session):
    """Its last turn. A prompt of less than a chunk does not reach the tiers."""
    say(served, prompt(CHUNK), session, headers={"X-Slipway-Session-Final": "true"})


def flood(served):
    """One-shot prompts of 1.6 times the tier's size."""
    for _ in range(12):
        say(served, prompt(LONG + 1))
        time.sleep(0.7)


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
    tokens = prompt(LONG + 1)
    store(small, tokens, session)
    flood(small)
    cached = say(small, [*tokens, *prompt(8)], session)
    assert cached >= 0.95 * LONG if session else cached < 0.3 * LONG
    if session:
        end(small, session)


def test_an_ended_conversation_goes_first(small):
    tail = prompt(5 * CHUNK)
    shared = prompt(3 * CHUNK)
    store(small, [*shared, *tail], "ends")
    store(small, [*shared, *prompt(CHUNK)], "sibling")
    end(small, "ends")
    flood(small)
    assert say(small, [*shared, *tail]) == len(shared)
    end(small, "sibling")


def test_leases_are_told(small):
    store(small, prompt(2 * CHUNK), "told")
    until(lambda: small.metric("slipway_kv_leases") >= 1, 10)
    assert small.total("slipway_kv_evicted_chunks_total") > 0
