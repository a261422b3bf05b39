# SPDX-License-Identifier: Apache-2.0
"""How long a start takes until the first answer, against plain vLLM's.

Plain vLLM and Slipway are started in turn with the same model and arguments, every other pair the
other way about. A start has ended when the server has answered a completion of eight tokens, drawn
at random and with a log probability: Slipway is ready only when it has generated one, and with
plain vLLM the first client would wait for it. Printed are the seconds of each start, the median of
the pairs' ratios, and its 95% confidence interval from resampling the pairs.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from scripts.bench.overhead import plain_vllm, planned
from scripts.harness.process import SERVE, Program
from scripts.models import tiny

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()

    model = str(tiny.make())
    asked = {
        "OPTION_MODEL_ID": model,
        "OPTION_MAX_MODEL_LEN": "2048",
        "OPTION_KV_CACHE_MEMORY_BYTES": "512M",
    }
    plan = planned(asked)
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        arms: dict[str, Callable[[], Program]] = {
            "plain vLLM": lambda: plain_vllm(plan, model, log=log),
            "Slipway": lambda: Program(*SERVE, environ=asked, log=log),
        }
        for number in range(-1, options.pairs):  # the first fills the page cache and is not counted
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


if __name__ == "__main__":
    main()
