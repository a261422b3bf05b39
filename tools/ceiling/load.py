# SPDX-License-Identifier: Apache-2.0
"""Rounds of requests and streams to one server, and their measurements."""

import json
from typing import Any, NamedTuple

import psutil
import uvloop

from tests.support.harness.closed_loop import Answer, ClosedLoop, Failed
from tests.support.harness.process import Program, cpu_seconds
from tests.support.harness.stats import percentiles

LIMIT_S = 300.0  # of a round


class Round(NamedTuple):
    """One round of one arm.

    rate: requests or tokens per second. cpu: CPU seconds of the serving process (with a model.py's,
    without the engine's) for each request or token. busy: cores that it used. events: events per
    token of a stream. p50, p99: seconds that a request took. memory: bytes.
    """

    rate: float
    cpu: float
    busy: float
    events: float
    p50: float
    p99: float
    memory: int


class Load(ClosedLoop):
    """So many requests. key: what all of them have; "" is none. events: of all answers."""

    def __init__(self, path: str, body: dict[str, Any], count: int, key: str = "") -> None:
        super().__init__()
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n"
        )
        credentials = f"authorization: Bearer {key}\r\n" if key else ""
        self.whole = f"{head}{credentials}\r\n".encode() + data
        self.left, self.events = count, 0

    def request(self) -> bytes | None:
        self.left -= 1
        return self.whole if self.left >= 0 else None

    def check(self, answer: Answer) -> None:
        # It ended because it was long enough: by OpenAI's word for it, or by LMI's object for it.
        if answer.status != 200 or not (
            b'"length"' in answer.last or b'"generated_text":"' in answer.last
        ):
            raise Failed(f"answer {answer.status}: {answer.last[-500:]!r}")
        # An event of OpenAI's has two ends of line, and a line of LMI's has one.
        self.events += answer.lines // (2 if answer.last.endswith(b"\n\n") else 1)


def measured(
    server: Program,
    path: str,
    body: dict[str, Any],
    tokens: int,
    connections: int,
    count: int,
    key: str = "",
) -> Round:
    """Put the load on a server. tokens: of each answer, if they count; otherwise 0."""

    async def run() -> tuple[Load, float]:
        load = Load(path, body, count, key)
        return load, await load.load([server.port], connections, LIMIT_S)

    processes: list[psutil.Process] = [server.own]
    for name in ("handlers.custom", "VLLM::APIServer", "vllm-rs"):
        processes += server.children(name)
    before = cpu_seconds(processes)
    load, elapsed = uvloop.run(run())
    cpu = cpu_seconds(processes) - before
    units = count * (tokens or 1)
    memory = sum(process.memory_info().rss for process in processes)
    return Round(
        units / elapsed,
        cpu / units,
        cpu / elapsed,
        load.events / units,
        *percentiles(load.times),
        memory,
    )
