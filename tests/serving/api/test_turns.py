# SPDX-License-Identifier: Apache-2.0
"""How long bodies occupy the event loop, in its own CPU time: other requests, /ping among them,
wait meanwhile. tests/serving/engine/test_forms.py measures vLLM's part of it.
"""

import asyncio
import json
import random
import time
from typing import Any

import pytest

from serving.inference.content import fields
from serving.protocol import AUDIO_PATHS, ENGINE_PATHS
from tests.serving.conftest import running

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("frozen_heap"),
]

LONGEST_S = 0.5
KEYS = (
    *("inputs", "prompt", "messages", "input", "documents", "query", "queries", "items", "text_1"),
    *("text_2", "data_1", "tools", "tokens", "chat_template_kwargs", "system", "parameters", "zzz"),
    *("adapters", "logit_bias", "stop", "model", "cache_salt", "structured_outputs"),
)
UNITS: tuple[Any, ...] = (
    *("", "a", 'a"b\\', "a b " * 500, 1, -1, 1.5, None, True, {}, [], [[]], [1] * 30, {"a": {}}),
    {"role": "user", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "a"}] * 9},
    {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}] * 9},
    {"content": [{}] * 30},
)


def shapes(unit, size):
    """A list of this value, a map to it, and both nested deeper."""
    count = size // (len(json.dumps(unit)) + 2)
    yield [unit] * count
    yield {f"{n:08}": unit for n in range(size // (len(json.dumps(unit)) + 14))}
    yield [[unit] * 9] * (count // 9)
    yield {"a": [{"b": [unit] * count}]}


class Turns:
    """Measures the CPU time that each turn of the loop takes in its thread."""

    async def __aenter__(self):
        self.longest = 0.0
        self._task = asyncio.create_task(self._look())
        return self

    async def _look(self):
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.002)
            self.longest = max(self.longest, time.thread_time() - began)

    async def __aexit__(self, *_):
        self._task.cancel()


@pytest.mark.parametrize("size", [256 * 1024, 4 * 1024**2])
async def test_no_body_holds_the_event_loop(anyio_backend, size):
    draw = random.Random(size)
    paths = ["/invocations", *(set(ENGINE_PATHS) - set(AUDIO_PATHS))]
    slow = []
    async with running(max_request_size=64 * 1024**2) as served:
        asked = [(key, unit, n) for key in KEYS for unit in UNITS for n in range(4)]
        for key, unit, n in draw.sample(asked, 15 if size > 2**20 else 100):
            value = [*shapes(unit, size)][n]
            body = json.dumps({"model": "m", "prompt": "a", key: value}).encode()
            path = draw.choice(paths)
            async with Turns() as turns:
                answer = await served.post(path, body)
            assert answer.status_code < 500, (path, key, unit, answer.text[:200])
            if turns.longest > LONGEST_S:
                slow.append((round(turns.longest, 2), path, key, f"{unit}"[:40], n))
    assert slow == []


async def test_many_lines_hold_nothing_up(anyio_backend):
    lines = b'{"inputs": "a"}\n' * 250_000
    async with running(max_request_size=64 * 1024**2) as served, Turns() as turns:
        answer = await served.client.post(
            "/invocations", content=lines, headers={"content-type": "application/jsonlines"}
        )
    assert answer.status_code < 500
    assert turns.longest < LONGEST_S


def filled(body: bytes, value: bytes) -> bytes:
    """The body with `value,` so often in place of X that it has nearly 4 MiB."""
    return body.replace(b"X", b",".join([value] * ((4 * 1024**2 - 400) // (len(value) + 1))))


async def test_a_text_without_an_end_is_read_once(anyio_backend, monkeypatch):
    monkeypatch.setattr(fields, "KEYS", 1000)  # with the real limit it would be read for minutes
    body = b'{"prompt":"' + b"a" * 2**17 + b'","x":"' + b'\\":' * 8000
    async with running(max_request_size=2**20) as served, Turns() as turns:
        answer = await served.post("/v1/completions", body)
    assert answer.status_code == 400
    assert turns.longest < LONGEST_S


@pytest.mark.parametrize("parts", [b'{"content":[X]}', b'{"content":[{"content":[X]}]}'])
async def test_marks_are_not_looked_for_among_values_that_nothing_else_reads(anyio_backend, parts):
    body = filled(b'{"inputs":"a","cache_control":1,"messages":[%b]}' % parts, b"{}")
    async with running(max_request_size=64 * 1024**2) as served, Turns() as turns:
        answer = await served.post("/invocations", body, headers={"X-Slipway-Cache": "1"})
    assert answer.status_code == 200
    assert "ignored=cache_control" in answer.headers["X-Slipway-Cache"]
    assert turns.longest < LONGEST_S
