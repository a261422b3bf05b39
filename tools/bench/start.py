# SPDX-License-Identifier: Apache-2.0
"""The time from a start to the first answer, compared with plain vLLM's.

Lane `ready`, the default: plain vLLM and Slipway are started in turn with the same model and
arguments, every second pair in reverse order. A start has ended when the server has answered a
completion of eight tokens, drawn at random and with a log probability. Slipway is ready only after
it has generated such an answer; with plain vLLM the first client would wait for it. The output has
the seconds of each start, the median of the pairs' ratios, and its 95% confidence interval from
resampling the pairs.

Lane `boot`: starts with compiled graphs. Each round has separate folders for generated files. It
starts plain vLLM and Slipway with an empty folder, and then with the files from the first start. It
starts Slipway once more with the model at another path. The output has, for each state, the number
of starts, the median and the quartiles: seconds until the first answer, and the seconds that vLLM
reports for its engine (its log line `init engine`). Files of models and libraries are in the page
cache.

Lane `model`: starts whose model comes from S3, a stand-in on this machine behind a link with
FETCH_S seconds for the whole model. Each round starts Slipway three times: with all files fetched
first, with weights that vLLM loads while others are fetched, and with the files on the disk. The
output has the medians and quartiles of the steps STEPS, and the bound: the longer of fetch and
load, and one file.

Lane `delivery`: how much of the installed files a start reads. Each round empties the page cache,
which needs root, and starts Slipway. The output has the size of Python's environment, which is
most of the image, and the bytes that the server's processes had read from disks at the first
answer.

Lane `reconfiguration`: a copy of the model is replaced under load. Each round kills the engine of
one of two copies while CLIENTS clients send completions. The output has the seconds until both
copies serve again, the rate meanwhile ÷ the rate before, and how many requests failed.
"""

import argparse
import contextlib
import functools
import json
import logging
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import boto3
import httpx
from moto.server import ThreadedMotoServer

from tests.support.harness.process import SERVE, START_S, Program
from tests.support.harness.slow_link import slow_link
from tests.support.harness.stats import spread
from tests.support.harness.wait import until
from tests.support.models import tiny
from tools.bench.overhead import plain_vllm, planned

ASKED = {"OPTION_MAX_MODEL_LEN": "2048", "OPTION_KV_CACHE_MEMORY_BYTES": "512M"}
INIT_ENGINE = re.compile(r"init engine \([^)]*\) took ([\d.]+) s")
BODY = {"prompt": "The import statement is", "max_tokens": 8, "logprobs": 0}
RESAMPLES = 10_000


def started(program: Program) -> float:
    """Seconds from the start of the process to its first answer."""
    with first_answer(program) as took:
        return took


@contextlib.contextmanager
def first_answer(program: Program) -> Iterator[float]:
    """Start the program for the `with` block. Yields the seconds until its first answer."""
    began = time.monotonic()
    with program:
        program.ready()
        answer = httpx.post(f"{program.url}/v1/completions", json=BODY, timeout=60)
        took = time.monotonic() - began
        answer.raise_for_status()
        yield took


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95% confidence interval of their median."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def ready(pairs: int, folder: Path) -> None:
    """Print the lane `ready`."""
    model = str(tiny.make())
    asked = {**ASKED, "OPTION_MODEL_ID": model}
    plan = planned(asked)
    log = folder / "log"
    arms: dict[str, Callable[[], Program]] = {
        "plain vLLM": lambda: plain_vllm(plan, model, log=log),
        "Slipway": lambda: Program(*SERVE, environ=asked, log=log),
    }
    ratios: list[float] = []
    for number in range(-1, pairs):  # the first fills the page cache and is not counted
        took = {
            name: started(arms[name]())
            for name in (sorted(arms) if number % 2 else sorted(arms, reverse=True))
        }
        shown = ", ".join(f"{name} {took[name]:.1f} s" for name in arms)
        print(shown + (" (not counted)" if number < 0 else ""), flush=True)
        if number >= 0:
            ratios.append(took["Slipway"] / took["plain vLLM"])
    low, high = interval(ratios)
    print(f"ratio {statistics.median(ratios):.3f} [{low:.3f} … {high:.3f}], {len(ratios)} pairs")


EMPTY = "empty folder"
FILLED = "filled folder"
MOVED = "filled folder, model at another path"


def boot(rounds: int, folder: Path) -> None:
    """Print the lane `boot`."""
    model = tiny.make()
    moved = folder / "moved"
    shutil.copytree(model, moved)
    asked = {**ASKED, "OPTION_ENFORCE_EAGER": "false"}
    plan = planned({**asked, "OPTION_MODEL_ID": str(model)})
    log = folder / "log"
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for number in range(rounds):
        plain = str(folder / f"vllm-{number}")
        cache = {**asked, "OPTION_CACHE_FOLDER": str(folder / f"slipway-{number}")}
        vllm = functools.partial(plain_vllm, plan, str(model), log=log)
        starts: list[tuple[str, str, Callable[[], Program]]] = [
            *(
                ("plain vLLM", state, functools.partial(vllm, environ={"VLLM_CACHE_ROOT": plain}))
                for state in (EMPTY, FILLED)
            ),
            *(
                ("Slipway", state, functools.partial(_slipway, at, cache, log))
                for state, at in ((EMPTY, model), (FILLED, model), (MOVED, moved))
            ),
        ]
        for arm, state, program in starts:
            took = started(program())
            (engine,) = INIT_ENGINE.findall(log.read_text())
            found[arm, state].append((took, float(engine)))
            print(f"{arm}, {state}: {took:.1f} s, init engine {engine} s", flush=True)
    for (arm, state), both in found.items():
        answer, engine = (spread(values, ".1f") for values in zip(*both, strict=True))
        print(f"{arm + ', ' + state:50} n {len(both)}  first answer {answer}  init engine {engine}")
    of = {key: statistics.median(it[1] for it in both) for key, both in found.items()}
    whole = {key: statistics.median(it[0] for it in both) for key, both in found.items()}
    print(
        f"init engine, filled ÷ empty: {of['Slipway', FILLED] / of['Slipway', EMPTY]:.2f}; "
        f"first answer with a filled folder, Slipway ÷ plain vLLM: "
        f"{whole['Slipway', FILLED] / whole['plain vLLM', FILLED]:.2f}"
    )


def _slipway(model: Path, environ: dict[str, str], log: Path) -> Program:
    return Program(*SERVE, environ={**environ, "OPTION_MODEL_ID": str(model)}, log=log)


FETCH_S = 30.0
_AWS = {
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
STEPS = ("fetching", "importing", "loading")


@contextlib.contextmanager
def slow_s3(model: Path) -> Iterator[str]:
    """The URL of an S3 that has the model in s3://models/tiny, and takes FETCH_S to send it."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it logs each request
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name=_AWS["AWS_DEFAULT_REGION"],
        aws_access_key_id=_AWS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=_AWS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket="models")
    for file in model.iterdir():
        client.upload_file(str(file), "models", f"tiny/{file.name}")
    size = sum(file.stat().st_size for file in model.iterdir())
    try:
        with slow_link(port, size / FETCH_S) as slow:
            yield f"http://127.0.0.1:{slow}"
    finally:
        server.stop()


def steps(log: Path) -> dict[str, float]:
    """Step → seconds, by the log line `ready`."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (found,) = [line["steps"] for line in lines if line["message"] == "ready"]
    return {name: found.get(name, 0.0) for name in STEPS}


FIRST = "fetched first"
MEANWHILE = "fetched meanwhile"
THERE = "on the disk"


def model_delivery(rounds: int, folder: Path) -> None:
    """Print the lane `model`."""
    model = tiny.make_shards()
    files = len([*model.glob("*.safetensors")])
    log = folder / "log"
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with slow_s3(model) as url:
        asked = {**ASKED, **_AWS, "AWS_ENDPOINT_URL": url, "OPTION_MODEL_ID": "s3://models/tiny"}
        for number in range(rounds):
            for state, place, more in (
                (FIRST, "first", {"OPTION_LOAD_FORMAT": "safetensors"}),
                (MEANWHILE, "meanwhile", {}),
                (THERE, "meanwhile", {}),
            ):
                downloads = {"SERVING_DOWNLOAD_DIR": str(folder / f"{place}-{number}")}
                took = started(Program(*SERVE, environ={**asked, **downloads, **more}, log=log))
                found[state].append(steps(log) | {"first answer": took})
                print(f"{state}: {found[state][-1]}", flush=True)
    spans = {
        state: [sum(it[name] for name in STEPS) for it in each] for state, each in found.items()
    }
    for state, each in spans.items():
        answers = spread([it["first answer"] for it in found[state]], ".1f")
        print(f"{state:20} n {len(each)}  {' + '.join(STEPS)} {spread(each, '.1f')} ", end="")
        print(f" first answer {answers}")
    fetch = statistics.median(it["fetching"] for it in found[FIRST])
    load = statistics.median(spans[THERE])
    bound = max(fetch, load) + fetch / files
    print(
        f"{MEANWHILE}: {statistics.median(spans[MEANWHILE]):.1f} s; fetch {fetch:.1f}, load "
        f"{load:.1f}; the longer one and one of {files} files: {bound:.1f} s"
    )


PAGE_CACHE = Path("/proc/sys/vm/drop_caches")


def delivery(rounds: int, folder: Path) -> None:
    """Print the lane `delivery`."""
    if not os.access(PAGE_CACHE, os.W_OK):
        sys.exit(f"The lane `delivery` writes {PAGE_CACHE}. Run it as root.")
    asked = {**ASKED, "OPTION_MODEL_ID": str(tiny.make())}
    files = [it for it in Path(sys.prefix).rglob("*") if it.is_file() and not it.is_symlink()]
    found: list[tuple[float, float]] = []
    for _ in range(rounds):
        os.sync()
        PAGE_CACHE.write_text("3")
        server = Program(*SERVE, environ=asked, log=folder / "log")
        with first_answer(server) as took:
            read = sum(it.io_counters().read_bytes for it in (server.own, *server.children()))
        found.append((read / 1e6, took))
        print(f"page cache emptied: {found[-1][0]:.0f} MB read, {took:.1f} s", flush=True)
    sizes, times = zip(*found, strict=True)
    installed = sum(it.stat().st_size for it in files) / 1e6
    print(
        f"page cache emptied  n {rounds}  MB read {spread(sizes, '.0f')} of {installed:.0f} "
        f"installed  first answer {spread(times, '.1f')}"
    )


COPIES, CLIENTS = 2, 4
USUAL_S = 10.0


class Load:
    """CLIENTS clients that send completions until the end of the `with` block."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answered = self.failed = 0
        self._ends = threading.Event()
        self._clients = [threading.Thread(target=self._client) for _ in range(CLIENTS)]

    def __enter__(self) -> Self:
        for it in self._clients:
            it.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for it in self._clients:
            it.join()

    def _client(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self._ends.is_set():
                try:
                    client.post("/v1/completions", json=BODY).raise_for_status()
                    self.answered += 1
                except httpx.HTTPError:
                    self.failed += 1

    def rate(self, until_done: Callable[[], None]) -> tuple[float, float]:
        """Answers per second while the call runs, and the seconds that it took."""
        answered, began = self.answered, time.monotonic()
        until_done()
        took = time.monotonic() - began
        return (self.answered - answered) / took, took


def reconfiguration(rounds: int, folder: Path) -> None:
    """Print the lane `reconfiguration`."""
    asked = {**ASKED, "OPTION_MODEL_ID": str(tiny.make()), "OPTION_COPIES": str(COPIES)}
    found: list[tuple[float, float]] = []
    with Program(*SERVE, environ=asked, log=folder / "log") as server:
        server.ready()
        until(lambda: server.ready_replicas() == COPIES, START_S)
        with Load(server.url) as load:
            for _ in range(rounds):
                usual, _ = load.rate(lambda: time.sleep(USUAL_S))
                rate, took = load.rate(lambda: _replace(server))
                found.append((took, rate / usual))
                print(f"replaced in {took:.1f} s, rate {rate:.0f} of {usual:.0f}/s", flush=True)
    seconds, rates = zip(*found, strict=True)
    print(
        f"a copy of {COPIES} replaced  n {rounds}  seconds {spread(seconds, '.1f')}  rate ÷ before "
        f"{spread(rates, '.2f')}  answered {load.answered}, failed {load.failed}"
    )


def _replace(server: Program) -> None:
    """Kill the engine of a copy, and wait until another copy serves in its place."""
    server.children("VLLM::")[0].kill()
    until(lambda: server.ready_replicas() < COPIES)
    until(lambda: server.ready_replicas() == COPIES, START_S)


LANES = {
    "ready": ready,
    "boot": boot,
    "model": model_delivery,
    "delivery": delivery,
    "reconfiguration": reconfiguration,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lane", choices=LANES, default="ready")
    parser.add_argument("--pairs", type=int, default=5, help="pairs, or rounds, of starts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        LANES[options.lane](options.pairs, Path(folder))


if __name__ == "__main__":
    main()
