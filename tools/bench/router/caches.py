# SPDX-License-Identifier: Apache-2.0
"""Routing to prefix caches: Slipway's router beside vllm-router's cache_aware policy.

Conversations begin with one of a few system prompts, by Zipf's law. Each turn has the turns before
it, and comes a pause after the last answer. One-shot prompts have nothing in common with any other.
Each round has another seed. In a round all arms get the same conversations at the same times, each
with replicas and a router that have just been started. The replicas are stand-ins with a prefix
cache (caching_replica.py). No request has a session id.

"Computed again" are prompt tokens that an answered request had at its beginning as well, with all
before them, and that the replica had to compute; as a share of all prompt tokens. CPU is that of
the router's processes. "Renders" are the requests for a chat's tokens that the router sends to the
replicas before it chooses one. The first third of a round only fills caches, except for CPU and
renders. An answer that fails ends the benchmark.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, cast

import aiohttp
import httpx
import uvloop

from tests.support.harness import ports
from tests.support.harness.metrics import total
from tests.support.harness.process import ROOT, ROUTE, Program, cpu_seconds
from tests.support.harness.stats import spread
from tools.bench.agents.sessions import known_first
from tools.bench.endpoint import ask
from tools.bench.router.caching_replica import TOKEN, links_of, text_of
from tools.routing_sim.model import BLOCK

REPLICAS = 4
RATE, ONE_SHOTS = 60.0, 0.2
"""Requests/s, and the share of one-shot prompts."""
TURNS, PAUSE_S, OUTPUT = 5, 1.0, 40
SYSTEMS = 8
SYSTEM, FIRST, NEXT, ONE_SHOT = 1000, 500, 150, 1500
"""Tokens of a system prompt, of the first message, of later ones, and of a one-shot prompt."""
WARM_UP = 1 / 3
ARMS = {"prefixaware": "", "cache_aware": "cache_aware", "round_robin": "round_robin"}
"""Arm → vllm-router's policy, or "" for Slipway's router."""


class Conversation(NamedTuple):
    """at: seconds after the begin. asked: what the user says. pauses: seconds before each turn."""

    at: float
    system: str
    asked: Sequence[str]
    pauses: Sequence[float]


class Sent(NamedTuple):
    """An answered request. first: seconds to the first token. prompt, cached, again: tokens."""

    at: float
    first: float
    prompt: int
    cached: int
    again: int


class Figures(NamedTuple):
    """One round of one arm. cpu: seconds for a request. renders: for a request."""

    hits: float
    again: float
    p50: float
    p90: float
    cpu: float
    renders: float


def conversations(seed: int, seconds: float) -> list[Conversation]:
    rng = random.Random(seed)

    def text(tokens: float) -> str:
        return rng.randbytes(max(2 * round(tokens), 2)).hex()

    def about(tokens: float) -> str:
        return text(tokens * rng.lognormvariate(0.0, 0.5))

    systems = [text(SYSTEM) for _ in range(SYSTEMS)]
    weights = [1 / (rank + 1) for rank in range(SYSTEMS)]
    found = []
    for share, turns in ((1 - ONE_SHOTS, TURNS), (ONE_SHOTS, 1)):
        at = 0.0
        while (at := at + rng.expovariate(RATE * share / turns)) < seconds:
            if turns == 1:
                found.append(Conversation(at, "", [about(ONE_SHOT)], [0.0]))
                continue
            system = rng.choices(systems, weights)[0]
            asked = [about(FIRST if not turn else NEXT) for turn in range(turns)]
            pauses = [rng.expovariate(1 / PAUSE_S) if turn else 0.0 for turn in range(turns)]
            found.append(Conversation(at, system, asked, pauses))
    return sorted(found)


class Load:
    """One round of one arm."""

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds
        self._known: set[int] = set()
        self.sent: list[Sent] = []

    async def run(self, every: Sequence[Conversation]) -> None:
        """Raises ExceptionGroup if an answer fails."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"content-type": "application/json"}
        async with (
            aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            self._began = time.monotonic()
            for it in every:
                group.create_task(self._converse(session, it))

    async def _converse(self, session: aiohttp.ClientSession, it: Conversation) -> None:
        await asyncio.sleep(self._began + it.at - time.monotonic())
        messages = [{"role": "system", "content": it.system}] if it.system else []
        for asked, pause in zip(it.asked, it.pauses, strict=True):
            await asyncio.sleep(pause)
            if time.monotonic() > self._began + self._seconds:
                return
            messages.append({"role": "user", "content": asked})
            await self._ask(session, messages)
            messages.append({"role": "assistant", "content": TOKEN * OUTPUT})

    async def _ask(
        self, session: aiohttp.ClientSession, messages: Sequence[dict[str, str]]
    ) -> None:
        body = {"model": "stub", "messages": messages, "max_tokens": OUTPUT, "stream": True}
        links = links_of(text_of(messages, OUTPUT))
        known = known_first(links, self._known) * BLOCK
        at = time.monotonic()
        answer = await ask(session, self._url, json.dumps(body).encode())
        self._known.update(links)
        prompt = cast(int, answer.usage["prompt_tokens"])
        details = cast(dict[str, int], answer.usage["prompt_tokens_details"])
        cached = details["cached_tokens"]
        again = max(min(known, prompt) - cached, 0)
        self.sent.append(Sent(at - self._began, answer.times[0] - at, prompt, cached, again))


def peer(program: str, replicas: Sequence[str], policy: str) -> list[str]:
    """The command of vllm-router in front of these replicas."""
    command = [program, "--worker-urls", *replicas, "--policy", policy, "--host", "127.0.0.1"]
    command += ["--port", "{port}", "--log-level", "error"]
    return [*command, "--prometheus-port", str(ports.free())]


def measured(policy: str, program: str, every: Sequence[Conversation], seconds: float) -> Figures:
    """One round of one arm. Raises ExceptionGroup."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def start(name: str, *command: str, **environ: str) -> Program:
            it = Program(*command, environ=environ, log=Path(folder, name), root=ROOT)
            return stack.enter_context(it)

        stand_in = (sys.executable, "-m", "tools.bench.router.caching_replica", "{port}")
        replicas = [start(f"replica{n}", *stand_in, PYTHONPATH=str(ROOT)) for n in range(REPLICAS)]
        for it in replicas:
            it.ready()
        urls = [it.url for it in replicas]
        if policy:
            router = start("router", *peer(program, urls, policy))
        else:
            router = start("router", *ROUTE, OPTION_ROUTER_REPLICAS=",".join(urls))
        router.ready()
        load = Load(router.url, seconds)
        processes = [router.own, *router.children()]
        before = cpu_seconds(processes)
        uvloop.run(load.run(every))
        cpu = cpu_seconds(processes) - before
        renders = sum(total(httpx.get(f"{it}/metrics").text, "stub_renders_total") for it in urls)
    counted = [it for it in load.sent if it.at >= WARM_UP * seconds]
    prompt = sum(it.prompt for it in counted)
    tenths = statistics.quantiles([it.first for it in counted], n=10)
    return Figures(
        sum(it.cached for it in counted) / prompt,
        sum(it.again for it in counted) / prompt,
        tenths[4],
        tenths[8],
        cpu / len(load.sent),
        renders / len(load.sent),
    )


COLUMNS: Sequence[tuple[str, Callable[[Figures], float], str]] = (
    ("hits", lambda it: it.hits, ".3f"),
    ("computed again", lambda it: it.again, ".3f"),
    ("first token P50 ms", lambda it: 1e3 * it.p50, ".0f"),
    ("P90 ms", lambda it: 1e3 * it.p90, ".0f"),
    ("CPU µs/request", lambda it: 1e6 * it.cpu, ".0f"),
    ("renders/request", lambda it: it.renders, ".1f"),
)


def run(program: str, rounds: int, seconds: float) -> None:
    """Compare all arms in turn, and print a table with medians and quartiles of the rounds."""
    found: dict[str, list[Figures]] = {arm: [] for arm in ARMS}
    for number in range(rounds):
        every = conversations(number, seconds)
        # Every other round the other way about, so that none is always first.
        for arm in ARMS if number % 2 else reversed(ARMS):
            found[arm].append(measured(ARMS[arm], program, every, seconds))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("| | " + " | ".join(title for title, _, _ in COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for arm, figures in found.items():
        cells = [spread([of(it) for it in figures], form) for _, of, form in COLUMNS]
        print(f"| `{arm}` | " + " | ".join(cells) + " |")
    ours, *theirs = ARMS
    for other in theirs:
        pairs = [*zip(found[ours], found[other], strict=True)]
        ratios = [
            f"{title} {spread([of(one) / of(base) for one, base in pairs], '.2f')}"
            for title, of, _ in COLUMNS[2:5]
        ]
        print(f"{ours} ÷ {other}: {', '.join(ratios)}")
