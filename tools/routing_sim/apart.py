# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: the least load and prompt length that make it pay."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from tools.routing_sim.combined import L1, STORES, line
from tools.routing_sim.model import B32, REPLICAS, Apart, Case, Request
from tools.routing_sim.report import Outcome, percentile, simulate

STRATEGY = "prefixaware"
LONG = 0.15
"""Share of the requests."""
SECONDS = 120.0
LOADS = (5, 10, 20, 30, 40, 50)
MIDDLE = 20
PREFILLING = (0, 1, 2, 3)
"""Share of the replicas."""
LEAST = 4096
LEASTS = (1024, 2048, 4096, 8192, 16_384)
COLUMNS = ("", "TTFT P50", "P90", "gap P50", "gap P90", "gap P99", "tokens/s", "failed")


def mixed(rng: random.Random, load: float) -> Iterator[Request]:
    """Short prompts with answers of 210 tokens on average, and long ones, 2,000 to 32,000 tokens of
    documents that nobody else asks about, with the same answers.
    """
    now = 0.0
    while True:
        now += rng.expovariate(load)
        name = rng.getrandbits(48) + 1000
        tokens = min(2000, 4 + int(rng.lognormvariate(math.log(130), 1.1)))
        if rng.random() < LONG:
            tokens = int(2000 * 16 ** rng.random())
        output = min(2000, 2 + int(rng.lognormvariate(math.log(150), 0.8)))
        yield Request(now, ((name, tokens),), output, session=str(name))


def case(load: float, seconds: float, apart: Apart | None) -> Case:
    name = f"{LONG:.0%} long prompts, a store of 12 GB/s; 32B"
    return Case(name, B32, mixed, load, seconds, l1=L1, l2=STORES["daemon"], apart=apart)


def cells(name: str, it: Outcome) -> list[str]:
    gaps = [f"{percentile(it.gaps, share) * 1e3:.0f} ms" for share in (0.5, 0.9, 0.99)]
    failed = f"{it.failed:.1%}" if it.failed else "-"
    ttfts = [f"{it.ttft(share):.3f}" for share in (0.5, 0.9)]
    return [name, *ttfts, *gaps, f"{it.rate:,.0f}", failed]


def run(seconds: float, seeds: int, say: Callable[[str], None]) -> None:
    """Every arm at every load, then every limit at one load; printed as it comes."""
    plain = case(LOADS[0], seconds, None)
    for load in LOADS:
        say(f"\n{plain.name}; {load:g} requests/s")
        say(line(COLUMNS))
        for count in PREFILLING:
            apart = Apart(count, LEAST) if count else None
            it = simulate(case(load, seconds, apart), STRATEGY, range(seeds))
            say(line(cells(f"{REPLICAS - count} + {count} prefill" if count else "together", it)))
    middle = case(MIDDLE, seconds, Apart(2, LEAST))
    say(f"\nprompts from this length on; 5 + 2 prefill; {middle.load:g} requests/s")
    say(line(COLUMNS))
    for least in LEASTS:
        it = simulate(replace(middle, apart=Apart(2, least)), STRATEGY, range(seeds))
        say(line(cells(f"{least:,} tokens", it)))
