"""What Slipway costs over plain vLLM: requests/s, latency and streamed tokens/s, as ratios.

Plain vLLM and Slipway serve the same tiny model with the same arguments, side by side. Rounds of
load go to the one and the other in turn, so that what else the machine does falls on both, and each
round's figure is set against plain vLLM's of the same round. Printed are the medians over the
rounds and, in brackets, the quartiles. Neither server writes an access log.

LMI's streams report every token's id and log probability, which a plain stream does not. What vLLM
itself takes for those shows in the arm "plain vLLM, logprobs". The formatter's arm is a server with
a model.py whose output formatter parses each event and writes it anew.

With --before, a checkout of another version is measured in the same rounds.
"""

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import aiohttp
import psutil

from lmi_config.plan import vllm
from scripts.models import tiny
from serving.server.prepare import prepare

PROMPT = "The import statement is"
PLAIN_PORT, SLIPWAY_PORT, FORMATTER_PORT, BEFORE_PORT = 18100, 18101, 18102, 18103
ROOT = Path(__file__).parent.parent.parent
FORMATTER = ROOT / "tests" / "compat" / "stream_edit" / "model.py"
STREAM_TOKENS = 128
STREAM_CONCURRENCY = 8


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
    port: int
    path: str
    body: Callable[[bool], dict[str, Any]]


ARMS = (
    Arm("plain vLLM", PLAIN_PORT, "/v1/completions", openai_body),
    Arm("plain vLLM, logprobs", PLAIN_PORT, "/v1/completions", logprobs_body),
    Arm("/v1/completions", SLIPWAY_PORT, "/v1/completions", openai_body),
    Arm("/invocations, OpenAI body", SLIPWAY_PORT, "/invocations", openai_body),
    Arm("/invocations, LMI body", SLIPWAY_PORT, "/invocations", lmi_body),
    Arm("/invocations, LMI, details", SLIPWAY_PORT, "/invocations", details_body),
    Arm("/invocations, formatter", FORMATTER_PORT, "/invocations", openai_body),
)
BEFORE = tuple(
    arm._replace(name=f"before: {arm.name}", port=BEFORE_PORT)
    for arm in ARMS
    if arm.port == SLIPWAY_PORT
)


class Round(NamedTuple):
    """One round of one arm. rate: requests/s, or tokens/s of streams; cpu: seconds of the server
    process and a model.py's (the engine's own left out) for each request, or token of a stream.
    """

    rate: float
    p50: float
    p99: float
    cpu: float


@contextmanager
def server(
    command: list[str], environ: dict[str, str], port: int, log: Path, root: Path = ROOT
) -> Iterator[int]:
    """Run a server until it is ready; gives its process id. Exits where its port is taken: it would
    be a stranger that is measured.

    root: the checkout that it runs from.
    """
    with socket.socket() as there:
        if there.connect_ex(("127.0.0.1", port)) == 0:
            sys.exit(f"port {port} is in use by another program; stop it first")
    environ = {**os.environ, "PYTHONPATH": str(root), **environ}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=output, cwd=root)
    try:
        asyncio.run(until_ready(process, port, log))
        yield process.pid
    finally:
        process.terminate()
        process.wait(60)


async def until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        while process.poll() is None:
            try:
                async with client.get("/ping") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    sys.exit(f"a server did not start:\n{log.read_text()[-3000:]}")


async def load(arm: Arm, stream: bool, concurrency: int, requests: int, pid: int) -> Round:
    """Send `requests` requests, `concurrency` at a time, and measure. Exits when one fails."""
    body = json.dumps(arm.body(stream)).encode()
    headers = {"content-type": "application/json"}
    times: list[float] = []
    todo = iter(range(requests))
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{arm.port}", connector=aiohttp.TCPConnector(limit=concurrency)
    ) as client:

        async def work() -> None:
            for _ in todo:
                began = time.perf_counter()
                async with client.post(arm.path, data=body, headers=headers) as answer:
                    content = await answer.read()
                if answer.status != 200 or not (
                    b'"length"' in content or b'"generated_text":"' in content
                ):
                    sys.exit(f"{arm.name}: a request failed: {answer.status} {content[:300]!r}")
                times.append(time.perf_counter() - began)

        processes = [psutil.Process(pid)]
        processes += [
            it for it in processes[0].children() if "handlers.custom" in " ".join(it.cmdline())
        ]
        cpu = spent(processes)
        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        elapsed = time.perf_counter() - began
        cpu = spent(processes) - cpu
    count = requests * (STREAM_TOKENS if stream else 1)
    cuts = statistics.quantiles(times, n=100)
    return Round(count / elapsed, cuts[49], cuts[98], cpu / count)


def spent(processes: list[psutil.Process]) -> float:
    """Their CPU time by the clock that clock_getcpuclockid(3) names: /proc counts in 10 ms."""
    return sum(time.clock_gettime(~process.pid << 3 | 2) for process in processes)


def spread(values: list[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} [{low:{form}} … {high:{form}}]"


def report(title: str, unit: str, rounds: dict[str, list[Round]]) -> None:
    print(f"\n{title}")
    per = unit.rstrip("s/")
    columns = (unit, "ratio", "added p50 ms", "added p99 ms", f"CPU µs/{per}", "CPU ratio")
    print(f"{'':35}" + "".join(f"{column:>28}" for column in columns))
    plain = rounds[ARMS[0].name]
    for name, measured in rounds.items():
        pairs = list(zip(measured, plain, strict=True))
        cells = [
            spread([it.rate for it in measured], ".0f"),
            spread([it.rate / base.rate for it, base in pairs], ".3f"),
            spread([1e3 * (it.p50 - base.p50) for it, base in pairs], ".2f"),
            spread([1e3 * (it.p99 - base.p99) for it, base in pairs], ".2f"),
            spread([1e6 * it.cpu for it in measured], ".0f"),
            spread([it.cpu / base.cpu for it, base in pairs], ".3f"),
        ]
        print(f"{name:35}" + "".join(f"{cell:>28}" for cell in cells), flush=True)
    for name, measured in rounds.items():
        if before := rounds.get(f"before: {name}"):
            report_change(name, measured, before)


class Measured(Protocol):
    """What any round says. rate: of requests or tokens; cpu: seconds for each."""

    @property
    def rate(self) -> float: ...
    @property
    def cpu(self) -> float: ...


def report_change(name: str, measured: Sequence[Measured], before: Sequence[Measured]) -> None:
    """The same arm of two versions, round by round."""
    pairs = list(zip(measured, before, strict=True))
    rate = spread([now.rate / then.rate for now, then in pairs], ".3f")
    cpu = spread([now.cpu / then.cpu for now, then in pairs], ".3f")
    print(f"{name} ÷ before: rate {rate}, CPU {cpu}", flush=True)


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
    plan = prepare({**os.environ, **asked}).plan
    arguments = [
        *vllm.arguments(plan.engine(asked["OPTION_MODEL_ID"], None)),
        "--disable-uvicorn-access-log",
    ]
    environ, here = dict(plan.environment), plan.machine
    plain = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    print(
        f"starting plain vLLM and Slipway twice; {len(here.cpus)} CPUs, {len(here.gpus)} GPUs",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        formatted = Path(folder, "model")
        shutil.copytree(asked["OPTION_MODEL_ID"], formatted)
        shutil.copy(FORMATTER, formatted)

        def slipway(port: int, root: Path = ROOT, **environ: str) -> int:
            command = [sys.executable, "-m", "serving", "serve"]
            environ = asked | {"OPTION_PORT": str(port)} | environ
            log = Path(folder, str(port))
            return stack.enter_context(server(command, environ, port, log, root))

        pids = {
            PLAIN_PORT: stack.enter_context(
                server([*plain, f"--port={PLAIN_PORT}"], environ, PLAIN_PORT, Path(folder, "plain"))
            ),
            SLIPWAY_PORT: slipway(SLIPWAY_PORT),
            FORMATTER_PORT: slipway(FORMATTER_PORT, OPTION_MODEL_ID=str(formatted)),
        }
        if options.before:
            pids[BEFORE_PORT] = slipway(BEFORE_PORT, options.before.resolve())
        every = ARMS + BEFORE * bool(options.before)
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
                    run = load(arm, stream, concurrency, requests, pids[arm.port])
                    measured = asyncio.run(run)
                    if number >= 0:
                        rounds[arm.name].append(measured)
            report(title, unit, rounds)


if __name__ == "__main__":
    main()
