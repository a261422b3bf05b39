# SPDX-License-Identifier: Apache-2.0
"""The results of a simulation: figures of each arm, tables, targets, and a plot."""

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.routing_sim.engine import BUDGET
from tools.routing_sim.fleet import WARM_UP, Fleet
from tools.routing_sim.model import Case
from tools.routing_sim.rivals import BASE, OURS
from tools.routing_sim.workloads import chat


@dataclass
class Outcome:
    """ttfts, gaps: seconds to the first token, and between tokens, of each request, in order;
    math.inf: failed. rate: output tokens/s. hit, of_l1, of_l2: prompt tokens that came from the
    engine's cache and from each tier / prompt tokens. loads: loads of adapters / requests.
    """

    ttfts: list[float]
    gaps: list[float]
    rate: float
    hit: float
    hot: float
    of_l1: float = 0.0
    of_l2: float = 0.0
    loads: float = 0.0

    @property
    def failed(self) -> float:
        return sum(map(math.isinf, self.ttfts)) / len(self.ttfts)

    def ttft(self, share: float) -> float:
        return percentile(self.ttfts, share)


def percentile(values: list[float], share: float) -> float:
    """values: in order."""
    return values[min(len(values) - 1, int(share * len(values)))]


def simulate(case: Case, arm: str, seeds: Iterable[int]) -> Outcome:
    """Percentiles are of all seeds' requests, the other figures means."""
    ttfts, gaps, rates, hots = [], [], [], []
    cached = of_l1 = of_l2 = prompt = loads = 0
    began = case.seconds * WARM_UP
    for seed in seeds:
        fleet = Fleet(case, arm, seed)
        fleet.run()
        counted = [it for it in fleet.requests if it.at >= began]
        for it in counted:
            cached += it.cached
            of_l1 += it.of_l1
            of_l2 += it.of_l2
            prompt += it.tokens
            loads += it.adapter_loads
            failed = math.isinf(it.end)
            ttfts.append(math.inf if failed else it.first - it.at)
            gaps.append(math.inf if failed else (it.end - it.first) / (it.output - 1))
        output = sum(it.output for it in fleet.requests if began <= it.end <= case.seconds)
        rates.append(output / (case.seconds - began))
        most = max(Counter(it.replica for it in counted).values())
        hots.append(case.replicas * most / len(counted))
    rate, hot = statistics.mean(rates), statistics.mean(hots)
    return Outcome(
        *(sorted(ttfts), sorted(gaps), rate, cached / prompt, hot),
        *(of_l1 / prompt, of_l2 / prompt, loads / len(ttfts)),
    )


COLUMNS = ("", "TTFT P50", "P90", "P99", "gap P90", "tokens/s", "hit", "hot", "loads", "failed")


def cells(arm: str, it: Outcome) -> list[str]:
    ttfts = [f"{it.ttft(share):.3f}" for share in (0.5, 0.9, 0.99)]
    gap = f"{percentile(it.gaps, 0.9) * 1e3:.0f} ms"
    loads = f"{it.loads:.2f}" if it.loads else "-"
    failed = f"{it.failed:.1%}" if it.failed else "-"
    return [arm, *ttfts, gap, f"{it.rate:,.0f}", f"{it.hit:.2f}", f"{it.hot:.2f}", loads, failed]


def line(row: Sequence[str]) -> str:
    return f"{row[0]:18}" + "".join(f"{cell:>10}" for cell in row[1:])


Found = list[dict[str, Outcome]]
"""For each case, by arm."""


def run(cases: Sequence[Case], arms: Sequence[str], seeds: int) -> Found:
    """The result of each arm in each case, printed at once."""
    found: Found = []
    for case in cases:
        users = case.requests is chat
        print(f"\n{case.name}; {case.load:g} {'users' if users else 'requests/s'}")
        print(line(COLUMNS), flush=True)
        found.append({})
        for arm in arms:
            outcome = simulate(case, arm, range(seeds))
            found[-1][arm] = outcome
            print(line(cells(arm, outcome)), flush=True)
    return found


class Target(NamedTuple):
    """A target for one of our arms, and its result; changes are against round-robin."""

    what: str
    wanted: float
    arm: str
    found: float
    unit: str = "%"

    @property
    def met(self) -> bool:
        more_is_better = "tokens/s" in self.what
        return self.found >= self.wanted if more_is_better else self.found <= self.wanted

    def row(self) -> str:
        form = "{:+.1%}" if self.unit == "%" else "{:.2f}"
        found, wanted = form.format(self.found), form.format(self.wanted)
        return f"{self.what:64}{self.arm:14}{wanted:>9}{found:>9}  {'met' if self.met else 'NOT'}"


def limit(case: Case) -> float:
    """Seconds for the first token: 2.5 times what an idle replica takes that has nothing cached."""
    request = next(case.requests(random.Random(0), case.load))
    it = case.profile
    steps = -(-request.tokens // BUDGET)
    return 2.5 * (it.overhead_s + steps * it.step_s + request.tokens / it.rate)


def knee(cases: Sequence[Case], found: Found, arm: str) -> int:
    """The last case that gives nine of ten requests of the arm their first token in time."""
    within = [it[arm].ttft(0.9) <= limit(case) for case, it in zip(cases, found, strict=True)]
    return max(0, [*within, False].index(False) - 1)


def of_documents(
    size: str, cases: Sequence[Case], found: Found, wanted: tuple[float, float, float]
) -> Iterator[Target]:
    """TTFT at round-robin's knee; tokens/s at each one's own."""
    at = knee(cases, found, BASE)
    base = found[at][BASE]
    for arm in OURS:
        for share, most in zip((0.5, 0.9), wanted, strict=False):
            what = f"{size}, {cases[at].load:g} requests/s: TTFT P{share * 100:.0f}"
            change = found[at][arm].ttft(share) / base.ttft(share) - 1
            yield Target(what, most, arm, change)
        own = knee(cases, found, arm)
        loads = f"{cases[own].load:g} : {cases[at].load:g} requests/s"
        what = f"{size}, most tokens/s with P90 <= {limit(cases[0]):.1f} s ({loads})"
        yield Target(what, wanted[2], arm, found[own][arm].rate / base.rate - 1)


def targets(cases: dict[str, list[Case]], found: dict[str, Found]) -> Iterator[Target]:
    """The figures that are published of HyperPod's routing, and two limits on harm."""
    if "8k" in found:
        yield from of_documents("8k", cases["8k"], found["8k"], (-0.72, -0.40, 0.24))
    if "64k" in found:
        yield from of_documents("64k", cases["64k"], found["64k"], (-0.94, -0.35, 0.38))
    for arm in OURS:
        for case, it in zip(cases["unshared"], found.get("unshared", ()), strict=False):
            base, ours = it[BASE], it[arm]
            worse = {
                "TTFT P50": ours.ttft(0.5) / base.ttft(0.5) - 1,
                "TTFT P90": ours.ttft(0.9) / base.ttft(0.9) - 1,
                "seconds for each token": base.rate / ours.rate - 1,
            }
            for what, change in worse.items():
                yield Target(f"unshared, {case.load:g} requests/s: {what}", 0.02, arm, change)
        for case, it in zip(cases["system"], found.get("system", ()), strict=False):
            shared = case.name.split("; ")[1]
            yield Target(f"{shared}: hot", 1.1, arm, it[arm].hot, "")


def plot(cases: dict[str, list[Case]], found: dict[str, Found], file: Path) -> None:
    """TTFT P50 (solid) and P90 (dashed) by offered load."""
    from matplotlib.figure import Figure  # it takes seconds to import

    figure = Figure(figsize=(11, 4))
    sizes = [size for size in ("8k", "64k") if size in found]
    for place, size in enumerate(sizes, start=1):
        axes = figure.add_subplot(1, len(sizes), place)
        loads = [case.load for case in cases[size]]
        for colour, arm in enumerate(found[size][0]):
            for share, style in ((0.5, "-"), (0.9, "--")):
                ttfts = [it[arm].ttft(share) for it in found[size]]
                label = arm if style == "-" else None
                axes.plot(loads, ttfts, style, color=f"C{colour}", label=label)
        axes.set_yscale("log")
        axes.set_ylim(0.05, 60)
        axes.set_title(f"documents of {size} tokens")
        axes.set_xlabel("requests/s")
        axes.set_ylabel("TTFT in s: P50, and P90 dashed")
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(file)
