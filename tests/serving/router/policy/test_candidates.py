# SPDX-License-Identifier: Apache-2.0
"""Large fleets: few replicas are measured, and the choice is hardly worse for it."""

import random
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.router.policy.candidates import (
    ALIKE,
    EXACT,
    LOOKED_AT,
    TOP,
    Board,
    Candidates,
    Homes,
)
from serving.router.policy.policies import (
    HOLDERS,
    LEAST,
    NEAR,
    REACHES,
    UNCACHED,
    PrefixAware,
    Session,
)
from serving.router.policy.prefix_index import CHUNK, PrefixIndex, chain, covered, within
from serving.router.policy.replica_load import Load
from serving.router.policy.routing_request import RoutingRequest
from serving.router.policy.tiers import NOTHING


def fleet(count):
    return [Load(f"r{n}") for n in range(count)]


class Counted(PrefixAware):
    """Counts the replicas that it measures."""

    measured = 0

    def reach(self, request, replica, now):
        self.measured += 1
        return super().reach(request, replica, now)


@pytest.mark.parametrize("adapter", ["", "poet"])
@pytest.mark.parametrize("holders", [0, 3, 500])
def test_as_few_are_measured_of_a_thousand_as_of_ten(adapter, holders):
    most = LEAST + HOLDERS * (REACHES + 1) + 1
    for count, limit in ((10, 10), (EXACT, EXACT), (EXACT + 1, most), (1_000, most)):
        policy = Counted(PrefixIndex())
        replicas = fleet(count)
        asked = RoutingRequest(tokens=1_024, chain=chain(b"a" * 8 * CHUNK, ""), adapter=adapter)
        for it in replicas[:holders]:
            policy.learn(asked, it.name, 1)
        policy.choose(asked, Candidates(replicas), 2)
        assert policy.measured <= limit


def test_what_is_chosen_of_many_is_hardly_worse_than_the_best_of_all():
    draw = random.Random(0)
    policy = PrefixAware(PrefixIndex())
    everybody = PrefixAware(policy.index)
    everybody.exact = 10_000
    replicas = Candidates(fleet(200))
    texts = [b"%04d" % n * (CHUNK // 4) * draw.randrange(1, 40) for n in range(100)]
    under_way = []
    chosen = best = 0.0
    for now in range(3_000):
        text = draw.choice(texts)
        asked = RoutingRequest(tokens=len(text) // 4, chain=chain(text, ""))
        some = policy.choose(asked, replicas, now)
        both = (some.replica, everybody.choose(asked, replicas, now).replica)
        costs = [cost for cost, *_ in policy.costs(asked, both, None, now)]
        chosen, best = chosen + costs[0], best + costs[1]
        policy.learn(asked, some.replica.name, now)
        under_way.append((some.replica, some.replica.begin(asked.tokens, some.held, True, now)))
        if len(under_way) > 600:
            replica, work = under_way.pop(draw.randrange(len(under_way)))
            replica.end(work)
    assert chosen <= 1.02 * best


def test_a_document_of_many_is_not_computed_again_for_a_long_conversation():
    """The latest turns are on one replica, which has much to do. Others have all that is long."""
    policy, loads = PrefixAware(PrefixIndex()), fleet(EXACT + 20)
    document, turns = b"d" * 40 * CHUNK, [b"%d" % n * CHUNK * 4 for n in range(6)]
    for it in loads[:4]:
        policy.learn(RoutingRequest(chain=chain(document, "")), it.name, 0)
    for n in range(len(turns)):
        asked = RoutingRequest(chain=chain(document + b"".join(turns[: n + 1]), ""))
        policy.learn(asked, loads[0].name, n)
    loads[0].queued = 100_000
    for it in loads[1:4]:
        it.queued = 2_000
    tokens = (len(document) + 4 * 6 * CHUNK) // 4
    choice = policy.choose(msgspec.structs.replace(asked, tokens=tokens), Candidates(loads), 9)
    assert choice.replica in loads[1:4]
    assert choice.held.engine == covered(within(len(document) // 4))


HOLDING = st.tuples(st.integers(0, 7), st.lists(st.integers(0, 2), min_size=1, max_size=8))
"""The number of a replica, and the parts of a prompt that it was sent."""


@given(
    st.lists(HOLDING, max_size=20),
    st.lists(st.integers(0, 40_000), min_size=EXACT + 8, max_size=EXACT + 8),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.integers(1, 12),
)
def test_no_choice_among_some_is_much_worse_than_the_best_of_all(holding, queued, parts, size):
    """The regret is at most half of the best replica's known part of the prompt, besides the
    difference that counts as equal. This holds for every choice if all replicas with a part of the
    prompt are looked at.
    """

    def prompt(parts):
        text = b"".join(b"%d" % part * CHUNK * size for part in parts)
        return RoutingRequest(tokens=len(text) // 4, chain=chain(text, ""))

    policy, loads = PrefixAware(PrefixIndex()), fleet(len(queued))
    for load, tokens in zip(loads, queued, strict=True):
        load.queued = tokens
    for number, known in holding:
        policy.learn(prompt(known), loads[number].name, 0)
    asked = prompt(parts)
    costs = policy.costs(asked, loads, None, 1)
    best, _, held = min(costs, key=lambda it: it[0])
    chosen = policy.choose(asked, Candidates(loads), 1).replica
    (cost,) = [cost for cost, load, _ in costs if load is chosen]
    assert cost <= best + UNCACHED * held.tokens / 2 + NEAR + ALIKE


def test_the_board_has_the_least_loaded_first():
    loads = fleet(100)
    for n, load in enumerate(loads):
        load.queued = n * NEAR
    board, all_of_them = Board(loads), Candidates(loads)
    assert board.least(3, all_of_them, 0) == loads[:3]
    loads[0].queued = 50 * NEAR  # noticed when it comes first
    assert board.least(2, all_of_them, 0) == loads[1:3]
    work = loads[9].begin(0, NOTHING, True, 0)
    loads[9].queued = 0
    loads[9].end(work)  # it reports the change itself
    assert board.least(1, all_of_them, 0) == [loads[9]]
    # Replicas with about the same load take turns.
    for load in loads:
        load.queued = 0
        board.lighten(load)
    turns = [board.least(10, all_of_them, 0) for _ in range(10)]
    assert {it for turn in turns for it in turn} == {*loads}


def test_the_board_knows_when_a_guess_comes_true():
    loads = fleet(50)
    board, all_of_them = Board(loads), Candidates(loads)
    for load in loads[1:]:
        load.queued = 10_000
    loads[0].begin(100_000, NOTHING, False, 0)
    assert loads[0] not in board.least(5, all_of_them, 0)
    at = loads[0].settles_at
    assert at is not None
    loads[0].context = 0
    assert board.least(1, all_of_them, at + 1) == [loads[0]]
    # A new board, made after a change of the fleet, knows the pending guesses.
    loads[0].begin(100_000, NOTHING, False, at + 1)
    again = Board(loads)
    later = loads[0].settles_at
    assert later is not None
    loads[0].context = 0
    assert again.least(1, all_of_them, later + 1) == [loads[0]]


def test_the_board_does_not_grow():
    loads = fleet(50)
    board, all_of_them = Board(loads), Candidates(loads)
    for n in range(5_000):
        load = loads[n % 50]
        load.queued = (n * 7919 % 13) * NEAR
        board.lighten(load)
        board.least(2, all_of_them, n)
    assert len(board._heap) <= 3 * 50 + 2 * LOOKED_AT
    assert not board._lighter


class Looked(Load):
    """Counts how often it is looked at for room."""

    looks = 0

    @property
    def room(self):
        Looked.looks += 1
        return super().room


class Step(NamedTuple):
    """An event at one replica: its number, and the name of a method of Fleet."""

    number: int
    what: str


STEPS = st.builds(Step, st.integers(0, 11), st.sampled_from(["begin", "end", "refuse", "accept"]))


@given(st.lists(STEPS, max_size=60), st.integers(1, 5), st.integers(6, 12))
def test_room_is_known_without_a_look_at_all(steps, requests, few):
    """As by a look at all, whatever happens, for all of a fleet and for some of it."""
    loads = [Load(f"r{n}", slots=1 + n % 2) for n in range(12)]
    works = {it: [] for it in loads}
    board = Board(loads)
    kinds = [Candidates(some, board=board) for some in (loads, loads[few:])]
    for number, what in steps:
        load = loads[number]
        match what:
            case "begin":
                works[load].append(load.begin(10, NOTHING, True, 0))
            case "end" if works[load]:
                load.end(works[load].pop())
            case "refuse":
                load.refuse(True)
            case "accept":
                load.refuse(False)
        for candidates in kinds:
            room = sum(it.room for it in candidates)
            assert candidates.has_room(requests) == (room >= requests)


def test_room_in_a_full_fleet_is_looked_for_where_something_has_ended():
    loads = [Looked(f"r{n}", slots=2) for n in range(200)]
    candidates = Candidates(loads, board=Board(loads))
    works = [(it, it.begin(10, NOTHING, True, 0)) for it in loads for _ in range(2)]
    assert not candidates.has_room(1)
    random.Random(0).shuffle(works)
    Looked.looks = 0
    for load, work in works:
        load.end(work)
        assert candidates.has_room(1)
        load.begin(10, NOTHING, True, 0)
        assert not candidates.has_room(1)
    assert Looked.looks <= 10 * len(works)


def test_candidates_that_are_few_in_their_fleet_are_found():
    loads = fleet(1_000)
    board = Board(loads)
    some = Candidates(loads[960:], board=board)
    for load in loads[961:]:
        load.queued = 5_000
    assert next(iter(some.least(4, 0))) in loads[960:]
    assert len({it.name for it in some.least(4, 0)}) == 4


def test_candidates_without_some():
    loads = fleet(5)
    all_of_them = Candidates(loads)
    assert all_of_them.without([]) is all_of_them
    assert all_of_them.without([Load("other")]) is all_of_them
    left = all_of_them.without(loads[:2]).without([loads[4]])
    assert [*left] == loads[2:4] == [left[0], left[1]]
    assert len(left) == 2
    assert left.named("r0") is None
    assert left.named("r2") is loads[2]
    assert [*left.order("key")] == [it for it in all_of_them.order("key") if it in left]
    assert [*all_of_them] == loads


def test_an_order_goes_on_beyond_what_is_kept():
    names = [f"r{n}" for n in range(4 * TOP)]
    homes = Homes(names)
    order = [*homes.order("key")]
    assert sorted(order) == sorted(names)
    assert [*homes.order("key")] == order
    # Without one of them, the others keep their order.
    assert [*Homes([it for it in names if it != order[1]]).order("key")] == [order[0], *order[2:]]


def test_a_session_finds_a_place_where_the_mean_is_old():
    loads = fleet(100)
    replicas = Candidates(loads)
    policy, asked = Session(), RoutingRequest(session="me")
    home = policy.choose(asked, replicas, 0).replica
    for load in loads:
        load.in_flight = 1_000
    assert policy.choose(asked, replicas, 0).replica is home
