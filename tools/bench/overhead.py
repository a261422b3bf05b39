# SPDX-License-Identifier: Apache-2.0
"""Slipway's cost over plain vLLM: requests/s, latency and streamed tokens/s, as ratios.

Plain vLLM and Slipway serve the same tiny model with the same arguments, side by side. Rounds of
load go to the one and the other in turn, so that what else the machine does falls on both, and each
round's figure is set against plain vLLM's of the same round. Printed are the medians over the
rounds and, in brackets, the quartiles. Neither server writes an access log.

LMI's streams report every token's id and log probability, which a plain stream does not. The arm
"plain vLLM, logprobs" shows vLLM's own cost of those. The formatter's arm is a server with a
model.py whose output formatter parses each event and writes it again.

With --before, a checkout of another version is measured in the same rounds. The servers share a GPU
with OPTION_GPU_MEMORY_UTILIZATION=0.5: vLLM needs this part of it free at a start.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from lmi_config.plan import vllm
from lmi_config.plan.plan import Plan
from serving.server.prepare import prepare
from tests.support.harness.process import NOTHING, SERVE, Program, cpu_seconds
from tests.support.harness.stats import (
    cpu_ratio,
    paired,
    percentiles,
    print_changes,
    rate_ratio,
    spread,
)
from tests.support.models import formatter, tiny

PROMPT = "The import statement is"
PLAIN, SLIPWAY, FORMATTER, BEFORE = "plain", "slipway", "formatter", "before"
"""The servers."""
STREAM_TOKENS = 128
STREAM_CONCURRENCY = 8


def planned(environ: Mapping[str, str]) -> Plan:
    """Slipway's plan with these options."""
    return prepare({**os.environ, **environ}).plan


def plain_vllm(
    plan: Plan,
    model: str,
    *more: str,
    log: Path,
    environ: Mapping[str, str] = NOTHING,
    processes: int = 1,
    rust: Path | None = None,
) -> Program:
    """vLLM without Slipway, with the arguments and the environment of this plan, and more.
    processes: that answer requests, in front of one engine. rust: vLLM's front end in Rust
    (vllm-rs), which answers them instead.
    """
    module = ["vllm.entrypoints.openai.api_server"]
    if processes > 1 or rust:
        module = ["vllm.entrypoints.cli.main", "serve"]
    if processes > 1:
        module.append(f"--api-server-count={processes}")
    front = {}
    if rust:
        front = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": f"{rust.resolve()}"}
    return Program(
        *(sys.executable, "-m", *module, "--port={port}"),
        *vllm.arguments(plan.engine(model, None)),
        *more,
        environ={**plan.environment, **environ, **front},
        health="/health" if rust else "/ping",
        log=log,
    )


def openai_body(stream: bool) -> dict[str, Any]:
    tokens = STREAM_TOKENS if stream else 1
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body | {"stream": True} if stream else body


def logprobs_body(stream: bool) -> dict[str, Any]:
    return openai_body(stream) | {"logprobs": 0, "return_token_ids": True}


def lmi_body(stream: bool) -> dict[str, Any]:
    tokens = STREAM_TOKENS if stream else 1
    parameters = {"max_new_tokens": tokens, "do_sample": False, "ignore_eos_token": True}
    body: dict[str, Any] = {"inputs": PROMPT, "parameters": parameters}
    return body | {"stream": True} if stream else body


def details_body(stream: bool) -> dict[str, Any]:
    body = lmi_body(stream)
    return body | {"parameters": body["parameters"] | {"details": True}}


class Arm(NamedTuple):
    name: str
    server: str
    path: str
    body: Callable[[bool], dict[str, Any]]


ARMS = (
    Arm("plain vLLM", PLAIN, "/v1/completions", openai_body),
    Arm("plain vLLM, logprobs", PLAIN, "/v1/completions", logprobs_body),
    Arm("/v1/completions", SLIPWAY, "/v1/completions", openai_body),
    Arm("/invocations, OpenAI body", SLIPWAY, "/invocations", openai_body),
    Arm("/invocations, LMI body", SLIPWAY, "/invocations", lmi_body),
    Arm("/invocations, LMI, details", SLIPWAY, "/invocations", details_body),
    Arm("/invocations, formatter", FORMATTER, "/invocations", openai_body),
)
AGAIN = tuple(
    arm._replace(name=f"before: {arm.name}", server=BEFORE) for arm in ARMS if arm.server == SLIPWAY
)


class Round(NamedTuple):
    """One round of one arm. rate: requests/s, or tokens/s of streams; cpu: seconds of the server
    process and a model.py's (the engine's own left out) for each request, or token of a stream.
    """

    rate: float
    p50: float
    p99: float
    cpu: float


async def load(arm: Arm, server: Program, stream: bool, concurrency: int, requests: int) -> Round:
    """Send `requests` requests, `concurrency` at a time, and measure. Exits when one fails."""
    body = json.dumps(arm.body(stream)).encode()
    headers = {"content-type": "application/json"}
    times: list[float] = []
    todo = iter(range(requests))
    async with aiohttp.ClientSession(
        server.url, connector=aiohttp.TCPConnector(limit=concurrency)
    ) as client:

        async def work() -> None:
            for _ in todo:
                began = time.perf_counter()
                async with client.post(arm.path, data=body, headers=headers) as answer:
                    content = await answer.read()
                if answer.status != 200 or not (
                    b'"length"' in content or b'"generated_text":"' in content
                ):
                    sys.exit(f"{arm.name}: a request failed: {answer.status} {content[-300:]!r}")
                times.append(time.perf_counter() - began)

        processes = [server.own, *server.children("handlers.custom")]
        cpu = cpu_seconds(processes)
        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        elapsed = time.perf_counter() - began
        cpu = cpu_seconds(processes) - cpu
    count = requests * (STREAM_TOKENS if stream else 1)
    return Round(count / elapsed, *percentiles(times), cpu / count)


def report(title: str, unit: str, rounds: dict[str, list[Round]]) -> None:
    print(f"\n{title}")
    per = unit.rstrip("s/")
    columns = (unit, "ratio", "added p50 ms", "added p99 ms", f"CPU µs/{per}", "CPU ratio")
    print(f"{'':35}" + "".join(f"{column:>28}" for column in columns))
    plain = rounds[ARMS[0].name]
    for name, measured in rounds.items():
        cells = [
            spread([it.rate for it in measured], ".0f"),
            spread(paired(rate_ratio, measured, plain), ".3f"),
            spread(paired(lambda it, base: 1e3 * (it.p50 - base.p50), measured, plain), ".2f"),
            spread(paired(lambda it, base: 1e3 * (it.p99 - base.p99), measured, plain), ".2f"),
            spread([1e6 * it.cpu for it in measured], ".0f"),
            spread(paired(cpu_ratio, measured, plain), ".3f"),
        ]
        print(f"{name:35}" + "".join(f"{cell:>28}" for cell in cells), flush=True)
    print_changes(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--scale", type=float, default=1.0, help="of the requests in a round")
    parser.add_argument("--before", type=Path, help="a checkout to measure as well")
    options = parser.parse_args()

    asked = {
        "OPTION_MODEL_ID": str(tiny.make()),
        "OPTION_MAX_MODEL_LEN": "2048",
        "OPTION_KV_CACHE_MEMORY_BYTES": "512M",
        "OPTION_DISABLE_LOG_STATS": "true",
        "OPTION_LOG_LEVEL": "warning",
    }
    model = asked["OPTION_MODEL_ID"]
    plan = planned(asked)
    print(
        f"starting plain vLLM and Slipway twice; {len(plan.machine.cpus)} CPUs, "
        f"{len(plan.machine.gpus)} GPUs",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        formatted = folder / "model"
        shutil.copytree(model, formatted)
        formatter.write(formatted)
        of_formatted = asked | {"OPTION_MODEL_ID": str(formatted)}
        no_log = "--disable-uvicorn-access-log"
        servers = {
            PLAIN: plain_vllm(plan, model, no_log, log=folder / PLAIN),
            SLIPWAY: Program(*SERVE, environ=asked, log=folder / SLIPWAY),
            FORMATTER: Program(*SERVE, environ=of_formatted, log=folder / FORMATTER),
        }
        if options.before:
            root = options.before.resolve()
            servers[BEFORE] = Program(*SERVE, environ=asked, log=folder / BEFORE, root=root)
        for server in servers.values():
            stack.enter_context(server).ready()
        every = ARMS + AGAIN * bool(options.before)
        loads = [
            (f"1-token completions, concurrency {concurrency}", "requests/s", False, concurrency, n)
            for concurrency, n in ((1, 80), (8, 240), (32, 480))
        ]
        streams = f"streams of {STREAM_TOKENS} tokens, concurrency {STREAM_CONCURRENCY}"
        loads.append((streams, "tokens/s", True, STREAM_CONCURRENCY, 16))
        for title, unit, stream, concurrency, requests in loads:
            requests = max(int(requests * options.scale), 2 * concurrency)
            arms = [arm for arm in every if stream or arm.body is not logprobs_body]
            rounds: dict[str, list[Round]] = {arm.name: [] for arm in arms}
            for number in range(-1, options.rounds):  # the first warms up and is not counted
                # Every other round the other way about, so that none is always first.
                for arm in arms if number % 2 else reversed(arms):
                    run = load(arm, servers[arm.server], stream, concurrency, requests)
                    measured = asyncio.run(run)
                    if number >= 0:
                        rounds[arm.name].append(measured)
            report(title, unit, rounds)


if __name__ == "__main__":
    main()
