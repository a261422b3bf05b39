# SPDX-License-Identifier: Apache-2.0
"""The ledger of a chaos run: every request's end, every fault, and every growth."""

import math
import re
import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

GRACE_S = 2.0
"""After a fault is over, an error that it has caused may still be on its way."""
SHOWN = 20
"""Number of wrong answers that are printed in full."""
GROWS_MIB = 64.0
GROWS_SHARE = 0.15
GROWS_FILES = 24
GROWS_HOURLY = 0.01
"""Tolerances for a process between the start and the end: MiB of unshared memory (or this share of
it, if that is more), file descriptors, and the growth per hour as a share of memory, files and
tasks. The first are far less than a leak in each request or connection would add. They are more
than the effect of idle connections and a warm allocator.
"""


class End(StrEnum):
    """How a request ended.

    RIGHT: complete and correct. EXPLAINED: an error in a documented shape, of a fault at that time,
    or a refusal of garbage. DROPPED: the client left. REFUSED: sent after its server was asked to
    stop. The others should not occur: LOST, no complete answer and no error; WRONG, another answer
    than the right one; UNEXPLAINED, an error without a fault, or in an undocumented shape.
    """

    RIGHT = "right"
    EXPLAINED = "explained"
    DROPPED = "dropped by us"
    REFUSED = "after SIGTERM"
    LOST = "lost"
    WRONG = "wrong"
    UNEXPLAINED = "unexplained"


BAD = (End.LOST, End.WRONG, End.UNEXPLAINED)


class Verdict(NamedTuple):
    end: End
    told: str = ""


@dataclass
class Fault:
    """began, over: seconds on the monotonic clock. causes: the statuses of errors that requests may
    get from it, and 0 if connections may be cut. forgets: whether a server restarts and loses the
    adapters registered with it. recovered: seconds from its end until all is well, or from its
    beginning if it ends by itself.
    """

    name: str
    causes: Set[int]
    forgets: bool
    began: float
    over: float = math.inf
    recovered: float | None = None


class Sample(NamedTuple):
    """A process: its unshared memory in MiB, its files, and its asyncio tasks. Tasks are not
    counted in the engines' processes.
    """

    memory: float
    files: int
    tasks: int = 0


@dataclass
class Ledger:
    """problems: what else went wrong, in words."""

    ends: Counter[tuple[str, End]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def count(self, kind: str, verdict: Verdict) -> None:
        self.ends[kind, verdict.end] += 1
        if verdict.end is End.EXPLAINED:
            self.reasons[re.sub(r"\d{4,}|'[^']*'", "…", verdict.told)[:100]] += 1
        elif verdict.end in BAD and len(self.examples) < SHOWN:
            clock = time.strftime("%H:%M:%S", time.gmtime())
            self.examples.append(f"{clock} {kind}: {verdict.end}: {verdict.told}")

    def fault(self, name: str, causes: Set[int] = frozenset(), forgets: bool = False) -> Fault:
        """A fault begins."""
        self.faults.append(Fault(name, causes, forgets, time.monotonic()))
        return self.faults[-1]

    def allowed(self, began: float, ended: float, also: Set[int] = frozenset()) -> Set[int]:
        """The statuses of errors that the faults of that time may have caused. also: further
        statuses for a request that needs state which a restarted server has lost.
        """
        faults = [it for it in self.faults if it.began < ended and began < it.over + GRACE_S]
        found: Set[int] = frozenset().union(*(it.causes for it in faults))
        return found | also if any(it.forgets for it in faults) else found

    def total(self, *ends: End) -> int:
        return sum(count for (_, end), count in self.ends.items() if end in ends)

    @property
    def good(self) -> bool:
        return not self.total(*BAD) and not self.problems

    def text(self) -> str:
        lines = [f"{'requests':30}" + "".join(f"{end:>15}" for end in ("sent", *End))]
        for kind in [*sorted({kind for kind, _ in self.ends}), ""]:
            of_kind = {
                end: sum(n for (it, e), n in self.ends.items() if e is end and kind in ("", it))
                for end in End
            }
            cells = (sum(of_kind.values()), *of_kind.values())
            lines.append(f"{kind or 'all':30}" + "".join(f"{n or '-':>15}" for n in cells))
        if self.reasons:
            lines += ["", "explained errors"]
            lines += [f"{count:8}  {told}" for told, count in self.reasons.most_common()]
        if self.faults:
            lines += ["", f"{'faults':30}{'injected':>15}{'recovered in s: median':>25}{'max':>10}"]
        for name in sorted({it.name for it in self.faults}):
            took = [it.recovered for it in self.faults if it.name == name]
            known = sorted(it for it in took if it is not None)
            median = f"{known[len(known) // 2]:.1f}" if known else "-"
            most = f"{known[-1]:.1f}" if known else "-"
            lines.append(f"{name:30}{len(took):>15}{median:>25}{most:>10}")
        if bad := [*self.examples, *self.problems]:
            lines += ["", "not as it should be", *(f"  {it}" for it in bad)]
        return "\n".join(lines)


def grown(
    before: dict[str, Sample], after: dict[str, Sample], share: float = GROWS_SHARE
) -> list[str]:
    """The growth beyond its tolerance between two quiet moments, in words. share: tolerated growth
    as a share of memory, if that is more than GROWS_MIB.

    Engines' processes are left out: their heaps take longer to have seen batches of all sizes.
    """
    found = []
    for name in before.keys() & after.keys():
        if name.startswith("engine"):
            continue
        old, new = before[name], after[name]
        if new.memory - old.memory > max(GROWS_MIB, share * old.memory):
            found.append(f"{name} grew from {old.memory:.0f} to {new.memory:.0f} MiB")
        if new.files - old.files > GROWS_FILES:
            found.append(f"{name} had {old.files} file descriptors, and has {new.files}")
    return sorted(found)


def table(before: dict[str, Sample], after: dict[str, Sample]) -> str:
    lines = [f"{'processes':30}{'MiB at start':>15}{'at end':>15}{'files':>15}{'at end':>15}"]
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        cells = f"{old.memory:>15.1f}{new.memory:>15.1f}{old.files:>15}{new.files:>15}"
        lines.append(f"{name:30}{cells}")
    return "\n".join(lines)


def slopes(times: Sequence[float], series: dict[str, list[Sample]]) -> str:
    """The growth of each process, overall and in the second half of the time.

    A process that only warmed up in the first half has stopped growing in the second. times:
    seconds.
    """
    heads = [it for what in ("MiB", "files", "tasks") for it in (f"{what}/hour", "in 2nd half")]
    lines = [f"{'slopes':26}" + "".join(f"{it:>20}" for it in heads)]
    begins = (0, len(times) // 2)
    for name, found in sorted(series.items()):
        if len(found) == len(times) > 5:
            told = [
                slope(times[it:], values[it:])
                for values in zip(*found, strict=True)
                for it in begins
            ]
            cells = "".join(f"{f'{rise:.1f} ± {error:.1f}':>20}" for rise, error in told)
            lines.append(f"{name:26}{cells}")
    return "\n".join(lines)


def shares(times: Sequence[float], series: dict[str, list[Sample]]) -> tuple[str, list[str]]:
    """By which share of it each process's memory, files and tasks grow in an hour, as a table; and
    which of them grow by more than GROWS_HOURLY, beyond the error of the slope.
    """
    lines = [f"{'growth in an hour':26}" + "".join(f"{it:>20}" for it in Sample._fields)]
    problems = []
    for name, found in sorted(series.items()):
        cells = ""
        for what, values in zip(Sample._fields, zip(*found, strict=True), strict=True):
            mean = sum(values) / len(values)
            rise, error = (it / max(mean, 1) for it in slope(times, values))
            cells += f"{f'{rise:.1%} ± {error:.1%}':>20}"
            if rise - error > GROWS_HOURLY and not name.startswith("engine"):
                problems.append(f"{what} of {name} grow by {rise:.1%} ± {error:.1%} an hour")
        lines.append(f"{name:26}{cells}")
    return "\n".join(lines), problems


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The least-squares line: its increase in an hour and twice its standard error.

    times: seconds. The error assumes independent samples; it is too small for values that drift in
    waves.
    """
    count = len(times)
    mean_t, mean_v = sum(times) / count, sum(values) / count
    spread = sum((t - mean_t) ** 2 for t in times)
    pairs = list(zip(times, values, strict=True))
    rise = sum((t - mean_t) * (v - mean_v) for t, v in pairs) / spread
    left = sum((v - mean_v - rise * (t - mean_t)) ** 2 for t, v in pairs)
    return 3600 * rise, 2 * 3600 * math.sqrt(left / (count - 2) / spread)
