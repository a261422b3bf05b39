# SPDX-License-Identifier: Apache-2.0
"""Large fleets, where prefixaware measures some replicas instead of all: what that costs.

One run measures all. In the other both rules choose for each request, in the same state, and the
one that measures some has its way. Regret is the cost of its choices beyond that of the others, as
a share.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from serving.router.policy.candidates import Candidates
from serving.router.policy.policies import Choice, PrefixAware
from serving.router.policy.prefix_index import PrefixIndex
from serving.router.policy.replica_load import Load
from serving.router.policy.routing_request import RoutingRequest
from tools.routing_sim.fleet import WARM_UP, Fleet
from tools.routing_sim.model import REPLICAS, Case
from tools.routing_sim.report import line, percentile
from tools.routing_sim.workloads import adapters_case, document_case, unshared_case

SIZES = (100, 300)
MOST_REGRET = 0.02
COLUMNS = ("", "replicas", "measured", "TTFT P50", "P90", "hit", "choice us", "regret")


class All(PrefixAware):
    """Measures all replicas."""

    exact = 10**9
    seconds = cost = best = 0.0
    """CPU seconds of all choices, their cost, and the cost of the choices among all replicas."""

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        began = time.process_time()
        choice = super().choose(request, replicas, now)
        self.seconds += time.process_time() - began
        return choice


class Some(All):
    """Measures some, as the router does, and compares."""

    exact = PrefixAware.exact

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        choice = super().choose(request, replicas, now)
        everybody = copy.copy(self)
        everybody.exact = All.exact
        best = PrefixAware.choose(everybody, request, replicas, now)
        home = next(Candidates.of(replicas).order(request.adapter)) if request.adapter else None
        both = self.costs(request, (choice.replica, best.replica), home, now)
        self.cost += both[0][0]
        self.best += both[1][0]
        return choice


class Result(NamedTuple):
    """Seconds to the first token, the share of cached tokens, seconds of a choice, regret."""

    p50: float
    p90: float
    hit: float
    choice: float
    regret: float


def cases(replicas: int, requests: int) -> dict[str, Case]:
    """As they are for seven replicas, with as much load for each."""
    found = {
        "documents": document_case(8000, 10 * replicas / REPLICAS, 4 * replicas, requests),
        "hot document": document_case(8000, 10, 8 * replicas, requests, hot=0.5),
        "unshared": unshared_case(25 * replicas, requests),
        "adapters": adapters_case(20 * replicas, 64, 8 * replicas, requests),
    }
    return {name: replace(case, replicas=replicas) for name, case in found.items()}


def simulate(case: Case, rule: type[All], seed: int = 0) -> Result:
    """A run with this rule."""
    policies: list[All] = []

    def make(index: PrefixIndex) -> All:
        policies.append(rule(index))
        return policies[0]

    fleet = Fleet(case, "prefixaware", seed, policy=make)
    fleet.run()
    (policy,) = policies
    counted = [it for it in fleet.requests if it.at >= case.seconds * WARM_UP]
    ttfts = sorted(it.first - it.at if math.isfinite(it.end) else math.inf for it in counted)
    return Result(
        *(percentile(ttfts, 0.5), percentile(ttfts, 0.9)),
        sum(it.cached for it in counted) / sum(it.tokens for it in counted),
        policy.seconds / len(fleet.requests),
        policy.cost / policy.best - 1 if policy.best else 0.0,
    )


def run(sizes: Sequence[int], requests: int, say: Callable[[str], None]) -> bool:
    """Compare both rules. Whether regret is small enough. requests: for each replica."""
    say(line(COLUMNS))
    worst = 0.0
    for size in sizes:
        for name, case in cases(size, requests * size).items():
            for rule in (All, Some):
                it = simulate(case, rule)
                worst = max(worst, it.regret)
                regret = f"{it.regret:+.2%}" if rule is Some else ""
                row = [name, str(size), rule.__name__.lower(), f"{it.p50:.3f}", f"{it.p90:.3f}"]
                say(line([*row, f"{it.hit:.2f}", f"{1e6 * it.choice:.0f}", regret]))
    say(f"largest regret: {worst:+.2%}, limit {MOST_REGRET:+.0%}")
    return worst <= MOST_REGRET
