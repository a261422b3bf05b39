# SPDX-License-Identifier: Apache-2.0
"""The eviction of conversations' chunks, on LMCache's classes, without its server."""

from types import SimpleNamespace

import msgspec
import pytest
from lmcache.v1.distributed import storage_controllers
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.config import EvictionConfig
from lmcache.v1.distributed.storage_controllers import eviction_controller
from lmcache.v1.multiprocess.modules.lookup import LookupModule
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from prometheus_client import CollectorRegistry

from serving.cache_hints.intent import CacheIntent
from serving.kv_cache import retention_hint
from serving.kv_cache.lmcache import retention as leases
from serving.kv_cache.lmcache.retention import Retention
from serving.kv_cache.patches import retained_sessions
from serving.kv_cache.retention_hint import RetentionHint

SYSTEM = ["system a", "system b"]


def chunk(name):
    return ObjectKey(chunk_hash=name.encode().ljust(32, b"0"), model_name="m", kv_rank=0)


class Tier:
    """One tier, and the leases of its server."""

    def __init__(self):
        self.now = 1000.0
        self.registry = CollectorRegistry()
        self.retention = Retention(lambda: self.now, self.registry)
        self.policy = self.retention.policy()

    def asks(self, session="", *parts, seconds=0, tenant="", system=SYSTEM, **hint):
        """A request that stores its prompt. session: "" for none."""
        self.now += 1
        keys = [chunk(it) for it in (*system, *parts)]
        self.policy.on_keys_created(keys)
        told = RetentionHint(session=session, seconds=seconds, tenant=tenant, **hint)
        given = {retention_hint.KEY: msgspec.to_builtins(told)}
        self.retention.on_request_end(given if session or seconds or hint else None, keys)

    def evicts(self, share, eligible=None):
        """The names of the evicted chunks."""
        actions = self.policy.get_eviction_actions(share, key_eligible_filter=eligible)
        keys = [key for action in actions for key in action.keys]
        self.policy.on_keys_removed(keys)
        return [key.chunk_hash.decode().rstrip("0") for key in keys]

    def evicted(self, state):
        labels = {"state": state}
        return self.registry.get_sample_value("slipway_kv_evicted_chunks_total", labels) or 0

    @property
    def kept(self):
        return {key.chunk_hash.decode().rstrip("0") for key in self.policy._order}


@pytest.fixture
def tier():
    return Tier()


def flood(tier, count, start=0):
    for number in range(start, start + count):
        tier.asks("", f"flood {number}x", system=[])


def test_without_hints_it_is_lmcaches_lru(tier):
    flood(tier, 10)
    assert tier.evicts(0.3) == ["flood 0x", "flood 1x", "flood 2x"]
    assert tier.evicted("plain") == 3


def test_a_paused_conversation_outlasts_a_flood(tier):
    tier.asks("s", "turn a", "turn b", seconds=300)
    flood(tier, 30)
    tier.evicts(0.5)
    flood(tier, 30, 30)
    tier.evicts(0.5)
    assert {"system a", "system b", "turn a", "turn b"} <= tier.kept
    assert tier.evicted("leased") == 0


def test_a_lease_ends(tier):
    """Its chunks then count as used at its end."""
    flood(tier, 3)
    tier.asks("s", "turn a", seconds=300)
    tier.now += 300
    flood(tier, 4, 3)
    before = [f"flood {number}x" for number in range(3)]
    assert tier.evicts(0.6) == [*before, "turn a", "system b", "system a"]
    assert tier.evicted("leased") == 0


def test_a_turn_renews_the_lease(tier):
    tier.asks("s", "turn a", seconds=300)
    tier.now += 290
    tier.asks("s", "turn a", "turn b", seconds=300)
    flood(tier, 6)
    tier.now += 290
    assert not any("turn" in it for it in tier.evicts(0.5))


def test_a_request_beside_the_conversation_lets_nothing_go(tier):
    """Claude Code asks for a conversation's title by the conversation's id, with another system
    prompt.
    """
    tier.asks("s", "turn a", "turn b", seconds=300)
    tier.asks("s", "title", seconds=300, system=[])
    assert len(tier.retention.lease("s").keys) == 4
    flood(tier, 30)
    tier.evicts(0.5)
    assert {"turn a", "turn b", "title"} <= tier.kept
    tier.asks("s", "turn a", "turn c", seconds=300)
    assert tier.evicts(0.01) == ["turn b"]


def test_a_longer_prompt_that_begins_otherwise_is_the_conversations(tier):
    tier.asks("s", "title", seconds=300, system=[])
    tier.asks("s", "turn a", seconds=300)
    assert len(tier.retention.lease("s").keys) == 3
    flood(tier, 4)
    assert tier.evicts(0.1) == ["title"]
    assert tier.evicted("plain") == 1


def test_the_last_turn_ends_the_conversation_with_any_prompt(tier):
    tier.asks("s", "turn a", seconds=300)
    tier.asks("s", "bye", final=True, system=[])
    assert tier.retention.lease("s") is None


def test_leases_refuse_no_eviction(tier):
    tier.asks("s", "turn a", "turn b", seconds=300)
    assert len(tier.evicts(1.0)) == 4
    assert tier.evicted("leased") > 0


def test_a_shared_chunk_keeps_its_lease_and_can_be_evicted(tier):
    tier.asks("s", "turn a", seconds=300)
    tier.asks("")  # the system prompt alone
    flood(tier, 9)
    assert tier.evicts(0.5) == [f"flood {number}x" for number in range(6)]
    assert len(tier.evicts(1.0)) == 6


def test_leases_beyond_the_budget_count_as_none_the_oldest_first(tier):
    for number in range(10):
        tier.asks(f"s{number}", f"turn {number}x", seconds=300, system=[])
    assert tier.evicts(0.1) == ["turn 0x"]
    assert tier.evicted("plain") == 1


def test_a_long_conversation_keeps_its_beginning(tier):
    parts = [f"turn {number}x" for number in range(20)]
    tier.asks("s", *parts, seconds=300, system=[])
    assert tier.evicts(0.2) == [*reversed(parts)][:4]


def test_a_tenant_leases_no_more_than_its_share(tier):
    for number in range(80):
        tier.asks(f"a{number}", f"greedy {number}x", seconds=300, tenant="a", system=[])
    for number in range(20):
        tier.asks("", f"other {number}x", seconds=0, tenant="b", system=[], low=False)
    tier.evicts(0.2)
    tier.evicts(0.2)
    assert sum("other" in it for it in tier.kept) == 20
    assert tier.evicted("leased") == 0


def test_the_end_lets_the_tail_go_and_not_what_others_use(tier):
    tier.asks("s", "tail a", "tail b", seconds=300)
    tier.asks("sibling", "own", seconds=300)
    flood(tier, 4)
    tier.asks("s", "tail a", "tail b", seconds=300, final=True)
    assert sorted(tier.evicts(0.25)) == ["tail a", "tail b"]
    assert tier.evicted("unwanted") == 2
    assert {"system a", "system b", "own"} <= tier.kept


def test_the_end_by_a_request_of_its_own(tier):
    """As Dynamo's clients tell it: a short request with a header."""
    tier.asks("s", "tail a", "tail b", seconds=300)
    flood(tier, 4)
    tier.asks("s", "bye", seconds=300, final=True, system=[])
    assert sorted(tier.evicts(0.56)) == ["bye", "system a", "system b", "tail a", "tail b"]


def test_compaction_lets_the_old_tail_go(tier):
    tier.asks("s", "long a", "long b", seconds=300)
    flood(tier, 4)
    tier.asks("s", "summary", seconds=300)
    assert sorted(tier.evicts(0.23)) == ["long a", "long b"]


def test_a_low_request_goes_first_but_not_what_others_have_used(tier):
    tier.asks("", "plain")
    tier.asks("", "batch line", low=True)
    flood(tier, 4)
    assert tier.evicts(0.2) == ["batch line"]
    assert {"system a", "system b", "plain"} <= tier.kept


def test_who_uses_a_discarded_chunk_again_keeps_it(tier):
    tier.asks("", "line", low=True, system=[])
    tier.asks("", "line", system=[])
    flood(tier, 3)
    tier.asks("", "other", low=True, system=[])
    assert tier.evicts(0.2) == ["other"]


def test_marks_without_a_conversation_lease_the_prompt(tier):
    tier.asks("", "marked", seconds=300, system=[])
    flood(tier, 9)
    assert tier.evicts(0.1) == ["flood 0x"]


def test_locked_chunks_stay(tier):
    tier.asks("s", "turn a", seconds=300)
    flood(tier, 3)
    locked = {chunk("flood 0x"), chunk("turn a")}
    assert not {*tier.evicts(1.0, lambda key: key not in locked)} & {"flood 0x", "turn a"}


def test_conversations_have_a_bound(tier, monkeypatch):
    monkeypatch.setattr(leases, "SESSIONS", 3)
    monkeypatch.setattr(leases, "OF_A_TENANT", 2)
    for tenant in "ab":
        for number in range(3):
            tier.asks(f"{tenant}{number}", f"{tenant}{number}x", seconds=300, tenant=tenant)
    assert [*tier.retention._sessions] == ["a2", "b1", "b2"]
    monkeypatch.setattr(leases, "CHUNKS", 4)
    tier.asks("c", "cx", seconds=300)
    assert [*tier.retention._sessions] == ["c"]


def test_a_forgotten_conversation_loses_its_lease(tier, monkeypatch):
    monkeypatch.setattr(leases, "SESSIONS", 1)
    tier.asks("old", "old a", seconds=300, system=[])
    tier.asks("new", "new a", seconds=300, system=[])
    flood(tier, 8)
    assert tier.evicts(0.2) == ["old a", "flood 0x"]


def test_chunks_without_a_lease_keep_no_list_of_their_request(tier, monkeypatch):
    """A tier has many chunks, and each list has all chunks of a request."""
    tier.asks("", "plain a", "plain b", system=[])
    tier.asks("old", "old a", seconds=300, system=[])
    monkeypatch.setattr(leases, "SESSIONS", 1)
    tier.asks("new", "new a", seconds=300, system=[])
    lists = {key.chunk_hash.decode().rstrip("0"): it.keys for key, it in tier.policy._order.items()}
    assert [name for name, keys in lists.items() if keys] == ["new a"]


# The way of a hint, and the patch


def test_a_hint_has_the_intent_and_no_more_than_the_operator_allows():
    intent = CacheIntent(session="5" * 32, seconds=7200, final=True)
    told = retention_hint.told(intent, "alice", 3600)
    found = retention_hint.read({**told, "lmcache.other": 1})
    assert found
    assert found == RetentionHint(tenant=found.tenant, session="5" * 32, seconds=3600, final=True)
    assert "alice" not in str(told)
    assert retention_hint.told(intent, "alice", 0) == {}
    assert retention_hint.told(CacheIntent(), "alice", 3600) == {}


@pytest.mark.parametrize(
    "configs", [None, {}, {"lmcache.slipway": 5}, {"lmcache.slipway": {"seconds": "x"}}]
)
def test_odd_hints_are_none(configs):
    assert retention_hint.read(configs) is None


@pytest.fixture
def patched(monkeypatch):
    create = eviction_controller.CreateEvictionPolicy
    monkeypatch.setattr(eviction_controller, "CreateEvictionPolicy", create)
    monkeypatch.setattr(LookupModule, "end_session", LookupModule.end_session)
    retention = Retention(registry=CollectorRegistry())
    retained_sessions.PATCH.apply(retention)
    return retention


def test_operators_other_policies_stay(patched):
    create = storage_controllers.eviction_controller.CreateEvictionPolicy
    assert type(create(EvictionConfig(eviction_policy="LRU"))).__name__ == "RetainingLRU"
    assert type(create(EvictionConfig(eviction_policy="noop"))).__name__ == "NoOpEvictionPolicy"


@pytest.mark.parametrize("broken", [False, True])
def test_the_end_of_a_request_reaches_the_leases(patched, broken, monkeypatch):
    """LMCache ends the request also if the leases fail."""
    hashes = [b"b" * 32, b"a" * 32]
    told = retention_hint.told(CacheIntent(session="s", seconds=60), None, 3600)
    key = SimpleNamespace(request_configs=told)
    session = SimpleNamespace(lookup_ipc_key=key, get_hashes=lambda start: hashes)
    monkeypatch.setattr(TokenHasher, "hash_to_bytes", staticmethod(lambda it: it))
    touched = []
    module = SimpleNamespace(
        _all_object_keys=lambda key, hashes: [
            ObjectKey(chunk_hash=it, model_name="m", kv_rank=0) for it in sorted(hashes)
        ],
        _ctx=SimpleNamespace(
            event_bus=SimpleNamespace(publish=lambda event: None),
            session_manager=SimpleNamespace(get=lambda it: session, remove=lambda it: session),
            storage_manager=SimpleNamespace(touch_l1_keys=touched.extend),
        ),
    )
    if broken:
        monkeypatch.setattr(patched, "on_request_end", None)
    LookupModule.end_session(module, "request")
    assert len(touched) == 2
    if not broken:
        (lease,) = patched._sessions.values()
        assert [it.chunk_hash for it in lease.keys] == hashes
