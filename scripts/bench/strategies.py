# SPDX-License-Identifier: Apache-2.0
"""What each routing strategy finds in the KV caches of three real engines.

Three servers with a tiny model, each with room for a third of what is asked in its KV cache, and
for every strategy in turn a router in front of them. Chats of several turns, which begin with a
system prompt that all share, and questions about documents, in random order. Every strategy and
round gets texts of its own, so that nobody finds what another has left. The figures are vLLM's
counters (vllm:prefix_cache_hits ÷ vllm:prefix_cache_queries). Times on a machine whose cores the
engines share say little, and are not shown; scripts/dev simulate has those.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp

from scripts.harness import metrics, ports
from scripts.harness.process import ROUTE, SERVE, Program
from scripts.models import tiny

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
    """Chats and questions through the router, and what the engines counted of them."""
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


def engine(log: Path, kv_bytes: str) -> Program:
    environ = {
        "OPTION_MODEL_ID": str(tiny.make()),
        "OPTION_MAX_MODEL_LEN": "4096",
        "OPTION_KV_CACHE_MEMORY_BYTES": kv_bytes,
        "OPTION_KV_EVENTS": "true",
        "OPTION_KV_EVENTS_PORT": str(ports.free(2)),
    }
    return Program(*SERVE, environ=environ, log=log)


@contextmanager
def routed(folder: Path, strategy: str, engines: Sequence[Program]) -> Iterator[Program]:
    options = {
        "OPTION_MODEL_ID": str(tiny.make()),
        "OPTION_ROUTER_REPLICAS": ",".join(it.url for it in engines),
        "OPTION_ROUTING_STRATEGY": strategy,
    }
    with Program(*ROUTE, environ=options, log=folder / strategy) as router:
        router.ready()
        time.sleep(5 if strategy == "kvaware" else 1)  # its tokenizer, all replicas
        yield router


def report(found: dict[str, list[Figures]]) -> None:
    print("| strategy | prompt tokens cached | busiest replica ÷ mean |\n|---|---|---|")
    for strategy, figures in found.items():
        hits = statistics.median(it.hits for it in figures)
        hot = statistics.median(it.hot for it in figures)
        spread = ", ".join(f"{it.hits:.2f}" for it in figures)
        print(f"| {strategy} | {hits:.2f} ({spread}) | {hot:.2f} |")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", type=int, default=12)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--kv", default="20M", help="of each engine's KV cache")
    options = parser.parse_args(arguments)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    found: dict[str, list[Figures]] = {strategy: [] for strategy in STRATEGIES}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        engines = [engine(folder / f"engine-{n}", options.kv) for n in range(REPLICAS)]
        for it in engines:
            stack.enter_context(it).ready()
        for n in range(options.rounds):
            for strategy in STRATEGIES:
                with routed(folder, strategy, engines) as router:
                    name = f"{n} {strategy}"
                    load_ = load(name, engines, router, options.chats, options.documents)
                    found[strategy].append(asyncio.run(load_))
    report(found)


if __name__ == "__main__":
    main(sys.argv[1:])
