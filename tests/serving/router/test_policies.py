"""Who gets a request, by strategy. tests/scripts/test_simulate_routing.py has them over time."""

from collections import Counter

import pytest

from serving.router.kv_index import KvIndex
from serving.router.policies import (
    ADAPTER_LOAD,
    BATCH,
    PER_REQUEST,
    Asked,
    KvAware,
    Load,
    PrefixAware,
    RoundRobin,
    Session,
)
from serving.router.prefix_index import CHUNK, DEFAULT_TOKENS, TTL_S, PrefixIndex, chain


def fleet(**loads: tuple[int, int]) -> list[Load]:
    """Replicas by name: requests under way, prompt tokens queued."""
    return [Load(name, *load) for name, load in loads.items()]


def prompt(tokens: int, text: bytes = b"word") -> Asked:
    body = text * (tokens * 4 // len(text))
    return Asked(tokens=tokens, chain=chain(body, ""))


def idle(count: int) -> list[Load]:
    return fleet(**{f"r{n}": (0, 0) for n in range(count)})


def test_round_robin_takes_each_in_turn():
    policy = RoundRobin()
    chosen = [policy.choose(Asked(), idle(3), 0).replica.name for _ in range(30)]
    assert chosen[:3] * 10 == chosen
    assert len(set(chosen)) == 3


def test_idle_replicas_share_what_is_new():
    policy = PrefixAware(PrefixIndex())
    chosen = Counter(policy.choose(Asked(tokens=9), idle(4), 0).replica.name for _ in range(400))
    assert len(chosen) == 4
    assert min(chosen.values()) > 50


@pytest.mark.parametrize(
    ("loads", "best"),
    [
        # What is cached counts as computed ...
        ({"has": (0, 0), "not": (0, 0)}, "has"),
        ({"has": (0, 900), "not": (0, 0)}, "has"),
        ({"has": (30, 0), "not": (0, 0)}, "has"),
        # ... and no more: a queue can be longer than computing it anew.
        ({"has": (0, 1_100), "not": (0, 0)}, "not"),
        ({"has": (40, 0), "not": (0, 0)}, "not"),
        ({"has": (40, 0), "not": (0, 900)}, "has"),
    ],
)
def test_prefix_aware_weighs_what_is_cached_against_the_load(loads, best):
    policy = PrefixAware(PrefixIndex())
    asked = prompt(1_024)
    policy.learn(asked, "has", 0)
    assert policy.choose(asked, fleet(**loads), 1).replica.name == best


def test_a_prompt_that_all_share_pins_nobody():
    policy = PrefixAware(PrefixIndex())
    replicas = idle(4)
    chosen: Counter[str] = Counter()
    for n in range(400):
        asked = Asked(tokens=400, chain=chain(b"system" * 100 + b"%09d" % n * 120, ""))
        choice = policy.choose(asked, replicas, n)
        policy.learn(asked, choice.replica.name, n)
        choice.replica.in_flight += 1  # and none of them ends
        chosen[choice.replica.name] += 1
    assert max(chosen.values()) < 110


def test_a_replica_that_started_anew_has_nothing():
    policy = PrefixAware(PrefixIndex())
    asked = prompt(1_024)
    policy.learn(asked, "r0", 0)
    assert policy.choose(asked, idle(2), 1).cached == 1_024
    policy.forget("r0")
    assert policy.choose(asked, idle(2), 1).cached == 0


def test_an_adapter_is_loaded_where_it_is_already():
    policy = PrefixAware(PrefixIndex())
    asked = Asked(tokens=100, adapter="poet")
    policy.learn(asked, "has", 0)
    few, many = ADAPTER_LOAD // PER_REQUEST - 1, ADAPTER_LOAD // PER_REQUEST + 1
    other = {"not": (0, 0)}
    assert policy.choose(asked, fleet(has=(few, 0), **other), 1).replica.name == "has"
    assert policy.choose(asked, fleet(has=(many, 0), **other), 1).replica.name == "not"
    policy.forget("has")
    assert policy.choose(asked, fleet(has=(1, 0), **other), 1).replica.name == "not"


def test_sessions_stay_where_they_are_and_move_as_little_as_can_be():
    policy = Session()
    names = [f"user {n}" for n in range(700)]

    def places(replicas):
        return {
            name: policy.choose(Asked(session=name), replicas, 0).replica.name for name in names
        }

    before = places(idle(7))
    assert before == places(idle(7)[::-1])
    assert max(Counter(before.values()).values()) < 150
    after = places(idle(6))
    assert all(after[name] == place for name, place in before.items() if place != "r6")


def test_a_session_leaves_a_replica_that_has_much_more_to_do():
    policy = Session()
    asked = Asked(session="me")
    home = policy.choose(asked, idle(4), 0).replica.name
    for busy, stays in ((BATCH - 1, True), (BATCH, False)):
        replicas = idle(4)
        for it in replicas:
            it.in_flight = busy if it.name == home else 0
        assert (policy.choose(asked, replicas, 0).replica.name == home) is stays
    even = [Load(it.name, 100) for it in idle(4)]
    assert policy.choose(asked, even, 0).replica.name == home


def test_a_request_without_a_session_goes_where_least_is_to_do():
    assert Session().choose(Asked(), fleet(a=(3, 0), b=(2, 0)), 0).replica.name == "b"


def test_kv_aware_believes_events_and_otherwise_what_was_sent():
    index = KvIndex()
    policy = KvAware(PrefixIndex(), index)
    asked = prompt(1_024)
    asked.blocks, asked.block_size = list(range(64)), 16
    policy.learn(asked, "r0", 0)
    # Nothing is known of r0's cache: it was sent the prompt.
    assert policy.choose(asked, idle(2), 10).cached == 1_024
    index.followed |= {"r0", "r1"}
    # It is known, and long after the request its blocks are not there.
    assert policy.choose(asked, idle(2), 10).cached == 0
    # For a moment after a request they are expected.
    policy.learn(asked, "r1", 10)
    choice = policy.choose(asked, idle(2), 11)
    assert (choice.replica.name, choice.cached) == ("r1", 1_024)
    # A request that could not be tokenised is judged by its text.
    asked.blocks = None
    assert policy.choose(asked, idle(2), 20).cached == 1_024


# The index of prefixaware


def test_the_longest_common_beginning_is_found():
    index = PrefixIndex()
    index.insert("r", chain(b"a" * 3 * CHUNK + b"b" * 2 * CHUNK, ""), 0)
    for body, links in (
        (b"a" * 3 * CHUNK + b"b" * 2 * CHUNK + b"more", 5),
        (b"a" * 3 * CHUNK + b"c" * 2 * CHUNK, 3),
        (b"a" * CHUNK, 1),
        (b"a" * (CHUNK - 1), 0),
        (b"b" * CHUNK, 0),
        (b"", 0),
    ):
        assert index.matched("r", chain(body, ""), 1) == links
    assert index.matched("r", chain(b"a" * CHUNK, "other adapter"), 1) == 0
    assert index.matched("other", chain(b"a" * CHUNK, ""), 1) == 0


def test_what_has_not_come_for_long_is_taken_for_evicted():
    index = PrefixIndex()
    index.insert("r", chain(b"a" * CHUNK, ""), 0)
    assert index.matched("r", chain(b"a" * CHUNK, ""), TTL_S - 1) == 1
    assert index.matched("r", chain(b"a" * CHUNK, ""), TTL_S + 1) == 0


def test_an_index_is_as_large_as_the_cache_it_stands_for():
    index = PrefixIndex()
    index.resize("r", 10 * CHUNK // 4)
    system = b"s" * 2 * CHUNK
    for n in range(100):
        index.insert("r", chain(system + b"%04d" % n * CHUNK, ""), n)
    assert index.matched("r", chain(system + b"0099" * CHUNK, ""), 100) == 6
    assert index.matched("r", chain(system + b"0098" * CHUNK, ""), 100) == 6
    assert index.matched("r", chain(system + b"0097" * CHUNK, ""), 100) == 2
    assert len(index._links["r"]) == 10
    index.insert("r", chain(b"x" * 20 * CHUNK, ""), 101)  # longer than all of it
    assert index.matched("r", chain(b"x" * 20 * CHUNK, ""), 102) == 10


def test_without_a_size_an_index_is_bounded():
    index = PrefixIndex()
    for n in range(20):
        index.insert("r", chain(b"%04d" % n * CHUNK * 300, ""), n)
    assert len(index._links["r"]) == DEFAULT_TOKENS * 4 // CHUNK
