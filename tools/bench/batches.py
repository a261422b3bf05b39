# SPDX-License-Identifier: Apache-2.0
"""The time of interactive requests while a batch runs, without a batch, and beside the same lines
in a body of JSON lines, which has a place in the queue like every other request.

Users ask one thing after the other. Each round has all three arms; the ratios are of its P90s.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.harness.process import SERVE, Program
from tests.support.harness.stats import spread
from tests.support.harness.wait import until
from tests.support.models import tiny

URL = "/v1/completions"
LINES = 5000
"""More than a round answers."""


def body(number: int, tokens: int) -> dict[str, object]:
    prompt = f"{number} bottles of beer on the wall, {number} bottles of beer."
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


@contextmanager
def alone(client: httpx.Client, tokens: int) -> Iterator[None]:
    yield


@contextmanager
def batch(client: httpx.Client, tokens: int) -> Iterator[None]:
    lines = (
        {"custom_id": f"{n}", "method": "POST", "url": URL, "body": body(n, tokens)}
        for n in range(LINES)
    )
    content = "\n".join(json.dumps(line) for line in lines)
    sent = client.post(
        "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}
    )
    file = sent.raise_for_status().json()["id"]
    asked = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
    made = client.post("/v1/batches", json=asked).raise_for_status().json()
    path = f"/v1/batches/{made['id']}"

    def is_over() -> bool:
        return bool(client.get(path).json()["cancelled_at"])

    until(lambda: client.get(path).json()["request_counts"]["completed"])
    yield
    client.post(f"{path}/cancel").raise_for_status()
    until(is_over)
    print(f"  lines answered: {client.get(path).json()['request_counts']['completed']}", flush=True)


@contextmanager
def json_lines(client: httpx.Client, tokens: int) -> Iterator[None]:
    content = "\n".join(json.dumps(body(n, tokens)) for n in range(LINES))
    begun, over = threading.Event(), threading.Event()

    def send() -> None:
        kind = {"content-type": "application/jsonlines"}
        with client.stream("POST", "/invocations", content=content, headers=kind) as answer:
            for count, _ in enumerate(answer.iter_lines(), 1):
                begun.set()
                if over.is_set():
                    print(f"  lines answered: {count}", flush=True)
                    return

    sending = threading.Thread(target=send)
    sending.start()
    begun.wait()
    yield
    over.set()
    sending.join()


ARMS = {"alone": alone, "with a batch": batch, "with JSON lines": json_lines}


def p90(client: httpx.Client, users: int, tokens: int, seconds: float) -> float:
    """Times of consecutive requests by this many concurrent users, in ms."""
    until_s = time.perf_counter() + seconds
    numbers = itertools.count(LINES)

    def user(_: int) -> list[float]:
        took = []
        while (began := time.perf_counter()) < until_s:
            client.post(URL, json=body(next(numbers), tokens)).raise_for_status()
            took.append(1000 * (time.perf_counter() - began))
        return took

    with ThreadPoolExecutor(users) as pool:
        every = [each for took in pool.map(user, range(users)) for each in took]
    return statistics.quantiles(every, n=10)[8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="instead of a tiny random one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10, help="of each arm in a round")
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16, help="of each user's answer")
    parser.add_argument("--line-tokens", type=int, default=64, help="of each line's")
    parser.add_argument("--sequences", type=int, default=8, help="that the engine works on")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Program(
            *SERVE,
            environ={
                "OPTION_MODEL_ID": options.model or str(tiny.make()),
                "OPTION_MAX_MODEL_LEN": "2048",
                "OPTION_MAX_ROLLING_BATCH_SIZE": str(options.sequences),
                "OPTION_BATCH_FOLDER": str(Path(folder, "batches")),
            },
            log=Path(folder, "log"),
        ) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        server.ready()
        found: dict[str, list[float]] = {name: [] for name in ARMS}
        for number in range(1, options.rounds + 1):
            for name, beside in ARMS.items():
                with beside(client, options.line_tokens):
                    took = p90(client, options.users, options.tokens, options.seconds)
                found[name].append(took)
                print(f"round {number}, {name}: P90 {took:.0f} ms", flush=True)
    for name, values in found.items():
        ratios = [one / base for one, base in zip(values, found["alone"], strict=True)]
        print(f"{name:16} P90 {spread(values, '.0f')} ms, ÷ alone {spread(ratios, '.2f')}")


if __name__ == "__main__":
    main()
