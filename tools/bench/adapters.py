# SPDX-License-Identifier: Apache-2.0
"""The cost of thousands of LoRA adapters: registration, first use, and requests to the base model.

Plain vLLM and Slipway serve the same tiny model with the same arguments and 4 slots, side by side.
Slipway registers --adapters of them; vLLM's own way is to load each. First use is compared with
vLLM's own work: loading the adapter, and one request. Requests to the base model go to the one and
the other in turn, after all are registered. Printed are medians and, in brackets, quartiles.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.support.harness.process import SERVE, Program
from tests.support.harness.stats import spread
from tests.support.models import tiny, tiny_lora
from tools.bench.overhead import plain_vllm, planned

PROMPT = "The import statement is"
SLOTS = 4
LOADS = 24
BASE_REQUESTS, ROUNDS = 40, 15


def timed(work: Callable[[], httpx.Response]) -> float:
    """Seconds. Exits where the answer is no success."""
    began = time.perf_counter()
    answer = work()
    if answer.status_code != 200:
        sys.exit(f"{answer.request.url}: {answer.status_code} {answer.text[:300]}")
    return time.perf_counter() - began


def told_ms(seconds: list[float]) -> str:
    return spread([1000 * each for each in seconds], ".3g") + " ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--adapters", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary).resolve()
        used = [tiny_lora.write(folder / f"used-{seed}", seed) for seed in range(LOADS)]
        asked = {
            "OPTION_MODEL_ID": str(tiny.make()),
            "OPTION_MAX_MODEL_LEN": "2048",
            "OPTION_KV_CACHE_MEMORY_BYTES": "512M",
            "OPTION_ENABLE_LORA": "true",
            "OPTION_MAX_LORAS": str(SLOTS),
            "OPTION_ADAPTER_ROOTS": str(folder),
        }
        model = asked["OPTION_MODEL_ID"]
        plan = planned(asked)
        more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        vllm = plain_vllm(
            plan, model, "--disable-uvicorn-access-log", environ=more, log=folder / "plain.log"
        )
        server = Program(*SERVE, environ=asked, log=folder / "slipway.log")
        for program in (vllm, server):
            stack.enter_context(program).ready()
        plain, slipway = (
            stack.enter_context(httpx.Client(base_url=it.url, timeout=60)) for it in (vllm, server)
        )

        def complete(client: httpx.Client, model: str | None = None) -> httpx.Response:
            body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
            named = {"model": model} if model else {}
            return client.post("/v1/completions", json=body | named)

        def register(name: str, src: Path) -> httpx.Response:
            return slipway.post("/adapters", params={"name": name, "src": str(src)})

        def load(name: str, src: Path) -> httpx.Response:
            body = {"lora_name": name, "lora_path": str(src)}
            return plain.post("/v1/load_lora_adapter", json=body)

        print(f"{len(plan.machine.cpus)} CPUs, {len(plan.machine.gpus)} GPUs, {SLOTS} slots")
        memory = server.own.memory_info().rss
        registrations = [
            timed(lambda n=n: register(f"adapter-{n}", used[n % LOADS]))  # type: ignore[misc]
            for n in range(options.adapters)
        ]
        grown = server.own.memory_info().rss - memory
        print(f"registering {options.adapters}: {told_ms(registrations)} each")
        print(f"memory for each that is registered: {grown / options.adapters / 1024:.1f} KiB")

        ours, theirs, loads = [], [], []
        for client in (plain, slipway):
            complete(client)
        for n, src in enumerate(used):
            loads.append(timed(lambda n=n, src=src: load(f"v-{n}", src)))  # type: ignore[misc]
            request = timed(lambda n=n: complete(plain, f"v-{n}"))  # type: ignore[misc]
            theirs.append(loads[-1] + request)
            ours.append(timed(lambda n=n: complete(slipway, f"adapter-{n}")))  # type: ignore[misc]
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        print(f"vLLM's own load: {told_ms(loads)}")
        print(f"first use: {told_ms(ours)}; vLLM's load and request: {told_ms(theirs)}")
        print(f"first use / vLLM's load and request: {spread(ratios, '.3g')}")

        base = []
        for number in range(ROUNDS):
            means = {}
            for client in (plain, slipway) if number % 2 else (slipway, plain):
                times = [timed(lambda c=client: complete(c)) for _ in range(BASE_REQUESTS)]  # type: ignore[misc]
                means[client] = statistics.median(times)
            base.append(means[slipway] / means[plain])
        print(f"a request to the base model, Slipway / vLLM: {spread(base, '.3g')}")


if __name__ == "__main__":
    main()
