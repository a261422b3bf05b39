# SPDX-License-Identifier: Apache-2.0
"""The choices of each strategy. tests/tools/test_simulate_routing.py simulates them over time."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from serving.router.policy import kv_index
from serving.router.policy.candidates import Board
from serving.router.policy.kv_index import BlockStored, KvIndex
from serving.router.policy.policies import (
    ADAPTER_LOAD,
    AWAY,
    BATCH,
    MOST_ADAPTERS,
    NEAR,
    KvAware,
    PrefixAware,
    RoundRobin,
    Session,
)
from serving.router.policy.prefix_index import (
    CHUNK,
    DEFAULT_TOKENS,
    FAR,
    MIDDLE,
    TTL_S,
    PrefixIndex,
    chain,
    covered,
    within,
)
from serving.router.policy.replica_load import PER_REQUEST, PREFILL_RATE, Load
from serving.router.policy.routing_request import RoutingRequest
from serving.router.policy.tiers import Capacity, Held, Prices, Reach, described


def fleet(**loads: tuple[int, ...]) -> list[Load]:
    """Replicas by name: requests in flight, prompt tokens queued, prompt tokens in flight."""
    return [Load(name, it[0], it[1], sum(it[2:])) for name, it in loads.items()]


def prompt(tokens: int, text: bytes = b"word") -> RoutingRequest:
    body = text * (tokens * 4 // len(text))
    return RoutingRequest(tokens=tokens, chain=chain(body, ""))


def idle(count: int) -> list[Load]:
    return fleet(**{f"r{n}": (0, 0) for n in range(count)})


def test_round_robin_takes_each_in_turn():
    policy = RoundRobin()
    chosen = [policy.choose(RoutingRequest(), idle(3), 0).replica.name for _ in range(30)]
    assert chosen[:3] * 10 == chosen
    assert len(set(chosen)) == 3


def test_idle_replicas_share_what_is_new():
    policy = PrefixAware(PrefixIndex())
    replicas = idle(4)
    chosen: Counter[str] = Counter()
    for now in range(1, 401):
        name = policy.choose(RoutingRequest(tokens=9), replicas, now).replica.name
        policy.learn(RoutingRequest(tokens=9), name, now)
        chosen[name] += 1
    assert set(chosen.values()) == {100}


@pytest.mark.parametrize(
    ("loads", "best"),
    [
        # Cached tokens are worth twice their number ...
        ({"has": (0, 0, 0), "not": (0, 0, 0)}, "has"),
        ({"has": (0, 1_700, 0), "not": (0, 0, 0)}, "has"),
        ({"has": (58, 0, 0), "not": (0, 0, 0)}, "has"),
        # ... but not more: a queue can be longer.
        ({"has": (0, 2_100, 0), "not": (0, 0, 0)}, "not"),
        ({"has": (70, 0, 0), "not": (0, 0, 0)}, "not"),
        ({"has": (70, 0, 0), "not": (0, 900, 0)}, "has"),
        ({"has": (0, 0, 80_000), "not": (0, 0, 0)}, "not"),
        # Nearly equal costs count as equal, and then the other one has its turn.
        ({"has": (0, 1_800, 0), "not": (0, 0, 0)}, "not"),
    ],
)
def test_prefix_aware_weighs_what_is_cached_against_the_load(loads, best):
    policy = PrefixAware(PrefixIndex())
    asked = prompt(1_024)
    policy.learn(asked, "has", 1)
    assert policy.choose(asked, fleet(**loads), 2).replica.name == best


def test_a_prompt_that_all_share_pins_nobody():
    policy = PrefixAware(PrefixIndex())
    replicas = idle(4)
    chosen: Counter[str] = Counter()
    for n in range(400):
        asked = RoutingRequest(tokens=400, chain=chain(b"system" * 100 + b"%09d" % n * 120, ""))
        choice = policy.choose(asked, replicas, n)
        policy.learn(asked, choice.replica.name, n)
        choice.replica.in_flight += 1  # none of them ends
        chosen[choice.replica.name] += 1
    assert max(chosen.values()) < 110


def test_a_replica_that_started_anew_has_nothing():
    policy = PrefixAware(PrefixIndex())
    asked = prompt(1_024)
    policy.learn(asked, "r0", 0)
    assert policy.choose(asked, idle(2), 1).held.tokens == 1_024
    policy.forget("r0")
    assert policy.choose(asked, idle(2), 1).held.tokens == 0


def test_an_adapter_is_loaded_where_it_is_already():
    policy = PrefixAware(PrefixIndex())
    asked = RoutingRequest(tokens=100, adapter="poet")
    policy.learn(asked, "has", 1)
    few, many = (ADAPTER_LOAD - NEAR) // PER_REQUEST - 1, ADAPTER_LOAD // PER_REQUEST + 1
    other = {"not": (0, 0)}
    assert policy.choose(asked, fleet(has=(few, 0), **other), 1).replica.name == "has"
    assert policy.choose(asked, fleet(has=(many, 0), **other), 1).replica.name == "not"
    policy.forget("has")
    assert policy.choose(asked, fleet(has=(20, 0), **other), 1).replica.name == "not"


def test_names_of_adapters_that_clients_make_up_are_not_kept_for_ever():
    """A session's own replica is not measured, which is when adapters without room are dropped."""
    policy = Session()
    for n in range(MOST_ADAPTERS + 50):
        policy.learn(RoutingRequest(adapter=f"a{n}", session=f"s{n}"), "r0", n)
    assert len(policy._adapters["r0"]) == len(policy._having) == MOST_ADAPTERS


def test_a_replica_has_as_many_adapters_as_it_has_room_for():
    policy = PrefixAware(PrefixIndex())
    for n in range(3):
        policy.learn(RoutingRequest(tokens=100, adapter=f"a{n}"), "busy", n)
    replicas = fleet(busy=(NEAR // PER_REQUEST + 1, 0), idle=(0, 0))
    replicas[0].adapter_slots = 2
    for adapter, chosen in (("a2", "busy"), ("a1", "busy"), ("a0", "idle")):
        found = policy.choose(RoutingRequest(tokens=100, adapter=adapter), replicas, 9)
        assert found.replica.name == chosen, adapter


def test_routers_that_do_not_talk_load_an_adapter_on_the_same_replica():
    one, other = PrefixAware(PrefixIndex()), PrefixAware(PrefixIndex())
    other.learn(RoutingRequest(tokens=100), "r0", 0)  # it has another order
    chosen: Counter[str] = Counter()
    for n in range(300):
        asked = RoutingRequest(tokens=100, adapter=f"a{n}")
        (name,) = {it.choose(asked, idle(3), 1).replica.name for it in (one, other)}
        chosen[name] += 1
        home = {"r0": (0, 0), "r1": (0, 0), "r2": (0, 0), name: (AWAY // PER_REQUEST + 11, 0)}
        assert one.choose(asked, fleet(**home), 1).replica.name != name  # this one has more work
    assert 70 < min(chosen.values()) <= max(chosen.values()) < 130


def test_a_prompt_is_queued_until_its_answer_begins_or_should_have():
    load = Load("r")
    streamed = load.begin(3_000, Held(1_000), True, 0)
    whole = load.begin(round(PREFILL_RATE), Held(), False, 0)
    after = load.begin(round(PREFILL_RATE), Held(), False, 0)
    assert (load.in_flight, load.queued, load.context) == (3, 42_000, 43_000)
    load.settle(0.9)
    assert load.queued == 42_000
    load.settle(1.1)
    assert load.queued == 22_000
    load.computed(streamed)
    load.end(after)  # sooner than expected
    load.settle(2.1)
    assert (load.in_flight, load.queued, load.context) == (2, 0, 23_000)
    load.end(streamed)
    load.end(whole)
    assert (load.in_flight, load.queued, load.context) == (0, 0, 0)


def test_what_has_ended_delays_no_guess():
    """Answers that come sooner than guessed leave nothing behind, and no later guess waits."""
    load = Load("r", prefill_rate=100)
    board = Board([load])
    for n in range(1_000):
        load.end(load.begin(1_000, Held(), False, n))
    assert load.settles_at is None
    assert len(board._guesses) < 10
    load.begin(1_000, Held(), False, 1_000)
    assert load.settles_at == 1_010


def test_sessions_stay_where_they_are_and_move_as_little_as_can_be():
    policy = Session()
    names = [f"user {n}" for n in range(700)]

    def places(replicas):
        return {
            name: policy.choose(RoutingRequest(session=name), replicas, 0).replica.name
            for name in names
        }

    before = places(idle(7))
    assert before == places(idle(7)[::-1])
    assert max(Counter(before.values()).values()) < 150
    after = places(idle(6))
    assert all(after[name] == place for name, place in before.items() if place != "r6")


def test_a_session_leaves_a_replica_that_has_much_more_to_do():
    policy = Session()
    asked = RoutingRequest(session="me")
    home = policy.choose(asked, idle(4), 0).replica.name
    for busy, stays in ((BATCH - 1, True), (BATCH, False)):
        replicas = idle(4)
        for it in replicas:
            it.in_flight = busy if it.name == home else 0
        assert (policy.choose(asked, replicas, 0).replica.name == home) is stays
    even = [Load(it.name, 100) for it in idle(4)]
    assert policy.choose(asked, even, 0).replica.name == home


def test_a_request_without_a_session_goes_where_least_is_to_do():
    assert Session().choose(RoutingRequest(), fleet(a=(30, 0), b=(2, 0)), 0).replica.name == "b"


def test_kv_aware_believes_events_and_otherwise_what_was_sent():
    index = KvIndex()
    policy = KvAware(PrefixIndex(), index)
    asked = replace(prompt(1_024), blocks={16: list(range(64))})
    policy.learn(asked, "r0", 0)
    # Nothing is known of r0's cache, except that it was sent the prompt.
    assert policy.choose(asked, idle(2), 10).held.tokens == 1_024
    index.followed |= {"r0", "r1"}
    # Its cache is known, and long after the request it does not have the blocks.
    assert policy.choose(asked, idle(2), 10).held.tokens == 0
    # For a moment after a request the blocks are expected.
    policy.learn(asked, "r1", 10)
    choice = policy.choose(asked, idle(2), 11)
    assert (choice.replica.name, choice.held.tokens) == ("r1", 1_024)
    # A request that could not be tokenised is judged by its text.
    asked = replace(asked, blocks=None)
    assert policy.choose(asked, idle(2), 20).held.tokens == 1_024


# The index of prefixaware


def reached(index, replica, links, now):
    return index.reach(replica, links, now).engine * 4 // CHUNK


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
        assert reached(index, "r", chain(body, ""), 1) == links
    assert reached(index, "r", chain(b"a" * CHUNK, "other adapter"), 1) == 0
    assert reached(index, "other", chain(b"a" * CHUNK, ""), 1) == 0


@given(st.integers(0, 2 * FAR.begin), st.integers(0, 2 * FAR.begin))
def test_links_are_wider_further_out(size, change):
    """The known part of a prompt is less than one link too short, wherever the prompt changes."""
    text = b"a" * size
    links = chain(text, "")
    assert len(links) == within(size // 4)
    assert within(covered(len(links))) == len(links)
    assert not {*links} & {*chain(text, "other")}
    same = min(change, size)
    other = chain(text[:same] + b"b" * (size - same + 1), "")
    equal = [one == two for one, two in zip(links, other, strict=False)]
    known = sum(equal)
    assert equal == sorted(equal, reverse=True)
    assert known == within(same // 4)
    missed = same - 4 * covered(known)
    most = same / 8 if same >= FAR.begin else same / 4 if same >= MIDDLE.begin else CHUNK
    assert 0 <= missed <= most


def test_what_has_not_come_for_long_is_taken_for_evicted():
    index = PrefixIndex()
    index.insert("r", chain(b"a" * CHUNK, ""), 0)
    assert reached(index, "r", chain(b"a" * CHUNK, ""), TTL_S - 1) == 1
    assert reached(index, "r", chain(b"a" * CHUNK, ""), TTL_S + 1) == 0


def test_an_index_is_as_large_as_the_cache_it_stands_for():
    index = PrefixIndex()
    index.resize("r", Capacity(engine=10 * CHUNK // 4))
    system = b"s" * 2 * CHUNK
    for n in range(100):
        index.insert("r", chain(system + b"%04d" % n * CHUNK, ""), n)
    assert reached(index, "r", chain(system + b"0099" * CHUNK, ""), 100) == 6
    assert reached(index, "r", chain(system + b"0098" * CHUNK, ""), 100) == 6
    assert reached(index, "r", chain(system + b"0097" * CHUNK, ""), 100) == 2
    assert index.links == 10
    assert index.held("r").engine == 10 * CHUNK // 4
    index.insert("r", chain(b"x" * 20 * CHUNK, ""), 101)  # longer than all of it
    assert reached(index, "r", chain(b"x" * 20 * CHUNK, ""), 102) == 10


def test_without_a_size_an_index_is_bounded():
    index = PrefixIndex()
    texts = [b"%04d" % n * CHUNK * 300 for n in range(20)]
    for n, text in enumerate(texts):
        index.insert("r", chain(text, ""), n)
    held, each = index.held("r").engine, len(chain(texts[0], ""))
    assert DEFAULT_TOKENS - FAR.size // 4 < held <= DEFAULT_TOKENS
    # The run that is partly evicted still has its last links.
    assert index.links == each * -(-DEFAULT_TOKENS * 4 // len(texts[0]))


def test_a_link_is_there_once_however_many_replicas_have_it():
    index = PrefixIndex()
    for n in range(50):
        index.insert(f"r{n}", chain(b"s" * 10 * CHUNK + b"%04d" % n * CHUNK, ""), n)
    assert index.links == 10 + 50 * 4
    for n in range(49):
        index.forget(f"r{n}")
    assert index.links == 14
    index.forget("r49")
    assert index.links == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["r", "s", "t"]),
            st.lists(st.integers(0, 2), min_size=1, max_size=6),
            st.booleans(),
        ),
        max_size=40,
    ),
    st.integers(1, 12),
)
def test_no_replica_has_what_it_was_not_sent_nor_more_than_fits(steps, size):
    """Each step is a replica, the chunks of a prompt, and whether the replica has restarted."""
    index = PrefixIndex()
    sent: dict[str, list[list[int]]] = {}
    for now, (name, chunks, anew) in enumerate(steps):
        if anew:
            index.forget(name)
            sent.pop(name, None)
        index.resize(name, Capacity(engine=size * CHUNK // 4))
        text = b"".join(b"%d" % it * CHUNK for it in chunks)
        asked = chain(text, "")
        index.insert(name, asked, now)
        sent.setdefault(name, []).append(asked)
        assert reached(index, name, asked, now) == min(len(asked), size)
        for replica, chains in sent.items():
            assert index.held(replica).engine <= size * CHUNK // 4
            for known in (it for its in sent.values() for it in its):
                longest = max(len({*known} & {*it}) for it in chains)  # a link covers all before it
                assert reached(index, replica, known, now) <= longest
    for name in [*sent]:
        index.forget(name)
    assert index.links == 0


def resized(index, **capacity):
    index.resize("r", Capacity(**capacity))
    return index


def documents(index, count, links=10):
    """Send documents to the replica, one after another, each of this number of links of 128
    tokens.
    """
    found = [chain(b"%04d" % n * (CHUNK // 4) * links, "") for n in range(count)]
    for now, document in enumerate(found):
        index.insert("r", document, now)
    return found


def test_what_an_engine_has_dropped_is_in_its_tiers():
    # The engine holds one document, memory three, the disk six.
    index = resized(PrefixIndex(), engine=1_280, memory=3_840, disk=7_680)
    found = [index.reach("r", it, 9) for it in documents(index, 8)]
    on_disk, in_memory = (0, 0, 1_280, 0), (0, 1_280, 1_280, 0)
    in_engine, gone = (1_280, 1_280, 1_280, 0), (0, 0, 0, 0)
    assert found == [gone] * 2 + [on_disk] * 3 + [in_memory] * 2 + [in_engine]
    assert index.held("r") == (1_280, 3_840, 7_680, 0)
    # A repeated document is in the engine, and the newest.
    first = chain(b"0002" * (CHUNK // 4) * 10, "")
    index.insert("r", first, 10)
    assert index.reach("r", first, 11) == in_engine
    assert index.links == 60


def test_memory_smaller_than_the_engine_has_nothing_more():
    index = resized(PrefixIndex(), engine=2_560, memory=1_280)
    assert [sum(index.reach("r", it, 9)) for it in documents(index, 3)] == [0, 2_560, 2_560]


def test_tiers_keep_what_has_not_come_for_long():
    index = resized(PrefixIndex(), engine=2_560, memory=2_560)
    (document,) = documents(index, 1)
    assert index.reach("r", document, TTL_S + 1) == (0, 1_280, 0, 0)


def test_a_shared_store_counts_wherever_it_is():
    index = PrefixIndex()
    index.resize("r", Capacity(engine=1_280, store="one"))
    index.resize("same", Capacity(engine=1_280, store="one"))
    # Other weights, or another Redis.
    index.resize("other", Capacity(engine=1_280, store="two"))
    index.resize("none", Capacity(engine=1_280))
    (document,) = documents(index, 1)
    assert index.reach("same", document, 2) == (0, 0, 0, 1_280)
    for name in ("other", "none", "unknown"):
        assert not any(index.reach(name, document, 2))
    # It outlives one of its users.
    index.forget("r")
    assert index.reach("same", document, 2).shared == 1_280
    index.forget("same")
    index.resize("same", Capacity(engine=1_280, store="one"))
    assert not any(index.reach("same", document, 2))


def test_copies_have_their_memory_and_disk_together():
    """The engine of each copy holds one document. The memory of both holds three, and the
    disk six.
    """
    index = PrefixIndex()
    together = Capacity(engine=1_280, memory=3_840, disk=7_680, pool="copies")
    for name in ("r", "other"):
        index.resize(name, together)
    index.resize("alone", Capacity(engine=1_280, memory=3_840))
    found = documents(index, 8)
    on_disk, in_memory = (0, 0, 1_280, 0), (0, 1_280, 1_280, 0)
    assert index.reach("r", found[7], 9) == (1_280, 1_280, 1_280, 0)
    assert [index.reach("other", it, 9) for it in found] == [
        *[(0, 0, 0, 0)] * 2,
        *[on_disk] * 3,
        *[in_memory] * 3,
    ]
    assert not any(index.reach("alone", found[7], 9))
    assert index.held("r") == (1_280, 3_840, 7_680, 0)
    # They outlive one of their users.
    index.forget("r")
    index.resize("r", together)
    assert index.reach("r", found[7], 9) == in_memory
    for name in ("r", "other"):
        index.forget(name)
    index.resize("r", together)
    assert not any(index.reach("r", found[7], 9))


def test_a_shared_store_of_a_known_size_is_as_large():
    index = resized(PrefixIndex(), engine=1_280, shared=2_560, store="one")
    assert [index.reach("r", it, 9).shared for it in documents(index, 4)] == [0, 0, 1_280, 1_280]


def test_tokens_are_paid_for_where_they_come_from():
    reach = Reach(engine=1_000, memory=3_000, disk=2_000, shared=4_000)
    held = Held.of(reach, 10_000)
    assert held == (1_000, 2_000, 0, 1_000)
    prices = Prices(memory=0.5, disk=0.1, shared=0.25)
    assert prices.work(10_000, held) == 6_000 + 1_000 + 250
    # If a store is slower than the engine, its tokens are computed, and cost the same as computing.
    assert prices._replace(shared=40.0).work(10_000, held) == 6_000 + 1_000 + 1_000
    assert Held.of(reach, 1_500) == (1_000, 500, 0, 0)
    assert described(held) == "engine 1,000 memory 2,000 shared 1,000"
    assert described(Held()) == "engine 0"


def test_a_document_goes_where_it_is_cheapest():
    index = PrefixIndex()
    policy = PrefixAware(index)
    index.resize("r", Capacity(engine=1_280, memory=128_000, store="one"))
    index.resize("s", Capacity(engine=1_280, store="one"))
    first, *_ = documents(index, 5)
    asked = RoutingRequest(tokens=1_280, chain=first)
    # It is in r's memory, and in the store that both share.
    r, s = Load("r"), Load("s")
    choice = policy.choose(asked, [s, r], 9)
    assert (choice.replica, choice.held) == (r, (0, 1_280, 0, 0))
    # A queue can be longer than the time saved in memory ...
    r.queued = 1_300
    choice = policy.choose(asked, [s, r], 9)
    assert (choice.replica, choice.held) == (s, (0, 0, 0, 1_280))
    # ... and a shorter one decides if the store is fast.
    r.queued = 400
    assert policy.choose(asked, [s, r], 9).replica is r
    s.prices = Prices(shared=0.05)
    assert policy.choose(asked, [s, r], 9).replica is s
    # A store slower than computing does not attract requests.
    s.prices = r.prices = Prices(shared=30.0)
    third = Load("third")
    r.queued = s.queued = 400
    choice = policy.choose(asked, [s, r, third], 9)
    assert choice.replica is r
    assert choice.held.tokens == 1_280


def test_kv_aware_counts_what_memory_reports_for_requests_that_all_share():
    index = KvIndex()
    policy = KvAware(PrefixIndex(), index)
    tokens = list(range(1_024))
    blocks = {16: kv_index.chain(tokens, 16, kv_index.seed())}
    blocks[256] = kv_index.chain(tokens, 256, kv_index.seed())
    plain = RoutingRequest(tokens=1_024, blocks=blocks, plain=True)
    index.followed |= {"r0", "r1"}
    index.apply("r0", 0, BlockStored([1], None, tokens[:16], 16))
    for n in range(3):
        chunk = tokens[n * 256 : (n + 1) * 256]
        index.apply("r0", 0, BlockStored([n], n - 1 if n else None, chunk, 256, "CPU"))
    choice = policy.choose(plain, idle(2), 0)
    assert (choice.replica.name, choice.held) == ("r0", (16, 752, 0, 0))
    # LMCache's events do not contain tenants and adapters.
    salted = replace(plain, plain=False)
    assert policy.choose(salted, [Load("r0")], 0).held == (16, 0, 0, 0)


def test_each_document_is_computed_on_one_replica():
    """40 documents of 8,000 tokens, 4 replicas, six rounds. With engines alone, 2.5 replicas
    compute each document; with an L1 that holds them all, one does.
    """
    assert _homes(Capacity(engine=60_000)) > 2
    assert _homes(Capacity(engine=60_000, memory=400_000)) == 1


def _homes(capacity):
    draw = random.Random(0)
    policy = PrefixAware(PrefixIndex())
    replicas = idle(4)
    for it in replicas:
        policy.index.resize(it.name, capacity)
    asked = [prompt(8_000, b"%08d" % n) for n in range(40)]
    homes: list[set[str]] = [set() for _ in asked]
    now = 0
    for _ in range(6):
        for n in draw.sample(range(40), 40):
            now += 1
            choice = policy.choose(asked[n], replicas, now)
            policy.learn(asked[n], choice.replica.name, now)
            if choice.held.tokens < 4_000:
                homes[n].add(choice.replica.name)
    return sum(map(len, homes)) / 40
