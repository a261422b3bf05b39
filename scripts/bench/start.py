"""How long a start takes until the first answer, against plain vLLM's.

Plain vLLM and Slipway are started in turn with the same model and arguments, every other pair the
other way about. A start has ended when the server has answered a completion of eight tokens, drawn
at random and with a log probability: Slipway is ready only when it has generated one, and with
plain vLLM the first client would wait for it. Printed are the seconds of each start, the median of
the pairs' ratios, and its 95% confidence interval from resampling the pairs.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from lmi_config.plan import vllm
from scripts.models import tiny
from serving.server.prepare import prepare

PORT = 18110
BODY = {"prompt": "The import statement is", "max_tokens": 8, "logprobs": 0}
RESAMPLES = 10_000


def started(command: list[str], environ: dict[str, str], log: Path) -> float:
    """Seconds from the start of the process to its first answer. Exits where it ends before."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent), **environ}
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
    try:
        while process.poll() is None:
            try:
                answer = httpx.post(
                    f"http://127.0.0.1:{PORT}/v1/completions", json=BODY, timeout=60
                )
                if answer.status_code == 200:
                    return time.monotonic() - began
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        sys.exit(f"a server did not start:\n{log.read_text()[-3000:]}")
    finally:
        process.terminate()
        process.wait(60)


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
        "OPTION_PORT": str(PORT),
    }
    plan = prepare({**os.environ, **asked}).plan
    arguments = vllm.arguments(plan.engine(model, None))
    plain = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    arms = {
        "plain vLLM": ([*plain, f"--port={PORT}"], dict(plan.environment)),
        "Slipway": ([sys.executable, "-m", "serving", "serve"], asked),
    }
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, options.pairs):  # the first fills the page cache and is not counted
            took = {
                name: started(*arms[name], Path(folder, "log"))
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
