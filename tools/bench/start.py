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
"""

import argparse
import functools
import random
import re
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.support.harness.process import SERVE, Program
from tests.support.harness.stats import spread
from tests.support.models import tiny
from tools.bench.overhead import plain_vllm, planned

ASKED = {"OPTION_MAX_MODEL_LEN": "2048", "OPTION_KV_CACHE_MEMORY_BYTES": "512M"}
INIT_ENGINE = re.compile(r"init engine \([^)]*\) took ([\d.]+) s")
BODY = {"prompt": "The import statement is", "max_tokens": 8, "logprobs": 0}
RESAMPLES = 10_000


def started(program: Program) -> float:
    """Seconds from the start of the process to its first answer."""
    began = time.monotonic()
    with program:
        program.ready()
        answer = httpx.post(f"{program.url}/v1/completions", json=BODY, timeout=60)
        took = time.monotonic() - began
        answer.raise_for_status()
        return took


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


LANES = {"ready": ready, "boot": boot}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lane", choices=LANES, default="ready")
    parser.add_argument("--pairs", type=int, default=5, help="pairs, or rounds, of starts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        LANES[options.lane](options.pairs, Path(folder))


if __name__ == "__main__":
    main()
