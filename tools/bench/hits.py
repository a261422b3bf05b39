# SPDX-License-Identifier: Apache-2.0
"""The time of a hit in each KV cache tier, and its parts.

One server has the engine's prefix cache, memory and disk as tiers. The engine's own memory has room
for two documents and their questions. Documents are asked about in turn, so it has evicted each one
when its turn comes again. A round asks about new documents and about the same ones again:

- miss: the first request; its KV is stored
- prefix: directly after that, from the engine's own prefix cache, the best possible case
- l1: after the engine has evicted it, from the cache server's memory
- disk: after that memory was emptied, from disk

The server's counts of tokens show whether each answer came from the expected tier. A wrong tier is
a fault, and the exit code is 1. The output has medians over all documents, and ratios to `prefix`
in the same round. `waited` is the time in vLLM's queue. Its part `lookup` is the request to the
cache server, and its part `load` the transfer of the KV. `prefill` is the computation of the tokens
that were not found. The rest of TTFT is HTTP and tokenising. The server's log reports the time of
copying in loads and stores.

Several --chunk-sizes or --transfers start a server for each, asked in turn.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from lmi_config.plan.memory import GIB, kv_per_token
from lmi_config.plan.plan import Plan
from serving.server.prepare import prepare
from tests.support.harness import metrics
from tests.support.harness.process import SERVE, Program
from tests.support.models import default

KINDS = ("miss", "prefix", "l1", "disk")
TRANSFERS = ("auto", "engine_driven", "lmcache_driven")
"""Who copies KV, the engine or the cache server: LMCache's modes."""
ENGINE = 2
"""Documents that the engine's own memory holds."""
SPARE = 1.5
"""Size of a tier, as a multiple of the documents: eviction begins at 80%."""
COUNTED_S = 3
"""The cache server's counts are as old as that."""
SUMS = {
    "lookup": "vllm:lmcache_mp_lookup_duration_seconds_sum",
    "waited": "vllm:request_queue_time_seconds_sum",
    "prefill": "vllm:request_prefill_time_seconds_sum",
    "computed": "vllm:request_prefill_kv_computed_tokens_sum",
    "engine's": "vllm:prefix_cache_hits_total",
    "tiers'": "vllm:external_prefix_cache_hits_total",
}
"""vLLM's series of seconds and tokens that grow with one request."""
COPIED = re.compile(r"Retrieved \d+ tokens in ([\d.]+) seconds")
STORED = re.compile(r"Stored \d+ tokens in ([\d.]+) seconds")
"""In the cache server's log: from its answer where the KV is, or will be, until it was copied."""


@dataclass(frozen=True)
class Asked:
    """One request. took: by the names of SUMS."""

    kind: str
    document: int
    ttft: float
    took: dict[str, float]


class Server:
    """A server with tiers and its answers. chunk: tokens; None for Slipway's own choice.
    transfer: of TRANSFERS.
    """

    def __init__(
        self, program: Program, chunk: int | None, length: int, transfer: str = "auto"
    ) -> None:
        self.chunk = chunk
        self.transfer = transfer
        self.asked: list[Asked] = []
        self.faults: list[str] = []
        self._program = program
        self._length = length
        self._client = httpx.Client(base_url=program.url, timeout=600)

    def ask(self, kind: str, document: int) -> None:
        before = self._sums()
        prompt = f"{document}: " + " hi" * self._length
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
        began = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            lines = answer.iter_lines()
            next(lines)
            ttft = time.perf_counter() - began
            for _ in lines:
                pass
        while (after := self._sums())["prefill"] == before["prefill"]:
            time.sleep(0.01)
        took = {name: after[name] - before[name] for name in SUMS}
        self.asked.append(Asked(kind, document, ttft, took))
        expected = {"prefix": "engine's", "l1": "tiers'", "disk": "tiers'"}.get(kind)
        found = {name for name in ("engine's", "tiers'") if took[name]}
        if found != ({expected} if expected else set()):
            where = " and ".join(sorted(found)) or "nowhere"
            self.faults.append(f"{self.name}: document {document}, {kind}: it came from {where}")

    def forget(self) -> None:
        """Empty the cache server's memory. Pending writes to the disk finish first."""
        time.sleep(COUNTED_S)
        (process,) = self._program.children("kv_cache.lmcache")
        port = next(it for it in process.cmdline() if it.startswith("--http-port=")).split("=")[1]
        cleared = httpx.post(f"http://127.0.0.1:{port}/cache/clear", json={"tier": "l1"})
        cleared.raise_for_status()

    def logged(self, pattern: re.Pattern[str]) -> list[float]:
        return [float(match[1]) for match in pattern.finditer(self._program.logged())]

    @property
    def name(self) -> str:
        told = [f"chunks of {self.chunk}"] if self.chunk else []
        told += [self.transfer] if self.transfer != "auto" else []
        return ", ".join(told) or "as planned"

    def _sums(self) -> dict[str, float]:
        counted = self._client.get("/metrics").text
        return {name: metrics.total(counted, series) for name, series in SUMS.items()}


def environment(
    plan: Plan, options: argparse.Namespace, chunk: int | None, folder: Path
) -> dict[str, str]:
    """A server's options. Exits where the model cannot be used for it."""
    each = kv_per_token(plan.settings, plan.model)
    if not each:
        sys.exit("the model's files do not tell how large its KV is; take another model")
    document = (options.length + 256) * each
    kept = SPARE * options.documents * (options.rounds + 1) * document
    config: dict[str, object] = {
        "max_local_cpu_size": kept / GIB,
        "local_disk": str(folder / "kv"),
        "max_local_disk_size": kept / GIB,
        "extra_config": {"use_odirect": True},
    }
    if chunk:
        config["chunk_size"] = chunk
    file = folder / "lmcache.yaml"
    file.write_text(json.dumps(config))  # which is also YAML
    return {
        "OPTION_KV_CACHE_MEMORY_BYTES": str(round(ENGINE * document)),
        "OPTION_LMCACHE_CONFIG_FILE": str(file),
        "OPTION_MAX_MODEL_LEN": str(options.length + 256),
    }


def rounds(servers: Sequence[Server], options: argparse.Namespace) -> Iterator[str]:
    """Ask all there is to ask. Yields after each round what to tell."""
    for number in range(-1, options.rounds):  # the first warms up, and is not counted
        documents = range(number * options.documents, (number + 1) * options.documents)
        for kind in ("miss", "l1", "disk"):
            for server in servers:
                if kind == "disk":
                    server.forget()
                for document in documents:
                    server.ask(kind, document)
                    if kind != "disk":
                        server.ask("prefix", document)
        if number < 0:
            for server in servers:
                server.asked.clear()
                server.faults.clear()
        yield f"round {number + 1} of {options.rounds}"


COLUMNS = ("", "TTFT ms", "÷ prefix", "waited", "lookup", "load", "prefill", "rest", "computed")


def rows(server: Server) -> Iterator[list[str]]:
    """A table of medians: a kind's row, times in milliseconds and tokens."""
    best = statistics.median(it.ttft for it in server.asked if it.kind == "prefix")
    for kind in KINDS:
        asked = [it for it in server.asked if it.kind == kind]
        took = {name: statistics.median(it.took[name] for it in asked) for name in SUMS}
        ttft = statistics.median(it.ttft for it in asked)
        loads = statistics.median(it.took["waited"] - it.took["lookup"] for it in asked)
        rest = statistics.median(it.ttft - it.took["waited"] - it.took["prefill"] for it in asked)
        times = (took["waited"], took["lookup"], loads, took["prefill"], rest)
        yield [
            *(kind, f"{1e3 * ttft:.0f}", f"{ttft / best:.2f}"),
            *(f"{1e3 * it:.1f}" for it in times),
            f"{took['computed']:.0f}",
        ]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or hub id; default: SmolLM2-135M")
    parser.add_argument("--length", type=int, default=1500, help="tokens of a document, about")
    parser.add_argument("--documents", type=int, default=5, help="of a round; at least 3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk-sizes", type=int, nargs="+", help="tokens; default: as planned")
    parser.add_argument(
        "--transfers", nargs="+", choices=TRANSFERS, default=["auto"], help="who copies KV"
    )
    parser.add_argument("--disk", type=Path, default=tempfile.gettempdir(), help="a folder on it")
    parser.add_argument("--logs", type=Path, help="a folder to keep the servers' logs in")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.documents <= ENGINE:
        sys.exit(f"--documents {options.documents}: the engine would still have them; at least 3")
    environ = {
        "OPTION_MODEL_ID": options.model or str(default.make()),
        "OPTION_KV_DISK_PATH": str(options.disk),
    }
    plan = prepare({**os.environ, **environ}).plan
    with ExitStack() as stack:
        servers = []
        for chunk, transfer in itertools.product(options.chunk_sizes or [None], options.transfers):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
            logs = options.logs or folder
            logs.mkdir(parents=True, exist_ok=True)
            asked = environ | environment(plan, options, chunk, folder)
            asked["LMCACHE_MP_TRANSFER_MODE"] = transfer
            log = logs / f"{chunk or 'planned'}-{transfer}.log"
            program = stack.enter_context(Program(*SERVE, environ=asked, log=log))
            program.ready()
            servers.append(Server(program, chunk, options.length, transfer))
        for told in rounds(servers, options):
            print(told, file=sys.stderr, flush=True)
        for server in servers:
            asked_ = len(server.asked)
            print(f"\n{server.name}: {asked_} answers about documents of {options.length:,} tokens")
            for row in [COLUMNS, *rows(server)]:
                print("".join(f"{cell:>10}" for cell in row))
            for name, pattern in (("copying", COPIED), ("storing", STORED)):
                if seconds := server.logged(pattern):
                    print(
                        f"{name}: {1e3 * statistics.median(seconds):.0f} ms, {len(seconds)} times"
                    )
    if faults := [fault for server in servers for fault in server.faults]:
        sys.exit("\n".join([f"{len(faults)} faults, among them:", *faults[:10]]))


if __name__ == "__main__":
    main()
