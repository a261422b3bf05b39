# SPDX-License-Identifier: Apache-2.0
"""Which replicas are ejected, in a simulation: time is a number, and replicas are functions."""

import functools
import random

import pytest

from serving.router.fleet import circuit_breaker
from serving.router.fleet.circuit_breaker import (
    FIRST_S,
    LONGEST_S,
    STALLED_S,
    CircuitBreaker,
    longest_still,
)


class Fleet:
    """Breakers, and requests that go in turn to each replica that its breaker allows."""

    def __init__(self, count):
        self.now = 0.0
        self.breakers = [CircuitBreaker(functools.partial(self.others, n)) for n in range(count)]
        self._next = 0

    def others(self, number):
        return [it for n, it in enumerate(self.breakers) if n != number]

    @property
    def ejected(self):
        return [it.ejected for it in self.breakers]

    def choose(self):
        allowed = [it for it in self.breakers if it.allows(self.now)] or self.breakers
        self._next += 1
        return allowed[self._next % len(allowed)]

    def ask(self, status):
        """Make one request, answered by status(number of the replica). Returns that number."""
        chosen = self.choose()
        trial = chosen.begin(self.now)
        found = status(self.breakers.index(chosen))
        chosen.answered(found, self.now, trial=trial)
        return found


@pytest.mark.parametrize("rate", [0.2, 1, 3, 30, 300])
@pytest.mark.parametrize("status", [500, 502])
def test_one_of_two_that_always_fails_loses_one_request_in_twenty_at_most(rate, status):
    fleet = Fleet(2)
    lost = []
    for _ in range(max(200, int(rate * 600))):
        lost.append(fleet.ask(lambda number: status if number == 0 else 200) != 200)
        fleet.now += 1 / rate
    assert sum(lost[:10]) <= 5
    assert sum(lost[10:]) <= len(lost[10:]) / (20 if rate >= 1 else 5)
    assert fleet.ejected[1] is False


def test_ejections_grow_over_a_single_success_and_shrink_over_long_service():
    fleet = Fleet(2)
    bad = fleet.breakers[0]
    pauses = []
    for _ in range(6):
        while not bad.ejected:  # each trial succeeds, and the requests after it fail
            bad.answered(500, fleet.now)
            fleet.breakers[1].answered(200, fleet.now)
        began = fleet.now
        while not bad.allows(fleet.now):
            fleet.now += 1
        pauses.append(fleet.now - began)
        bad.answered(200, fleet.now, trial=bad.begin(fleet.now))
        assert not bad.ejected
    assert pauses == [30, 60, 120, 240, 300, 300]
    fleet.now += LONGEST_S
    for _ in range(5):
        bad.answered(500, fleet.now)
    assert bad.ejected
    assert bad.allows(fleet.now + FIRST_S)


def test_trials_go_one_at_a_time_and_a_client_that_leaves_one_says_nothing():
    fleet = Fleet(2)
    for _ in range(5):
        fleet.breakers[0].answered(500, 0.0)
    bad = fleet.breakers[0]
    assert bad.begin(1.0) is False  # too early: it was sent because no other replica was there
    assert bad.begin(FIRST_S)
    assert not bad.allows(FIRST_S)
    assert bad.begin(FIRST_S) is False
    bad.answered(200, FIRST_S)  # a request from before
    assert bad.ejected
    bad.abandoned(FIRST_S)
    assert not bad.allows(FIRST_S + 1)
    assert bad.begin(2 * FIRST_S)
    bad.answered(500, 2 * FIRST_S, trial=True)
    assert not bad.allows(4 * FIRST_S - 1)
    assert bad.begin(4 * FIRST_S)
    bad.answered(200, 4 * FIRST_S, trial=True)
    assert not bad.ejected


@pytest.mark.parametrize(
    ("count", "bad", "most"), [(1, 1, 0), (2, 1, 1), (2, 2, 1), (3, 3, 1), (4, 2, 2), (5, 5, 2)]
)
def test_at_most_half_of_a_fleet_is_ejected(count, bad, most):
    for seed in range(20):
        fleet, chance = Fleet(count), random.Random(seed)
        failing = set(chance.sample(range(count), bad))
        for _ in range(500):
            fleet.ask(lambda number, failing=failing: 500 if number in failing else 200)
            assert sum(fleet.ejected) <= most
            fleet.now += chance.random()
        if bad <= most:
            assert {number for number, out in enumerate(fleet.ejected) if out} <= failing
        if bad == count:
            assert not any(fleet.ejected)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 1.0])
def test_what_fails_everywhere_ejects_none(share):
    out = 0
    for seed in range(20):
        fleet, chance = Fleet(4), random.Random(seed)
        for _ in range(2000):
            status = 500 if chance.random() < share else 200
            fleet.ask(lambda _, status=status: status)
            fleet.now += chance.random()
            out += sum(fleet.ejected)
    assert out < 20 * 2000 * 4 / 500  # by chance, for a moment


def test_a_prefix_that_fails_on_every_replica_readmits_the_first_ones():
    """Requests with one prefix go to one replica as long as it is there."""
    fleet = Fleet(4)
    for n in range(3):
        for _ in range(5):
            fleet.breakers[n].answered(500, fleet.now)
    assert fleet.ejected == [True, True, False, False]
    for _ in range(5):
        fleet.breakers[3].answered(500, fleet.now)
    assert not any(fleet.ejected)
    for n in [0, 1, 2, 3] * 5:
        fleet.breakers[n].answered(500, fleet.now)
    assert not any(fleet.ejected)


def test_busy_and_slow_answers_are_no_errors():
    fleet = Fleet(2)
    for status in (400, 404, 429, 503, 504, 499) * 20:
        fleet.breakers[0].answered(status, fleet.now)
    assert not any(fleet.ejected)


def test_a_share_of_errors_ejects_too():
    fleet = Fleet(2)
    for n in range(20):
        fleet.breakers[0].answered(500 if n % 3 else 200, fleet.now)
    assert fleet.ejected == [True, False]


def test_what_stands_still_is_ejected_while_others_answer():
    slow = longest_still([0.1] * 90 + [5.0] * 10)
    assert slow == 50
    assert longest_still([]) == longest_still([1.0]) == STALLED_S
    for standing, still, others, expected in (
        (4, 30, True, True),
        (3, 30, True, False),
        (4, 30, False, False),
    ):
        fleet = Fleet(2)
        stuck, other = fleet.breakers
        stuck.moved(0.0)
        other.moved(100.0 if others else 0.0)
        stuck.look(still, standing, still)
        assert not stuck.ejected  # not longer than usual
        stuck.look(100.0, standing, still)
        assert stuck.ejected is expected
    stuck.moved(101.0)
    fleet = Fleet(2)
    stuck, other = fleet.breakers
    other.moved(100.0)
    stuck.look(100.0, 4, 30)
    assert stuck.ejected
    stuck.moved(99.0)  # before
    stuck.look(101.0, 4, 30)
    assert stuck.ejected
    stuck.moved(102.0)
    stuck.look(103.0, 4, 30)
    assert not stuck.ejected


def test_figures():
    assert (circuit_breaker.IN_A_ROW, circuit_breaker.STALLED) == (5, 4)
