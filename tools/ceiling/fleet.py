# SPDX-License-Identifier: Apache-2.0
"""The cost of a large fleet at the router: each choice, an idle second, and memory.

Choices are timed in this process, with the router's own pool, policy and index, in turn for all
sizes; printed is the fastest of all rounds. Prompts have 32 KB, and some replicas have seen them.
The idle router is a separate process. A single stub replica stands for all of its replicas: it
listens on all addresses, so that 127.0.0.1, 127.0.0.2 and so on are as many.

The benchmark fails if a choice of prefixaware among the most replicas takes more than twice as long
as among the fewest, or if an idle router needs more than 5% of a core.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx

from serving.router.fleet.replicas import ReplicaPool, State
from serving.router.policy.policies import Policy, PrefixAware, Session
from serving.router.policy.prefix_index import PrefixIndex, chain
from serving.router.policy.routing_request import RoutingRequest
from serving.router.policy.tiers import Capacity
from tests.support.harness import stub_replica
from tests.support.harness.metrics import total
from tests.support.harness.process import ROUTE, Program, cpu_seconds
from tests.support.harness.wait import until

MOST_RATIO, MOST_IDLE = 2.0, 0.05
PROMPTS, BYTES, KNOWN = 64, 32_000, 3
"""Prompts, how long each is, and replicas that have it at first."""
CHOICES = 500
"""The choices of one round."""


class Arm(NamedTuple):
    """A strategy, and the adapter and session of its requests."""

    title: str
    policy: Callable[[], Policy]
    adapter: str = ""
    session: str = ""


ARMS = (
    Arm("prefixaware", lambda: PrefixAware(PrefixIndex())),
    Arm("with an adapter", lambda: PrefixAware(PrefixIndex()), adapter="adapter"),
    Arm("session", Session, session="session"),
)


def address(number: int, port: int) -> str:
    """The address of a replica. One program stands for all replicas."""
    number += 1
    return f"http://127.0.{number // 250}.{number % 250 + 1}:{port}"


class Choosing:
    """A fleet of one size, and a policy that chooses among it."""

    def __init__(self, arm: Arm, replicas: int) -> None:
        self.pool = ReplicaPool(lambda replica, anew: None, lambda replica: None)
        self.pool.update(frozenset(address(number, 80) for number in range(replicas)))
        self.policy = arm.policy()
        for replica in self.pool.replicas:
            self.pool.enter(replica, State.READY, "", anew=False)
            if isinstance(self.policy, PrefixAware):
                self.policy.index.resize(replica.name, Capacity(engine=500_000))
        draw = random.Random(0)
        self.requests = []
        for number in range(PROMPTS):
            text = b"%04d" % number * (BYTES // 4)
            request = RoutingRequest(
                tokens=BYTES // 4,
                chain=chain(text, arm.adapter),
                adapter=arm.adapter and f"{arm.adapter}{number}",
                session=arm.session and f"{arm.session}{number}",
                streamed=True,
            )
            self.requests.append(request)
            for replica in draw.choices(self.pool.replicas, k=KNOWN):
                self.policy.learn(request, replica.name, 0.0)
        self.now = 1.0

    def round(self) -> float:
        """Seconds of CPU for one choice with its bookkeeping."""
        began = time.process_time()
        for number in range(CHOICES):
            self.now += 0.001
            request = self.requests[number % PROMPTS]
            candidates = self.pool.candidates("", "", (), self.now)
            choice = self.policy.choose(request, candidates, self.now)
            work = choice.replica.begin(request.tokens, choice.held, True, self.now)
            self.policy.learn(request, choice.replica.name, self.now)
            if number % 8:  # the others stay under way for a while
                choice.replica.end(work)
            else:
                choice.replica.computed(work)
        for replica in self.pool.replicas:
            replica.in_flight = replica.context = 0
        return (time.process_time() - began) / CHOICES


def idle(replicas: int, seconds: float) -> tuple[float, int]:
    """Cores that an idle router takes, and its memory in bytes."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def start(*command: str, **environ: str) -> Program:
            program = Program(*command, environ=environ, log=Path(folder, Path(command[0]).name))
            stack.enter_context(program).ready()
            return program

        stub = start(sys.executable, stub_replica.__file__, "--host=0.0.0.0", "{port}")
        urls = [address(number, stub.port) for number in range(replicas)]
        file = Path(folder, "replicas")
        file.write_text("\n".join(urls))
        router = start(*ROUTE, OPTION_ROUTER_REPLICAS=file.as_uri())

        def all_ready() -> bool:
            series = httpx.get(f"{router.url}/metrics", timeout=30).text
            return total(series, "slipway_router_replica_ready") == replicas

        until(all_ready, 120)
        time.sleep(5)  # for what it does once
        processes = [router.own, *router.children()]
        before, began = cpu_seconds(processes), time.monotonic()
        time.sleep(seconds)
        cores = (cpu_seconds(processes) - before) / (time.monotonic() - began)
        return cores, sum(it.memory_info().rss for it in processes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=60, help="of idling, 0 for none")
    options = parser.parse_args()
    failed = []
    print(f"us of CPU for a choice among {', '.join(map(str, options.replicas))} replicas")
    for arm in ARMS:
        fleets = [Choosing(arm, replicas) for replicas in options.replicas]
        rounds = [[it.round() for it in fleets] for _ in range(options.rounds)]
        best = [min(times) for times in zip(*rounds, strict=True)]
        ratio = best[-1] / best[0]
        figures = "".join(f"{1e6 * it:8.1f}" for it in best)
        print(f"{arm.title:20}{figures}   last : first {ratio:.2f}", flush=True)
        if arm is ARMS[0] and ratio > MOST_RATIO:
            failed.append(f"a choice takes {ratio:.2f} times as long; the limit is {MOST_RATIO:g}")
    for replicas in options.replicas if options.seconds else ():
        cores, memory = idle(replicas, options.seconds)
        found = f"idle with {replicas:,} replicas: {cores:.1%} of a core"
        print(f"{found}, {memory / 1e6:.0f} MB", flush=True)
        if cores > MOST_IDLE:
            failed.append(f"{found}; the limit is {MOST_IDLE:.0%}")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
