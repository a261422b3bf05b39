# SPDX-License-Identifier: Apache-2.0
"""The lists that a pool of many replicas keeps until it changes."""

import pytest

from serving.router.fleet.replicas import MOST_KINDS, ReplicaPool, State
from serving.router.policy.candidates import EXACT
from serving.router.policy.tiers import Capacity

COUNT = EXACT + 10


@pytest.fixture
def pool():
    """Many replicas that are ready, every other one to prefill."""
    found = ReplicaPool(lambda replica, anew: None, lambda replica: None)
    found.update(frozenset(f"http://replica-{n}:8080" for n in range(COUNT)))
    for number, replica in enumerate(found.replicas):
        replica.role = "prefill" if number % 2 else "decode"
        replica.capacity = Capacity(store="redis")
        found.call(replica, replica.name)
        found.enter(replica, State.READY, "", anew=True)
    return found


def test_a_gateways_choice_of_endpoints_leaves_the_fleets_order(pool):
    """The least loaded are known by one order for all, also of those that a gateway names."""
    everybody = pool.candidates("", "", (), 0)
    board = pool.replicas[0].board
    assert board
    some = pool.candidates("", "", (), 0, {it.endpoint for it in pool.replicas})
    assert [*some.least(4, 0)]
    assert [*everybody.least(4, 0)]
    assert {it.board for it in pool.replicas} == {board}


def test_who_can_prefill_is_kept_until_something_changes(pool):
    def able(answers, **more):
        return pool.prefilling("", "", answers, 0, fetching=False, **more)

    first, other, *_ = pool.of_role("decode")
    before = able(first)
    assert [*before] == [*pool.of_role("prefill")]
    assert able(other) is before
    other.capacity = Capacity(store="another")
    assert not able(other)
    # One proves no more that it has the secret, one is down, one is ejected.
    proofless, down, ejected, *rest = pool.of_role("prefill")
    pool.call(proofless, "")
    assert [*able(first)] == [down, ejected, *rest]
    pool.enter(down, State.DOWN, "", anew=False)
    assert [*able(first)] == [ejected, *rest]
    for now in range(20):
        ejected.breaker.answered(500, now * 0.1, trial=ejected.breaker.begin(now * 0.1))
    assert [*pool.prefilling("", "", first, 2, fetching=False)] == rest
    assert [*pool.prefilling("", "", first, 10_000, fetching=False)] == [ejected, *rest]


def test_names_that_no_replica_has_are_no_kinds_of_their_own(pool):
    usual = pool.candidates("", "", (), 0)
    for number in range(2 * MOST_KINDS):
        assert pool.candidates("", f"adapter {number}", (), 0) is usual
