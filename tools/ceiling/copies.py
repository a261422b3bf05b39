# SPDX-License-Identifier: Apache-2.0
"""Two copies of the model in one container beside one server, and one cache server under several
copies.

First, engines without a model (tools/ceiling/engine.py) with 4 sequences and 20 ms for a step, so
that the engine is the bound. Rounds of load go to the two in turn, and each round's figures are set
against those of the one server in the same round; printed are medians and, in brackets, quartiles.
CPU is that of all processes but engines: the serving process of one server, or the supervisor, the
router and the copies. Then clients ask questions about documents. Printed is the share of the
documents' tokens that was computed although a cache could have had them.

Last, real engines with a tiny model, whose own cache is off, load prompts from the memory of their
cache server (L1): chunks and bytes in a second, for each number of copies that this machine has
CPUs for.
"""

import argparse
import asyncio
import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httpx
import psutil

from tests.support.harness import metrics
from tests.support.harness.process import ROOT, SERVE, Program, cpu_seconds
from tests.support.harness.stats import cpu_ratio, paired, rate_ratio, spread
from tests.support.harness.wait import until
from tests.support.models import tiny

PATH = "/v1/completions"
SLOTS, TOKENS = 4, 16
CONNECTIONS = 24
"""More than all slots, so that each engine has requests that wait."""
DOCUMENTS, ASKED, DOCUMENT_WORDS = 16, 6, 350
PROMPTS, PROMPT_WORDS, CLIENTS = 6, 600, 8
RATE_RATIO, CPU_RATIO, AGAIN = 1.9, 1.25, 0.1
"""Targets: requests/s and CPU ÷ one server's, and the share that is computed again."""


class Round(NamedTuple):
    """rate: requests a second; cpu: seconds for each."""

    rate: float
    cpu: float


def words(seed: object, count: int) -> str:
    drawn = random.Random(str(seed))
    return " ".join(f"word{drawn.randrange(1000)}" for _ in range(count))


def body(prompt: str, tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def asked(
    server: Program, bodies: Iterable[dict[str, Any]], connections: int
) -> list[dict[str, Any]]:
    """The usage of each answer, in the order of the bodies. Raises aiohttp.ClientError."""
    found: dict[int, dict[str, Any]] = {}
    left = enumerate(bodies)
    async with aiohttp.ClientSession(server.url, raise_for_status=True) as session:

        async def client() -> None:
            for number, it in left:
                async with session.post(PATH, json=it) as answer:
                    found[number] = (await answer.json())["usage"]

        async with asyncio.TaskGroup() as tasks:
            for _ in range(connections):
                tasks.create_task(client())
    return [found[number] for number in sorted(found)]


def processes(server: Program) -> list[psutil.Process]:
    """All that serve, but engines."""
    return [server.own, *server.children("serving.copies")]


def bounded(server: Program, requests: int, numbers: "itertools.count[int]") -> Round:
    """Requests that all differ."""
    bodies = [body(f"{next(numbers)} {words('short', 12)}", TOKENS) for _ in range(requests)]
    before, began = cpu_seconds(processes(server)), time.perf_counter()
    asyncio.run(asked(server, bodies, CONNECTIONS))
    elapsed = time.perf_counter() - began
    return Round(requests / elapsed, (cpu_seconds(processes(server)) - before) / requests)


def computed_again(server: Program, seed: int) -> float:
    """The share of documents' tokens that was computed again. A cache could have had as many as it
    ever had of the same document.
    """
    order = [n for n in range(DOCUMENTS) for _ in range(ASKED)]
    random.Random(seed).shuffle(order)
    texts = [words(f"{seed} {n}", DOCUMENT_WORDS) for n in range(DOCUMENTS)]
    bodies = [body(f"{texts[n]} question {place}", 4) for place, n in enumerate(order)]
    usages = asyncio.run(asked(server, bodies, 2 * SLOTS))
    cached: dict[int, list[int]] = {}
    for n, usage in zip(order, usages, strict=True):
        details = usage.get("prompt_tokens_details") or {}
        cached.setdefault(n, []).append(details.get("cached_tokens") or 0)
    could = sum(max(it) * (ASKED - 1) for it in cached.values())
    return 1 - sum(sum(it) - min(it) for it in cached.values()) / could


def doubles(folder: Path, options: argparse.Namespace) -> None:
    """Engines without a model."""
    environ = {
        "OPTION_MODEL_ID": str(tiny.make()),
        "OPTION_MAX_MODEL_LEN": "4096",
        "OPTION_MAX_NUM_SEQS": str(SLOTS),
        "OPTION_KV_CACHE_MEMORY_BYTES": "256M",
        "OPTION_LOG_LEVEL": "warning",
        "OPTION_DISTRIBUTED_EXECUTOR_BACKEND": "tools.ceiling.engine.NoModel",
        "PYTHONPATH": str(ROOT),
    }
    numbers = itertools.count()
    with ExitStack() as stack:
        found = {}
        for copies in (1, 2):
            log = folder / f"double-{copies}"
            server = Program(*SERVE, environ=environ | {"OPTION_COPIES": str(copies)}, log=log)
            found[copies] = stack.enter_context(server)
        for server in found.values():
            server.ready()
        rounds: dict[int, list[Round]] = {1: [], 2: []}
        for number in range(-1, options.rounds):  # the first warms up and is not counted
            for copies in (1, 2) if number % 2 else (2, 1):
                one = bounded(found[copies], options.requests * copies, numbers)
                if number >= 0:
                    rounds[copies].append(one)
        print(f"\n{SLOTS} sequences of {TOKENS} tokens in each engine, {CONNECTIONS} connections")
        for copies, row in rounds.items():
            rates = spread([it.rate for it in row], ".1f")
            cpus = spread([1e6 * it.cpu for it in row], ".0f")
            print(f"{copies}: requests/s {rates}; CPU µs/request {cpus}", flush=True)
        rate = spread(paired(rate_ratio, rounds[2], rounds[1]), ".2f")
        cpu = spread(paired(cpu_ratio, rounds[2], rounds[1]), ".2f")
        print(f"requests/s of two copies ÷ one: {rate} (target {RATE_RATIO})")
        print(f"CPU for a request ÷ one: {cpu} (target at most {CPU_RATIO})")
        for copies, server in found.items():
            again = [computed_again(server, seed) for seed in range(options.rounds)]
            print(f"{copies}: {DOCUMENTS} documents, {ASKED} times each: computed again "
                  f"{spread(again, '.1%')} (target at most {AGAIN:.0%})", flush=True)  # fmt: skip


def cache_server(folder: Path, copies: int, seconds: float) -> None:
    """Real engines, one cache server."""
    environ = {
        "OPTION_MODEL_ID": str(tiny.make()),
        "OPTION_COPIES": str(copies),
        "OPTION_DTYPE": "float32",
        "OPTION_MAX_MODEL_LEN": "4096",
        "OPTION_KV_CACHE_MEMORY_BYTES": "128M",
        "OPTION_ENABLE_PREFIX_CACHING": "false",
        "OPTION_LMCACHE_AUTO_CONFIG": "true",
        "OPTION_KV_L1_SIZE": "512M",
        "OPTION_KV_DISK_SIZE": "0",
        "OPTION_LOG_LEVEL": "warning",
    }
    with Program(*SERVE, environ=environ, log=folder / f"cache-{copies}") as server:
        server.ready()
        bodies = [body(words(n, PROMPT_WORDS), 1) for n in range(PROMPTS)]
        until(lambda: _all_cached(server, bodies), 120, every=1)
        before, began = _l1(server), time.monotonic()

        def again() -> Iterable[dict[str, Any]]:
            while time.monotonic() < began + seconds:
                yield from bodies

        answered = len(asyncio.run(asked(server, again(), CLIENTS)))
        elapsed = time.monotonic() - began
        chunks = _l1(server) - before
        stored = _total(server, "lmcache_mp_l1_write_chunks_total")
        size = _total(server, "lmcache_mp_l1_memory_usage_bytes") / stored
        figures = f"chunks/s {chunks / elapsed:.0f}; MB/s {chunks * size / elapsed / 1e6:.1f}"
        print(f"{copies}: requests/s {answered / elapsed:.1f}; {figures}", flush=True)


def _all_cached(server: Program, bodies: Sequence[dict[str, Any]]) -> bool:
    """Whether each prompt comes from the tiers, whichever copy is asked."""
    usages = asyncio.run(asked(server, [*bodies, *bodies], CLIENTS))
    return all((it.get("prompt_tokens_details") or {}).get("cached_tokens") for it in usages)


def _l1(server: Program) -> float:
    return _total(server, "lmcache_mp_l1_read_chunks_total")


def _total(server: Program, name: str) -> float:
    return metrics.total(httpx.get(f"{server.url}/metrics", timeout=30).text, name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="2 or more")
    parser.add_argument("--requests", type=int, default=150, help="of a round, for each copy")
    parser.add_argument("--seconds", type=float, default=15, help="of load on the cache server")
    parts = ("doubles", "cache")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    cpus = len(os.sched_getaffinity(0))
    print(f"{cpus} CPUs")
    with tempfile.TemporaryDirectory() as folder:
        if "doubles" in options.parts:
            doubles(Path(folder), options)
        if "cache" in options.parts:
            print(f"\n{PROMPTS} prompts from L1, {CLIENTS} clients")
            for copies in (1, 2, 4):
                if copies <= cpus:
                    cache_server(Path(folder), copies, options.seconds)


if __name__ == "__main__":
    main()
