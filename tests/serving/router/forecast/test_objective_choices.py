# SPDX-License-Identifier: Apache-2.0
"""The choice of a replica for requests with an objective for the first token."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from serving.router.forecast.first_token import LEAST, Awaited
from serving.router.policy.conversations import Conversations
from serving.router.policy.policies import NEAR, PrefixAware
from serving.router.policy.prefix_index import PrefixIndex, chain
from serving.router.policy.replica_load import Load
from serving.router.policy.routing_request import RoutingRequest

PROMPTS = [RoutingRequest(tokens=1000, chain=chain(b"%d" % n * 4000, "")) for n in range(3)]
REPLICA = st.tuples(st.integers(0, 30), st.integers(0, 20_000), st.floats(0.01, 10))
FLEETS = st.lists(REPLICA, min_size=1, max_size=5)
STEPS = st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=20)


def teach(load: Load, base: float) -> None:
    """Its first tokens take this time in seconds, whatever is queued."""
    for tokens in range(LEAST):
        load.first_token.learn(Awaited(-base, tokens, None), 0.0)


def fleet(replicas: list[tuple[int, int, float]], *, learnt: bool) -> list[Load]:
    """Each replica's requests in flight, queued tokens, and seconds to the first token."""
    loads = []
    for n, (in_flight, queued, base) in enumerate(replicas):
        loads.append(Load(f"r{n}", in_flight, queued, 0))
        if learnt:
            teach(loads[-1], base)
    return loads


def choices(loads: list[Load], steps: list[int], within: float | None) -> list[str]:
    """The choice for each prompt, one after another."""
    policy, found = PrefixAware(PrefixIndex()), []
    for now, step in enumerate(steps):
        asked = replace(PROMPTS[step], within=within)
        name = policy.choose(asked, loads, float(now)).replica.name
        policy.learn(asked, name, float(now))
        found.append(name)
    return found


@given(FLEETS, STEPS)
def test_without_an_objective_forecasts_change_no_choice(replicas, steps):
    known, unknown = (fleet(replicas, learnt=learnt) for learnt in (True, False))
    assert choices(known, steps, None) == choices(unknown, steps, None)


@given(FLEETS, STEPS, st.floats(0.01, 10))
def test_without_forecasts_an_objective_changes_no_choice(replicas, steps, within):
    loads = fleet(replicas, learnt=False)
    assert choices(loads, steps, within) == choices(loads, steps, None)


@given(FLEETS, STEPS)
def test_an_objective_that_all_meet_or_none_changes_no_choice(replicas, steps):
    loads = fleet(replicas, learnt=True)
    assert choices(loads, steps, 100.0) == choices(loads, steps, None)
    assert choices(loads, steps, 0.001) == choices(loads, steps, None)


@given(FLEETS, STEPS, st.floats(0.01, 10))
def test_a_replica_that_is_too_slow_is_chosen_only_if_all_are(replicas, steps, within):
    loads = fleet(replicas, learnt=True)
    chosen = {*choices(loads, steps, within)}
    in_time = {f"r{n}" for n, (_, _, base) in enumerate(replicas) if base * 1.001 < within}
    late = {f"r{n}" for n, (_, _, base) in enumerate(replicas) if base > within * 1.001}
    assert not (in_time and chosen & late)


def test_of_those_in_time_the_cheapest_is_chosen_and_not_the_fastest():
    policy, (has, fast) = PrefixAware(PrefixIndex()), fleet([(0, 0, 0.4), (0, 0, 0.1)], learnt=True)
    policy.learn(PROMPTS[0], has.name, 0.0)
    for within, best in ((0.5, has), (0.3, fast), (0.05, has)):
        assert policy.choose(replace(PROMPTS[0], within=within), [has, fast], 1.0).replica is best


def test_what_is_queued_and_what_is_cached_counts():
    """A second for 1,000 tokens, after a tenth."""
    load = Load("r")
    for tokens in range(0, 1000 * LEAST, 1000):
        load.first_token.learn(Awaited(-0.1 - tokens / 1000, tokens, None), 0.0)
    policy, other = PrefixAware(PrefixIndex()), Load("other", 0, 10_000, 0)
    teach(other, 0.01)

    def goes_to(within: float, number: int = 0) -> Load:
        return policy.choose(replace(PROMPTS[number], within=within), [load, other], 0.0).replica

    assert goes_to(1.2) is load
    assert goes_to(1.0) is other
    policy.learn(PROMPTS[0], load.name, 0.0)
    assert goes_to(1.0) is load
    assert goes_to(1.0, number=1) is other
    load.queued = 1500
    assert goes_to(1.0) is other


def test_a_conversation_stays_only_where_it_is_in_time():
    """A replica that costs about as much as the cheapest, and had the last turn."""
    policy, conversations = PrefixAware(PrefixIndex()), Conversations()
    near, quick = fleet([(0, NEAR // 2, 0.4), (0, 0, 0.1)], learnt=True)
    turn = RoutingRequest(tokens=100, session="s")
    conversations.learn(turn, near.name)
    for within, best in ((None, near), (0.5, near), (0.3, quick), (0.05, near)):
        asked = replace(turn, within=within)
        assert conversations.choose(policy, asked, [near, quick], 0.0).replica is best
