# SPDX-License-Identifier: Apache-2.0
"""KV cache tiers and routing together: the same users in every arm, and the price of tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tools.routing_sim.model import B70, REPLICAS, Case, Tier
from tools.routing_sim.report import Outcome, simulate
from tools.routing_sim.rivals import BASE
from tools.routing_sim.workloads import readers

OURS = "prefixaware"
L1 = Tier(1_500_000, 20e9, 0.001)
"""490 GB of a 70B model's KV, at the speed that the router's default prices assume."""
STORES = {
    "Redis": Tier(10_000_000, 1.5e9, 0.002, one_link=True),
    "daemon": Tier(10_000_000, 12e9, 0.001),
}
"""A Redis that all replicas reach through one connection's worth of network; and tiered storage
whose daemon each replica has beside it.
"""
TIMES = 10
"""The size of all documents, as a multiple of one engine's cache."""
SECONDS = 120.0


@dataclass(frozen=True)
class Arm:
    """strategy: of the router. l1, l2: whether its replicas have tiers."""

    name: str
    strategy: str = BASE
    l1: Tier | None = None
    l2: Tier | None = None


def arms() -> list[Arm]:
    """All arms. The first is the baseline for the others."""
    stores = STORES.items()
    return [
        Arm("baseline"),
        Arm("L1", l1=L1),
        *(Arm(f"L1 + L2 {name}", l1=L1, l2=store) for name, store in stores),
        Arm("routing", OURS),
        *(Arm(f"all, {name}", OURS, L1, store) for name, store in stores),
    ]


@dataclass(frozen=True)
class Size:
    """users: as many as round-robin without tiers serves with TTFT P90 within 2.5 times an idle
    replica's. published: of HyperPod's tiered KV cache with routing, changes of TTFT P50, P90,
    tokens/s and cost (AWS's blog, November 2025).
    """

    length: int
    users: int
    published: tuple[float, float, float, float]


SIZES = {
    "8k": Size(8_000, 200, (-0.72, -0.40, 0.24, -0.21)),
    "64k": Size(64_000, 35, (-0.94, -0.35, 0.38, -0.28)),
}
COLUMNS = ("", "TTFT P50", "P90", "tokens/s", "$/1,000", "engine's", "L1's", "L2's")
CHANGES = ("P50", "P90", "tokens/s", "cost")
PUBLISHED = "HyperPod's figures"


def case(size: Size, users: int, seconds: float) -> Case:
    number = round(TIMES * B70.kv_tokens / size.length)
    requests = partial(readers, length=size.length, number=number)
    name = (
        f"{number} documents of {size.length:,} tokens, {TIMES} x one engine's cache; "
        f"{users} users, one question after the other; 70B"
    )
    return Case(name, B70, requests, users, seconds)


def cost(outcome: Outcome, price_per_hour: float) -> float:
    """$ for 1,000 tokens of answers; the price is one replica's."""
    return REPLICAS * price_per_hour / 3600 / outcome.rate * 1000 if outcome.rate else 0.0


Changes = tuple[float, float, float, float]


def changes(it: Outcome, base: Outcome) -> Changes:
    """Changes of TTFT P50, P90, tokens/s and cost. The cost's does not depend on the price."""
    rate = it.rate / base.rate
    return (
        it.ttft(0.5) / base.ttft(0.5) - 1,
        it.ttft(0.9) / base.ttft(0.9) - 1,
        rate - 1,
        1 / rate - 1,
    )


def line(row: Sequence[str]) -> str:
    return f"{row[0]:18}" + "".join(f"{cell:>10}" for cell in row[1:])


def run(
    sizes: Sequence[str],
    users: int | None,
    seconds: float,
    seeds: int,
    price_per_hour: float,
    say: Callable[[str], None],
) -> dict[str, dict[str, Changes]]:
    """Every arm's changes, by size; printed as it comes."""
    found: dict[str, dict[str, Changes]] = {}
    for name in sizes:
        size = SIZES[name]
        plain = case(size, users or size.users, seconds)
        say(f"\n{plain.name}")
        say(line((*COLUMNS, *CHANGES)))
        base: Outcome | None = None
        for arm in arms():
            it = simulate(replace(plain, l1=arm.l1, l2=arm.l2), arm.strategy, range(seeds))
            base = base or it
            row = [arm.name, f"{it.ttft(0.5):.3f}", f"{it.ttft(0.9):.3f}", f"{it.rate:,.0f}"]
            row.append(f"{cost(it, price_per_hour):.4f}")
            row += [f"{share:.0%}" for share in (it.hit, it.of_l1, it.of_l2)]
            changed = found.setdefault(name, {})[arm.name] = changes(it, base)
            say(line([*row, *(f"{change:+.0%}" for change in changed)]))
        published = [f"{change:+.0%}" for change in size.published]
        say(line([PUBLISHED, *[""] * 7, *published]))
    return found


def plot(found: Mapping[str, Mapping[str, Changes]], file: Path) -> None:
    """The changes of each arm but the first beside the published ones, by size."""
    from matplotlib.figure import Figure  # it takes seconds to import

    figure = Figure(figsize=(11, 4.5))
    for place, (name, arms_) in enumerate(found.items(), start=1):
        size, axes = SIZES[name], figure.add_subplot(1, len(found), place)
        bars = {**dict([*arms_.items()][1:]), PUBLISHED: size.published}
        width = 0.8 / len(bars)
        for n, (arm, changed) in enumerate(bars.items()):
            at = [group + (n + 0.5) * width - 0.4 for group in range(len(CHANGES))]
            colour = "black" if arm == PUBLISHED else f"C{n}"
            axes.bar(at, [100 * it for it in changed], 0.9 * width, color=colour, label=arm)
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_xticks(range(len(CHANGES)), CHANGES)
        axes.set_title(f"{name}: change against the baseline (%)")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(file)
