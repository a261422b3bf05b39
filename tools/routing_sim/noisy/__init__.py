# SPDX-License-Identifier: Apache-2.0
"""One noisy tenant among others: the time to the first token of the others, with requests that wait
at the router in turns of the tenants, and without.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tools.routing_sim.engine import SEATS
from tools.routing_sim.fleet import WARM_UP, Fleet
from tools.routing_sim.model import B32, REPLICAS, Case, Request
from tools.routing_sim.report import line, percentile
from tools.routing_sim.workloads import unshared

STRATEGY = "prefixaware"
OTHERS, SHARE = 4, 0.1
"""Quiet tenants, and the load of each as a share of the fleet's capacity."""
LOADS = (0.6, 1.1)
"""The loads of all tenants together, as such shares."""
NOISY = "noisy"
SLOTS = SEATS * 5 // 4, SEATS * 17 // 16, SEATS, SEATS // 2
"""Slots of a replica: the reported number, which is a quarter more than its engine runs, and
fewer."""
COLUMNS = ("", "load", "P50", "P90", "P99", "engine", "noisy P90", "reqs/s", "P90/alone")


class Result(NamedTuple):
    """Seconds to the first token: of the others' requests and of the noisy tenant's, in order.
    engine: the others' from the time that the router sent them on. rate: requests that ended in a
    second.
    """

    others: list[float]
    engine: list[float]
    noisy: list[float]
    rate: float


def tenants(rng: random.Random, load: float, *, share: float, alone: bool) -> Iterator[Request]:
    """Unshared prompts. share: of the requests that are the others'. alone: without the rest."""
    for request in unshared(rng, load):
        others = rng.random() < share
        request.tenant = f"tenant {rng.randrange(OTHERS)}" if others else NOISY
        if others or not alone:
            yield request


def simulate(case: Case, seed: int = 0) -> Result:
    """Requests that have not begun at the end count with their waiting time until then."""
    fleet = Fleet(case, STRATEGY, seed)
    fleet.run()
    began = case.seconds * WARM_UP
    counted = [it for it in fleet.requests if it.at >= began]
    waits: dict[bool, list[float]] = {True: [], False: []}
    for it in counted:
        waits[it.tenant == NOISY].append(min(it.first, fleet.clock.now) - it.at)
    sent = [it for it in counted if it.tenant != NOISY and it.sent < math.inf]
    engine = sorted(min(it.first, fleet.clock.now) - it.sent for it in sent)
    ended = sum(began <= it.end <= case.seconds for it in fleet.requests)
    rate = ended / (case.seconds - began)
    return Result(sorted(waits[False]), engine, sorted(waits[True]), rate)


def capacity(seconds: float) -> float:
    """Requests/s of a fleet that has always more to do."""
    endless = partial(tenants, share=0.0, alone=False)
    return simulate(Case("", B32, endless, 100 * REPLICAS, seconds)).rate


def run(seconds: float, say: Callable[[str], None]) -> bool:
    """Compare all arms at each load. Whether requests gain by the wait at the router, with slots as
    servers report them: in an overload others have their first token in half of the time at P90,
    and at lower loads in the same time.
    """
    most = capacity(seconds)
    say(f"{REPLICAS} replicas, 32B, unshared prompts: {most:.0f} requests/s at most")
    say(f"{OTHERS} tenants with {SHARE:.0%} of that each, the rest is one tenant's; times in s")
    say(line(COLUMNS))
    fine = True
    for load in LOADS:
        share = OTHERS * SHARE / load
        case = Case("", B32, partial(tenants, share=share, alone=False), load * most, seconds)
        arms = {
            "others alone": replace(case, requests=partial(tenants, share=share, alone=True)),
            "no wait": case,
            **{f"{slots} slots": replace(case, slots=slots) for slots in SLOTS},
        }
        p90s = []
        for name, arm in arms.items():
            it = simulate(arm)
            p90s.append(percentile(it.others, 0.9))
            say(line([name, f"{load:g}", *cells(it), f"{p90s[-1] / p90s[0]:.2f}"]))
        _, without, reported, *_ = p90s
        fine = fine and reported <= (0.5 if load > 1 else 1.02) * without
    return fine


def cells(it: Result) -> Sequence[str]:
    others = [f"{percentile(it.others, share):.3f}" for share in (0.5, 0.9, 0.99)]
    engine, noisy = (
        f"{percentile(some, 0.9):.3f}" if some else "-" for some in (it.engine, it.noisy)
    )
    return [*others, engine, noisy, f"{it.rate:.0f}"]
