# SPDX-License-Identifier: Apache-2.0
"""Simulate the router's strategies, and those of others, in front of seven engines with GPUs.

tools/routing_sim/README.md describes the simulation, the sources of the strategies, and the limits
of the results.

Columns are percentiles of the time to first token (TTFT) in seconds, over the requests of all
seeds, and:

- "gap": time between the tokens of an answer
- "hit": prompt tokens from an engine's cache / prompt tokens
- "hot": replicas x the largest share of requests that one got
- "loads": loads of adapters, for each request
- "failed": requests that had not ended 60 s after the last one came; they count as the slowest
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from tools.routing_sim import apart, combined, large, noisy, slo
from tools.routing_sim.model import REPLICAS
from tools.routing_sim.report import Found, plot, run, targets
from tools.routing_sim.rivals import ARMS, BASE, OURS
from tools.routing_sim.workloads import workloads

FEW = ("least requests", "their prefixaware", "cache_aware", "loadaware")
SWEPT = ("8k", "64k", "unshared", "system")
ALL_ARMS = ("chat", "hot", "faults", "adapters")
QUICK = ("8k", "64k", "system")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", choices=workloads(quick=False))
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="round-robin and ours come too")
    parser.add_argument("--seeds", type=int, help="runs of each (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a few seconds: less of everything")
    parser.add_argument("--plot", type=Path, help="a file for a figure, like routing.png")
    tiers = parser.add_argument_group("KV cache tiers and routing together")
    tiers.add_argument("--combined", action="store_true", help="that alone, beside HyperPod's")
    tiers.add_argument("--size", nargs="+", choices=combined.SIZES, default=[*combined.SIZES])
    tiers.add_argument("--users", type=int, help="at a time (default: by size)")
    price = "of one replica's machine, in $ (default: %(default)s)"
    tiers.add_argument("--price-per-hour", type=float, default=40.0, help=price)
    parser.add_argument("--apart", action="store_true", help="prefill and decode apart, that alone")
    noisy_help = "one noisy tenant, with requests that wait at the router and without, that alone"
    parser.add_argument("--noisy", action="store_true", help=noisy_help)
    slo_help = "choices by an objective for the first token, and without, that alone"
    parser.add_argument("--slo", action="store_true", help=slo_help)
    large_help = (
        "large fleets of these sizes, that alone: what it costs not to measure all replicas"
    )
    parser.add_argument("--large", type=int, nargs="*", metavar="REPLICAS", help=large_help)
    options = parser.parse_args()
    if options.price_per_hour < 0:
        parser.error(f"--price-per-hour {options.price_per_hour:g}: is 0 or more")
    if options.users is not None and options.users < 1:
        parser.error(f"--users {options.users}: is 1 or more")
    if options.combined:
        run_combined(options)
        return
    if options.large is not None:
        sizes = options.large or large.SIZES
        if not large.run(sizes, 20 if options.quick else 60, say=partial(print, flush=True)):
            sys.exit("the regret is too large")
        return
    if options.noisy:
        if not noisy.run(15 if options.quick else 60, say=partial(print, flush=True)):
            sys.exit("requests that wait at the router gain nothing")
        return
    if options.slo:
        times = 0.5 if options.quick else 1
        if not slo.run(times, options.seeds or 3, say=partial(print, flush=True)):
            sys.exit("forecasts are too far off, or an objective is missed more often by them")
        return
    if options.apart:
        seconds = apart.SECONDS / (2 if options.quick else 1)
        apart.run(seconds, options.seeds or 1, say=partial(print, flush=True))
        return
    cases = workloads(options.quick)
    seeds = options.seeds or (1 if options.quick else 3)
    print(f"{REPLICAS} replicas where nothing else is said, {seeds} seeds; times in s")
    found: dict[str, Found] = {}
    for name in options.workload or (QUICK if options.quick else cases):
        fewer = FEW if options.quick or name in SWEPT else ("cache_aware",)
        arms = options.arms or (ARMS if name in ALL_ARMS and not options.quick else fewer)
        found[name] = run(cases[name], [it for it in ARMS if it in (BASE, *OURS, *arms)], seeds)
    print("\nTargets, against round-robin with the same requests: wanted, found")
    reached = [*targets(cases, found)]
    for target in reached:
        print(target.row())
    if options.plot:
        plot(cases, found, options.plot)
    missed = sum(not target.met for target in reached)
    if missed and not options.quick:  # which is too short for such figures
        sys.exit(f"{missed} of {len(reached)} targets not met")


def run_combined(options: argparse.Namespace) -> None:
    seconds = combined.SECONDS / (2 if options.quick else 1)
    seeds = options.seeds or 1
    print(f"{REPLICAS} replicas of ${options.price_per_hour:g} an hour, {seeds} seeds; times in s")
    print("changes: against the baseline, with the same users")
    found = combined.run(
        *(options.size, options.users, seconds, seeds, options.price_per_hour),
        say=partial(print, flush=True),
    )
    if options.plot:
        combined.plot(found, options.plot)


if __name__ == "__main__":
    main()
