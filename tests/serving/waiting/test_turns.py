# SPDX-License-Identifier: Apache-2.0
"""The order of waiting items."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from serving.waiting.turns import Turns
from tests.fuzzing import examples


def anything(_):
    return True


def order(turns):
    found = []
    while (item := turns.next(anything)) is not None:
        found.append(item)
    return "".join(found)


def turns_of(*items):
    """items: each with its lane, its cost and its band."""
    turns = Turns()
    for item, lane, cost, band in items:
        turns.add(item, lane, cost, band)
    return turns


def test_lanes_of_equal_costs_take_turns():
    assert order(turns_of(*((it, it.lower(), 1, 0) for it in "abcABC"))) == "abcABC"
    items = [("a", "x", 1, 0), ("b", "x", 1, 0), ("c", "x", 1, 0), ("d", "y", 1, 0)]
    assert order(turns_of(*items)) == "adbc"


def test_bands_go_one_after_the_other():
    items = [("a", "x", 1, 5), ("b", "y", 1, 0), ("c", "x", 1, -1), ("d", "x", 1, 0)]
    assert order(turns_of(*items)) == "cbda"


def test_an_item_that_may_not_go_delays_no_other():
    turns = turns_of(("a", "x", 1, 0), ("b", "x", 1, 0), ("c", "y", 1, 0))
    assert turns.next(lambda it: it == "b") == "b"
    assert turns.next(lambda it: it == "d") is None
    assert order(turns) == "ca"
    assert len(turns) == turns.length() == 0


def test_who_makes_room():
    turns = turns_of(*((it, "x", 1, 0) for it in "abc"), ("d", "y", 1, 0))
    assert turns.last("x", 0) is None  # it would be the newest of the longest lane
    assert turns.last("y", 0) == "c"
    assert turns.last("z", 1) is None
    turns.add("e", "y", 1, 3)
    assert turns.last("x", 0) == "e"
    assert Turns().last("x", 0) is None


COSTS = st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 1000)), min_size=1, max_size=60)


@examples(300)
@given(COSTS)
def test_lanes_that_wait_are_given_about_the_same(costs):
    """While two lanes wait, their sums differ at most by the costs of the largest item of each
    (Shreedhar and Varghese, theorem 2).
    """
    turns: Turns[int] = Turns()
    for number, (lane, cost) in enumerate(costs):
        turns.add(number, lane, cost)
    largest = {lane: max(cost for it, cost in costs if it == lane) for lane, _ in costs}
    given_to = Counter[str]()
    while (item := turns.next(anything)) is not None:
        lane, cost = costs[item]
        given_to[lane] += cost
        left = turns.lengths()
        for one in left:
            for other in left:
                assert given_to[one] - given_to[other] <= largest[one] + largest[other]
        assert sum(left.values()) == len(turns)
    assert sum(given_to.values()) == sum(cost for _, cost in costs)
