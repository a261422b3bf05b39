# SPDX-License-Identifier: Apache-2.0
"""The cost of a router in front of replicas: requests/s, CPU, latency and streams, as ratios.

All arms use the same two stub replicas (stub_replica.py):

- "direct": no router; one replica, or both for streams.
- vllm-router, with its cheapest policy and as many threads as it starts by default.
- Slipway's router with each strategy, in one process or in two ("x2").
- Slipway's router with a line in the log for each request ("+log"), and with all traces sent
  ("+traces") or one in 100 ("+sampled").

Rounds of load go to the arms in turn, so that other load on the machine affects all arms. Each
round's figure is compared with vllm-router's of the same round. The output has medians over the
rounds and, in brackets, quartiles. CPU is that of all the router's processes, in user and kernel.

Prompts belong to 64 conversations or documents, each with its session id, and end in a number that
never repeats. The prompts of "chat" are chats about code, with its escapes, and with tools. An
incomplete answer ends the benchmark. No process is pinned to CPUs. If load, replicas and router
share two cores, requests/s depend on all three, and CPU only on the router.

With --before, a checkout of another version is measured in the same rounds.

--caches compares the choices instead, beside vllm-router's cache_aware policy: on stand-in engines
with a prefix cache, in front of conversations with common system prompts (caches.py).
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop

from tests.support.harness import stub_replica
from tests.support.harness.closed_loop import Answer, ClosedLoop, Failed
from tests.support.harness.process import ROOT, ROUTE, Program, cpu_seconds
from tests.support.harness.stats import (
    cpu_ratio,
    paired,
    percentiles,
    print_changes,
    rate_ratio,
    spread,
)
from tools.bench.router import caches

DIRECT, PEER = "direct", "vllm-router"
STRATEGIES = (
    *("prefixaware", "prefixaware x2", "session", "roundrobin"),
    *("roundrobin +log", "roundrobin +traces", "roundrobin +sampled"),
)
PATH = "/v1/chat/completions"
CONVERSATIONS = 64
TARGETS = (1.5, 0.8, 0.3)
"""Requests/s and CPU for each streamed chunk ÷ vllm-router's, ms added to P50."""


class Workload(NamedTuple):
    """A closed loop. prompt: bytes of each; rate: tokens/s of each stream, 0 for whole answers;
    chat: whether prompts are chats about code, with tools.
    """

    title: str
    connections: int
    prompt: int
    rate: int = 0
    chat: bool = False

    @property
    def unit(self) -> str:
        return "token" if self.rate else "request"


SMALL = Workload("short prompts, concurrency 32", 32, 150)
ALONE = Workload("short prompts, one client", 1, 150)
STREAMS = Workload("64 streams of 50 tokens/s", 64, 150, rate=50)
FLOOD = Workload("256 streams of 200 tokens/s: 51,200 offered", 256, 150, rate=200)
LONG = Workload("prompts of 32 KB, concurrency 8", 8, 32_000)
CHAT = Workload("chats of 32 KB: 40 messages, code, tools; concurrency 8", 8, 32_000, chat=True)
LONGER = Workload("prompts of 256 KB, concurrency 8", 8, 256_000)
WORKLOADS = {
    "small": SMALL,
    "alone": ALONE,
    "streams": STREAMS,
    "flood": FLOOD,
    "32k": LONG,
    "chat": CHAT,
    "256k": LONGER,
}


class Round(NamedTuple):
    """One round of one arm. rate: of requests or tokens; cpu: seconds for each; memory: bytes."""

    rate: float
    cpu: float
    p50: float
    p99: float
    memory: int


Rounds = dict[str, list[Round]]
Arm = tuple[Sequence[int], Program | None]
"""Ports to load, and the router if there is one."""


NUMBER = "{number}"
"""Its place in a prompt."""


def words(first: str, size: int) -> dict[str, object]:
    """One message of about this number of bytes."""
    return {"messages": [{"role": "user", "content": f"{first}{'word ' * (size // 5)}{NUMBER}"}]}


def chat(first: str, size: int) -> dict[str, object]:
    """A chat about code of about this number of bytes, with tools."""
    line = '\tif name == "main" and path != "C:\\\\tmp":  # “quoted”\n\t\tprint(f"{name}\\n")\n'
    code = f"```python\n{line * (size // 40 // 110)}```\n"
    messages = [{"role": "system", "content": "You write code.\nUse the tools."}]
    for turn in range(19):
        asked = f'{first}Change part {turn} of "main.py":\n{code}'
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": f"It's done:\n{code}"})
    messages.append({"role": "user", "content": f"And now? {NUMBER}"})
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": f"tool{n}", "parameters": parameters}}
        for n in range(8)
    ]
    return {"messages": messages, "tools": tools}


class Load(ClosedLoop):
    """One round on some connections."""

    numbers = itertools.count()

    def __init__(self, workload: Workload, seconds: float) -> None:
        super().__init__()
        self.connections = workload.connections
        self.tokens = round(workload.rate * seconds)
        # A stream is as long as the round, so there is one for each connection.
        self.seconds = 0 if self.tokens else seconds
        self.whole = self.tokens + 1 if self.tokens else len(stub_replica.ANSWER[PATH])
        self.parts = [self.of(number, workload) for number in range(CONVERSATIONS)]
        self.asked, self.end = 0, 0.0

    def of(self, conversation: int, workload: Workload) -> tuple[bytes, bytes]:
        """The parts before and after the number at the end of a prompt."""
        prompt = chat if workload.chat else words
        body = {"model": "stub"} | prompt(f"{conversation:02} ", workload.prompt)
        body |= {"max_tokens": self.tokens or 64, "stream": bool(self.tokens)}
        begin, _, end = json.dumps(body, separators=(",", ":")).encode().partition(NUMBER.encode())
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"x-amzn-sagemaker-session-id: conversation-{conversation:02}\r\n"
            f"content-length: {len(begin) + 8 + len(end)}\r\n\r\n"
        )
        return head.encode() + begin, end

    def request(self) -> bytes | None:
        self.end = self.end or time.perf_counter() + self.seconds
        self.asked += 1
        if self.asked > self.connections and time.perf_counter() >= self.end:
            return None
        number = next(self.numbers)
        begin, end = self.parts[number % CONVERSATIONS]
        return b"%b%08d%b" % (begin, number, end)

    def check(self, answer: Answer) -> None:
        got, what = (answer.lines / 2, "events") if self.tokens else (answer.size, "bytes")
        if answer.status != 200 or got != self.whole:
            end = f"{what}: {answer.last[-300:]!r}"
            raise Failed(f"answer {answer.status} with {got:g} of {self.whole} {end}")

    async def run(self, ports: Sequence[int]) -> tuple[int, float]:
        """How many requests or tokens were answered, in how many seconds."""
        elapsed = await self.load(ports, self.connections, 60 + 4 * self.seconds)
        return len(self.times) * (self.tokens or 1), elapsed


def measured(
    workload: Workload, ports: Sequence[int], router: Program | None, seconds: float
) -> Round:
    async def run() -> tuple[int, float, list[float]]:
        load = Load(workload, seconds)
        return *await load.run(ports), load.times

    processes = [router.own, *router.children()] if router else []
    cpu = cpu_seconds(processes)
    count, elapsed, times = uvloop.run(run())
    cpu = cpu_seconds(processes) - cpu
    memory = sum(process.memory_info().rss for process in processes)
    return Round(count / elapsed, cpu / count, *percentiles(times), memory)


def compare(workload: Workload, options: argparse.Namespace) -> Rounds:
    """Start the replicas and every arm, and load the arms in turn."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def start(name: str, *command: str, root: Path = ROOT, **environ: str) -> Program:
            log = Path(folder, name.replace(" ", "-"))
            program = Program(*command, environ=environ, log=log, root=root)
            stack.enter_context(program).ready()
            return program

        stub = (sys.executable, stub_replica.__file__, f"--rate={workload.rate or 50}", "{port}")
        stubs = [start(name, *stub) for name in ("stub-1", "stub-2")]
        replicas = [it.url for it in stubs]
        direct = [it.port for it in stubs]
        arms: dict[str, Arm] = {DIRECT: (direct if workload.rate else direct[:1], None)}
        peer = caches.peer(options.vllm_router, replicas, "round_robin")
        routers = {PEER: start(PEER, *peer)}
        checkouts = {"": ROOT} | ({"before: ": options.before.resolve()} if options.before else {})
        for label, arm in itertools.product(checkouts, options.strategies):
            strategy, *more = arm.split()
            processes = next((it[1:] for it in more if it.startswith("x")), "1")
            routers[label + arm] = start(
                label + arm,
                *ROUTE,
                root=checkouts[label],
                OPTION_ROUTER_REPLICAS=",".join(replicas),
                OPTION_ROUTING_STRATEGY=strategy,
                OPTION_ROUTER_PROCESSES=processes,
                OPTION_ROUTER_ACCESS_LOG=str("+log" in more).lower(),
                **traced(more, replicas[0]),
            )
        arms |= {name: ([it.port], it) for name, it in routers.items()}

        rounds: Rounds = {arm: [] for arm in arms}
        for number in range(-1, options.rounds):  # the first warms up and is not counted
            # Every other round the other way about, so that none is always first.
            for arm in arms if number % 2 else reversed(arms):
                try:
                    one = measured(workload, *arms[arm], options.seconds)
                except (Failed, TimeoutError) as error:
                    sys.exit(f"{workload.title}, {arm}: {error or 'an answer never came'}")
                if number >= 0:
                    rounds[arm].append(one)
        return rounds


def traced(words: Sequence[str], collector: str) -> dict[str, str]:
    """Variables of an arm for its traces. words: of its name."""
    every = stub_replica.collects(collector)
    sampled = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
    if "+sampled" in words:
        return every | sampled
    return every if "+traces" in words else {}


def report(workload: Workload, rounds: Rounds) -> None:
    unit = workload.unit
    columns = [f"{unit}s/s", f"÷ {PEER}'s", f"CPU µs/{unit}", f"÷ {PEER}'s", "RSS MB"]
    if not workload.rate:
        columns += ["added P50 µs", "added P99 µs"]
    print(f"\n{workload.title}")
    print(f"{'':22}" + "".join(f"{column:>25}" for column in columns))
    for arm, all_of_it in rounds.items():
        cells = [
            spread([it.rate for it in all_of_it], ".0f"),
            spread(paired(rate_ratio, all_of_it, rounds[PEER]), ".2f"),
            spread([1e6 * it.cpu for it in all_of_it], ".1f"),
            spread(paired(cpu_ratio, all_of_it, rounds[PEER]), ".2f"),
            f"{max(it.memory for it in all_of_it) / 1e6:.0f}",
        ]
        if arm == DIRECT:  # no router, so neither its CPU nor its memory
            cells[2:] = ["-"] * 3
        if not workload.rate:
            for figure in (added_p50, added_p99):
                cells.append(
                    spread([1e6 * s for s in paired(figure, all_of_it, rounds[DIRECT])], ".0f")
                )
        print(f"{arm:22}" + "".join(f"{cell:>25}" for cell in cells), flush=True)
    print_changes(rounds)


def added_p50(it: Round, base: Round) -> float:
    return it.p50 - base.p50


def added_p99(it: Round, base: Round) -> float:
    return it.p99 - base.p99


def report_targets(found: dict[Workload, Rounds], strategies: Sequence[str]) -> None:
    print()
    for arm in strategies:
        figures = (
            (f"requests/s ÷ {PEER}'s", paired(rate_ratio, found[SMALL][arm], found[SMALL][PEER])),
            (
                f"CPU per streamed chunk ÷ {PEER}'s",
                paired(cpu_ratio, found[STREAMS][arm], found[STREAMS][PEER]),
            ),
            (
                "added P50 ms",
                [1e3 * s for s in paired(added_p50, found[ALONE][arm], found[ALONE][DIRECT])],
            ),
        )
        told = (
            f"{name}: {statistics.median(values):.2f} (target {target})"
            for (name, values), target in zip(figures, TARGETS, strict=True)
        )
        print(f"{arm}: {'; '.join(told)}")


def plot(found: dict[Workload, Rounds], file: Path) -> None:
    """Bars of requests/s and of CPU for each streamed chunk, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4))
    panels: tuple[tuple[Workload, str, str, Callable[[Round], float]], ...] = (
        (SMALL, "requests/s, concurrency 32", "%.0f", lambda it: it.rate),
        (STREAMS, "router's CPU µs for each streamed chunk", "%.1f", lambda it: 1e6 * it.cpu),
    )
    for place, (workload, title, form, value) in enumerate(panels, 1):
        arms = [arm for arm in found[workload] if not (workload.rate and arm == DIRECT)]
        values = [statistics.median(map(value, found[workload][arm])) for arm in arms]
        axes = figure.add_subplot(1, 2, place)
        axes.bar_label(axes.bar(arms, values), fmt=form)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-router", required=True, help="its command")
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES, help="ours to measure")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--caches", action="store_true", help="compare the choices, that alone")
    parser.add_argument("--rounds", type=int, help="2 or more (default: 9, or 5 with --caches)")
    seconds_help = "of load on one arm in a round (default: 4, or 24 with --caches)"
    parser.add_argument("--seconds", type=float, help=seconds_help)
    parser.add_argument("--before", type=Path, help="a checkout to measure as well")
    parser.add_argument("--plot", type=Path, help="a file for bars, like bars.png")
    options = parser.parse_args()
    options.rounds = options.rounds or (5 if options.caches else 9)
    options.seconds = options.seconds or (24 if options.caches else 4)
    if options.caches:
        caches.run(options.vllm_router, options.rounds, options.seconds)
        return
    print(
        f"{psutil.cpu_count()} CPUs; arms in turn: {', '.join((DIRECT, PEER, *options.strategies))}"
    )
    found = {}
    for name in options.workloads:
        workload = WORKLOADS[name]
        found[workload] = compare(workload, options)
        report(workload, found[workload])
    if {SMALL, ALONE, STREAMS} <= found.keys():
        report_targets(found, options.strategies)
    if options.plot and {SMALL, STREAMS} <= found.keys():
        plot(found, options.plot)


if __name__ == "__main__":
    main()
