# SPDX-License-Identifier: Apache-2.0
"""Simulated engines, compared with figures worked out by hand, and the results that strategies must
reach.
"""

import math
import random
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from tools.routing_sim import __main__ as routing_sim
from tools.routing_sim import apart as apart_module
from tools.routing_sim import combined, engine, large, noisy, slo
from tools.routing_sim.fleet import Fleet
from tools.routing_sim.model import B32, B70, Apart, Case, Request, Tier
from tools.routing_sim.report import simulate
from tools.routing_sim.rivals import ARMS
from tools.routing_sim.workloads import adapters_case, chat, document_case, unshared_case


@pytest.fixture(autouse=True)
def _as_before():
    """Fleets seed Python's random numbers, which must not affect other tests."""
    state = random.getstate()
    yield
    random.setstate(state)


@pytest.fixture
def one():
    """Simulates requests to one replica, and returns them."""

    def run(*requests, profile=B32, **more):
        case = Case("", profile, lambda rng, load: iter(requests), 1.0, 1000, replicas=1, **more)
        fleet = Fleet(case, "prefixaware", 0)
        fleet.run()
        return fleet, requests

    return run


def test_alone(one):
    _, (request,) = one(Request(1.0, ((5000, 10_000),), 3))
    # Two chunks of the prompt, then two more tokens, which read 10,001 and 10,002 of context.
    first = 1.0 + B32.overhead_s + 2 * B32.step_s + 10_000 / B32.rate
    assert request.first == pytest.approx(first)
    assert request.end == pytest.approx(first + 2 * B32.step_s + 20_003 * B32.context_s)
    assert request.cached == 0


def test_slow(one):
    _, (request,) = one(Request(0.0, ((5000, 4000),), 2), slow=2.0)
    assert request.first == pytest.approx(B32.overhead_s + 2 * (B32.step_s + 4000 / B32.rate))


def test_arrival_ends_a_leap(one):
    """A request that arrives while others decode is in the next step, not after the end of all."""
    _, (_, late) = one(Request(0.0, ((5000, 100),), 1000), Request(3.0, ((6000, 100),), 2))
    waited = late.first - 3.0 - B32.overhead_s - B32.step_s - 100 / B32.rate
    assert 0 < waited < 1.1 * B32.step_s


def test_hits(one):
    """All tokens but the last can come from the cache, in whole blocks; answers are also cached."""
    document = (5000, 12_800)
    again = Request(5.0, (document,), 10)
    longer = Request(10.0, (document, (7000, 200)), 56)
    follows = Request(15.0, (document, (7000, 200), (-7000, 56), (8000, 20)), 10)
    one(Request(0.0, (document,), 10), again, longer, follows)
    assert [again.cached, longer.cached, follows.cached] == [12_672, 12_800, 13_056]


def test_eviction(one):
    """The least recently used prefix is evicted, from its end; a request without room waits."""
    small = replace(B32, kv_tokens=10 * 128)
    shared, big = ((5000, 640),), ((6000, 896),)
    fleet, requests = one(
        Request(0.0, shared, 2),
        Request(1.0, big, 2),
        Request(1.001, shared, 2),
        profile=small,
    )
    assert requests[2].first > requests[1].end
    assert requests[2].cached == 256
    assert all(math.isfinite(it.end) for it in requests)
    assert [(load.in_flight, load.queued, load.context) for load in fleet._up] == [(0, 0, 0)]


@pytest.mark.parametrize("arm", ARMS)
def test_same_again(arm):
    case = document_case(8000, 3, 20, 150)
    assert simulate(case, arm, [1]) == simulate(case, arm, [1])


def test_documents():
    case = document_case(8000, 5, 28, 600)
    base, prefix, kv = (
        simulate(case, arm, [0]) for arm in ("roundrobin", "prefixaware", "kvaware")
    )
    for ours in (prefix, kv):
        assert ours.hit > base.hit
        assert ours.ttft(0.5) < 0.5 * base.ttft(0.5)
        assert ours.ttft(0.9) < base.ttft(0.9)


@pytest.mark.parametrize("tokens", [100, 600])
def test_shared_system_prompt(tokens):
    case = unshared_case(100, 2000, system=tokens)
    ours, theirs = (simulate(case, arm, [0]).hot for arm in ("prefixaware", "their prefixaware"))
    assert ours <= 1.1
    assert theirs == 7


@pytest.mark.parametrize("arm", ["session", "prefixaware", "kvaware", "their kvaware"])
def test_restart(arm):
    """Other replicas serve the requests that a replica lost, and that replica is used again."""
    case = replace(document_case(1000, 3, 10, 1000), restart=True)
    fleet = Fleet(case, arm, 0)
    fleet.run()
    assert all(math.isfinite(it.end) for it in fleet.requests)
    assert all((load.in_flight, load.queued) == (0, 0) for load in fleet._up)
    assert {it.replica for it in fleet.requests if it.at > 87} >= {"replica6"}


def test_chat():
    case = Case("", B70, chat, 20, 100)
    assert simulate(case, "kvaware", [0]).hit > 0.8
    users = partial(chat, random.Random(0), 20)
    assert len(list(users())) == 20


def test_requests_wait_at_the_router_in_turns_of_tenants(one):
    """As many run as the replica has slots."""
    first, *noisy = [Request(0.1 * n, ((5000 + n, 100),), 100, tenant="noisy") for n in range(6)]
    other = Request(0.6, ((6000, 100),), 100, tenant="other")
    one(first, *noisy, other, slots=1)
    begun = sorted((first, *noisy, other), key=lambda it: it.first)
    assert begun.index(other) == 2
    assert all(before.end < after.first for before, after in pairwise(begun))


def test_a_noisy_tenant_delays_others_less_where_requests_wait_at_the_router(monkeypatch):
    """Engines that run 8 requests, so that a few seconds are an overload."""
    monkeypatch.setattr(engine, "SEATS", 8)
    monkeypatch.setattr(noisy, "SLOTS", (10, 8))
    monkeypatch.setattr(noisy, "LOADS", (0.6, 2.0))
    said: list[str] = []
    assert noisy.run(12, said.append)
    rows = [it.split() for it in said if "slots" in it or "no wait" in it]
    assert [row[0] for row in rows] == ["no", "10", "8"] * 2


def test_an_objective_is_missed_less_often_if_replicas_are_chosen_by_it():
    """There are two replicas; the first is three times as slow, too slow for the objective."""
    case = replace(unshared_case(30, 900), replicas=2, slow=3.0, within=0.12)
    without, by_it = (slo.simulate(it, 1) for it in (replace(case, within=None), case))
    assert by_it.missed(0.12) < without.missed(0.12)
    first, median, third = without.quartiles()
    assert 0.7 < first < median < third < 1.4


def test_the_comparison_of_choices_by_an_objective(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simulate", "--slo", "--seeds", "1"])
    some = replace(unshared_case(30, 300), replicas=2, within=0.12)
    monkeypatch.setattr(slo, "cases", lambda times: {"some": some})
    routing_sim.main()
    rows = capsys.readouterr().out.splitlines()
    assert [row[:28].split() for row in rows[1:]] == [["some", "-"], ["0.12"]]
    monkeypatch.setattr(slo, "TRUSTED", (2.0, 3.0))
    with pytest.raises(SystemExit):
        routing_sim.main()


DOCUMENT, OTHER = (5000, 10_240), (6000, 10_240)
SMALL = replace(B32, kv_tokens=81 * 128)  # one of them and its answer
NEAR = Tier(100_000, 20e9, 0.001)


def loading(tier, tokens):
    return tier.latency_s + tokens * B32.kv_bytes / tier.rate


def test_l1(one):
    """Evicted blocks come from memory, except for the last chunk."""
    again = Request(10.0, (DOCUMENT,), 2)
    one(Request(0.0, (DOCUMENT,), 2), Request(5.0, (OTHER,), 2), again, profile=SMALL, l1=NEAR)
    assert (again.cached, again.of_l1, again.of_l2) == (0, 10_240 - 256, 0)
    first = B32.overhead_s + loading(NEAR, 10_240 - 256) + B32.step_s + 256 / B32.rate
    assert again.first - again.at == pytest.approx(first)


def test_l1_is_full(one):
    again = Request(10.0, (DOCUMENT,), 2)
    requests = (Request(0.0, (DOCUMENT,), 2), Request(5.0, (OTHER,), 2), again)
    one(*requests, profile=SMALL, l1=replace(NEAR, tokens=12_000))
    # Only its beginning is left.
    assert again.of_l1 == (12_000 - 10_240) // 256 * 256


def second_replica(store):
    """A request that another replica has answered before."""
    again = Request(10.0, (DOCUMENT,), 2)
    requests = Request(0.0, (DOCUMENT,), 2), again
    case = Case(
        *("", B32, lambda rng, load: iter(requests), 1.0, 1000), replicas=2, l1=NEAR, l2=store
    )
    Fleet(case, "roundrobin", 0).run()
    return again


def test_l2():
    store = Tier(100_000, 10e9, 0.002)
    again = second_replica(store)
    assert (again.cached, again.of_l1, again.of_l2) == (0, 0, 10_240 - 256)
    first = B32.overhead_s + loading(store, 10_240 - 256) + B32.step_s + 256 / B32.rate
    assert again.first - again.at == pytest.approx(first)


def test_a_store_that_is_slower_than_computing_is_not_read():
    again = second_replica(Tier(100_000, 1e9, 0.002))
    assert (again.of_l1, again.of_l2) == (0, 0)


def test_readers_of_one_link_wait_for_each_other():
    both = Request(10.0, (DOCUMENT,), 2), Request(10.0, (DOCUMENT,), 2)

    def seconds(one_link):
        requests = (Request(0.0, (DOCUMENT,), 2), *both)
        store = Tier(100_000, 10e9, 0.002, one_link=one_link)
        case = Case(
            *("", B32, lambda rng, load: iter(requests), 1.0, 1000), replicas=3, l1=NEAR, l2=store
        )
        Fleet(case, "roundrobin", 0).run()
        return sorted(it.first - it.at for it in both)

    apart, shared = seconds(one_link=False), seconds(one_link=True)
    assert apart[0] == pytest.approx(apart[1]) == pytest.approx(shared[0])
    assert shared[1] > shared[0]


@pytest.fixture(scope="module")
def table():
    """Name of the arm -> its cells, of a short run with small caches."""
    rows: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combined, "B70", replace(B70, kv_tokens=150_000))
        patch.setattr(combined, "L1", replace(combined.L1, tokens=300_000))
        combined.run(["8k"], 40, 24.0, 1, 10.0, rows.append)
    return {row[:18].strip(): row[18:].split() for row in rows if row[:18].strip()}


def test_all_together_is_better_than_each(table):
    p50, p90, rate, dollars, engine, l1, l2 = range(7)
    names = [arm.name for arm in combined.arms()]
    figure = {
        name: [float(it.strip("%+").replace(",", "")) for it in table[name]] for name in names
    }
    base, everything = figure["baseline"], figure["all, daemon"]
    assert everything[p50] < base[p50]
    assert everything[p90] < base[p90]
    for name, it in figure.items():
        assert it[rate] >= base[rate]
        assert it[dollars] == pytest.approx(7 * 10 / 3600 / it[rate] * 1000, rel=0.01)
        assert "L1" not in name or it[l1] > 0
    assert figure["routing"][l1] == figure["L1 + L2 Redis"][l2] == 0
    assert figure["L1 + L2 daemon"][l2] > 0
    assert figure["routing"][engine] > base[engine]


def test_changes_are_beside_the_published_ones(table):
    assert table["baseline"][7:] == ["+0%"] * 4
    assert table["HyperPod's figures"] == ["-72%", "-40%", "+24%", "-21%"]


def test_the_figure_has_every_arm_beside_the_published_ones(monkeypatch, tmp_path):
    from matplotlib.axes import Axes  # it takes seconds to import

    found = {arm.name: (-0.5, -0.4, 0.3, -0.2) for arm in combined.arms()}
    drawn: list[str] = []
    monkeypatch.setattr(Axes, "bar", lambda *_, label, **__: drawn.append(label))
    combined.plot({"8k": found, "64k": found}, tmp_path / "it.png")
    assert drawn == [*[*found][1:], combined.PUBLISHED] * 2
    assert (tmp_path / "it.png").stat().st_size


def test_adapters_are_shared_out():
    """The replicas have room for all adapters together, but not one by one."""
    case = adapters_case(120, 50, 20, 2000, replicas=3)
    loads = {arm: simulate(case, arm, [0]).loads for arm in ("roundrobin", "prefixaware")}
    assert loads["prefixaware"] < 0.05 < 0.2 < loads["roundrobin"]


def test_prices():
    case = document_case(8000, 3, 20, 50)
    found = simulate(case, "roundrobin", [0])
    assert combined.cost(found, 0.0) == 0
    assert combined.cost(replace(found, rate=1000.0), 36.0) == pytest.approx(0.07)
    assert combined.cost(replace(found, rate=0.0), 36.0) == 0


@pytest.mark.parametrize("words", ["--price-per-hour=-1", "--users=0"])
def test_bad_options(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["simulate", "--combined", words])
    with pytest.raises(SystemExit):
        routing_sim.main()
    assert f"{words.replace('=', ' ')}: is" in capsys.readouterr().err


def test_a_long_prompt_is_prefilled_apart():
    """By hand: one engine computes it, and the other one loads it and answers."""
    memory, store = Tier(10**6, 1e12, 0.0), Tier(10**6, 1e12, 0.0)
    found = []
    for least in (4000, 4001):
        long, short = Request(0.0, ((5000, 4000),), 3), Request(0.2, ((6000, 100),), 3)
        case = Case("", B32, lambda *_, it=(long, short): iter(it), 1.0, 1000)
        case = replace(case, replicas=2, l1=memory, l2=store, apart=Apart(1, least))
        Fleet(case, "prefixaware", 0).run()
        assert long.replica == short.replica
        found.append((long, short))
    (apart, undisturbed), (together, disturbed) = found
    assert (apart.of_l2, together.of_l2) == (3840, 0)
    assert apart.first > together.first
    # A request that arrives meanwhile finds the answering engine idle.
    once = B32.overhead_s + B32.step_s + 100 / B32.rate
    assert undisturbed.first - undisturbed.at == pytest.approx(once)
    assert disturbed.first - disturbed.at > 1.5 * once


def test_the_comparison_of_disaggregated_prefill(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simulate", "--apart", "--quick"])
    monkeypatch.setattr(apart_module, "SECONDS", 10.0)
    monkeypatch.setattr(apart_module, "LOADS", (5,))
    monkeypatch.setattr(apart_module, "LEASTS", (1024,))
    routing_sim.main()
    shown = capsys.readouterr().out
    assert all(it in shown for it in ("together", "5 + 2 prefill", "1,024 tokens"))


def test_a_large_fleet_regrets_little(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simulate", "--large", "40", "--quick"])
    some = replace(document_case(8000, 10, 8 * 40, 300, hot=0.5), replicas=40)
    monkeypatch.setattr(large, "cases", lambda size, requests: {"hot": some})
    routing_sim.main()
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows[1:3]] == [["hot", "40", "all"], ["hot", "40", "some"]]
    monkeypatch.setattr(large, "MOST_REGRET", -1.0)
    with pytest.raises(SystemExit):
        routing_sim.main()
