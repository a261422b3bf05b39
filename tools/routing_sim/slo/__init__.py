# SPDX-License-Identifier: Apache-2.0
"""Forecasts of the time to the first token: their accuracy, and the gain of choices by an objective
for the first token. Replicas are equal, or one of them is slower.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from serving.router.forecast.first_token import TRUSTED
from tools.routing_sim.fleet import WARM_UP, Fleet
from tools.routing_sim.model import Case
from tools.routing_sim.report import line, percentile
from tools.routing_sim.workloads import document_case, unshared_case

STRATEGY = "prefixaware"
COLUMNS = ("", "objective", "P50", "P90", "P99", "missed", "ratio Q1", "median", "Q3")


class Result(NamedTuple):
    """ttfts: seconds to the first token; ratios: forecast / measured; both in order."""

    ttfts: list[float]
    ratios: list[float]

    def missed(self, within: float) -> float:
        """The share of requests whose first token took longer than `within` seconds."""
        return sum(it > within for it in self.ttfts) / len(self.ttfts)

    def quartiles(self) -> list[float]:
        return [percentile(self.ratios, share) for share in (0.25, 0.5, 0.75)]


def cases(times: float) -> dict[str, Case]:
    """times: the number of requests, relative to the usual one. The objectives: twice the median
    for short prompts; less than half the usual speed takes for a document that no cache has.
    """
    prompts = replace(unshared_case(150, round(4500 * times)), within=0.15)
    documents = replace(document_case(8000, 10, 20, round(2000 * times)), within=0.6)
    return {
        "prompts, equal": prompts,
        "one 1/3 as fast": replace(prompts, slow=3.0),
        "documents, equal": documents,
        "one half as fast": replace(documents, slow=2.0),
    }


def simulate(case: Case, seeds: int) -> Result:
    """Requests that have not begun at the end count with their waiting time until then."""
    ttfts, ratios = [], []
    began = case.seconds * WARM_UP
    for seed in range(seeds):
        fleet = Fleet(case, STRATEGY, seed)
        fleet.run()
        counted = (it for it in fleet.requests if it.at >= began)
        ttfts += [min(it.first, fleet.clock.now) - it.at for it in counted]
        ratios += [ratio for at, ratio in fleet.ratios if at >= began]
    return Result(sorted(ttfts), sorted(ratios))


def run(times: float, seeds: int, say: Callable[[str], None]) -> bool:
    """Compare choices with an objective and without. Returns whether the forecasts are good enough
    for choices, and the choices do not make more requests miss the objective. times: as cases() has
    it. ratio: forecast / measured.
    """
    say(line(COLUMNS))
    fine = True
    for name, case in cases(times).items():
        assert case.within
        without, by_it = simulate(replace(case, within=None), seeds), simulate(case, seeds)
        say(line([name, "-", *cells(without, case.within)]))
        say(line(["", f"{case.within:g}", *cells(by_it, case.within)]))
        for it in (without, by_it):
            first, _, third = it.quartiles()
            fine = fine and TRUSTED[0] <= first and third <= TRUSTED[1]
        fine = fine and by_it.missed(case.within) <= without.missed(case.within) + 0.01
    return fine


def cells(it: Result, within: float) -> Sequence[str]:
    ttfts = [f"{percentile(it.ttfts, share):.3f}" for share in (0.5, 0.9, 0.99)]
    return [*ttfts, f"{it.missed(within):.1%}", *(f"{ratio:.2f}" for ratio in it.quartiles())]
