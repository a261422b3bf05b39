# SPDX-License-Identifier: Apache-2.0
"""Far more clients than the real engine has room for, and clients that leave or ask again."""

import asyncio
import json

import httpx
import pytest

from scripts.harness.wait import until
from tests.e2e.conftest import serving

SEQUENCES = 8
SHARE = 10  # that many, and a quarter more
QUEUE = 64
CLIENTS = 512
DEADLINE_S = 60
ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(tiny_options, tmp_path_factory):
    """The tiny model with room for few."""
    environ = tiny_options | {
        "OPTION_MAX_ROLLING_BATCH_SIZE": str(SEQUENCES),
        "SERVING_JOB_QUEUE_SIZE": str(QUEUE),
        "OPTION_PREDICT_TIMEOUT": str(DEADLINE_S),
    }
    with serving(tmp_path_factory.mktemp("small") / "log", **environ) as it:
        it.ready()
        yield it


def engine(it):
    running, waiting = "vllm:num_requests_running", "vllm:num_requests_waiting"
    return it.metric(running) + it.metric(waiting)


def test_512_clients_and_a_queue_of_64(small):
    async def ask(client, number):
        prompt, stream = f"import {number}", number % 4 == 3
        if number % 2:
            parameters = {"max_new_tokens": 150, "ignore_eos_token": True}
            body = {"inputs": prompt, "parameters": parameters, "stream": stream}
            return await client.post("/invocations", json=body)
        body = {"prompt": prompt, "max_tokens": 150, "ignore_eos": True}
        return await client.post("/v1/completions", json=body)

    async def all_at_once():
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(
            base_url=small.url, timeout=DEADLINE_S, limits=limits
        ) as client:
            asked = asyncio.gather(*(ask(client, number) for number in range(CLIENTS)))
            most = queued = 0.0
            while not asked.done():
                most = max(most, await asyncio.to_thread(engine, small))
                found = await asyncio.to_thread(small.metric, "slipway_requests_queued")
                queued = max(queued, found)
            return await asked, most, queued

    answers, most, queued = asyncio.run(all_at_once())
    told = {status: sum(it.status_code == status for it in answers) for status in (200, 503)}
    assert sum(told.values()) == CLIENTS, {it.status_code for it in answers}
    assert told[200] >= QUEUE + SHARE
    assert 0 < most <= SHARE
    assert queued <= QUEUE
    for answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert "SERVING_JOB_QUEUE_SIZE" in answer.text
        else:
            last = json.loads(answer.text.splitlines()[-1])
            assert last.get("generated_text") or last["choices"][0]["text"]
    until(lambda: small.metric("slipway_requests_in_flight") == engine(small) == 0)


def test_clients_that_leave_while_they_wait_and_after(small):
    async def leave():
        async with httpx.AsyncClient(base_url=small.url, timeout=DEADLINE_S) as client:
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=ENDLESS))
                for _ in range(SHARE + 3)
            ]
            inside = "slipway_requests_in_flight", SHARE
            for name, count in (inside, ("slipway_requests_queued", 3)):
                await asyncio.to_thread(until, lambda n=name, c=count: small.metric(n) == c)
            for it in asked[-2:]:
                it.cancel()
            await asyncio.to_thread(until, lambda: small.metric("slipway_requests_queued") == 1)
            assert small.metric("slipway_requests_in_flight") == SHARE
            for it in asked:
                it.cancel()

    asyncio.run(leave())
    until(lambda: engine(small) == 0)
    assert small.metric("slipway_requests_queued") == 0
    until(lambda: small.metric("slipway_requests_in_flight") == 0)


def test_a_retry_is_not_computed_again(small):
    """As boto3 does it: the connection is closed after a time-out, and the request sent again."""
    before = small.metric("vllm:prompt_tokens_total")
    once = small.metric("slipway_requests_deduplicated_total")
    headers = {"X-Amzn-SageMaker-Inference-Id": "3f9d"}
    body = {"prompt": "a b c d e f g h", "max_tokens": 2000, "ignore_eos": True}
    tries, answer = 0, None
    while not answer:
        tries += 1
        try:
            with httpx.Client(base_url=small.url) as client:
                answer = client.post("/v1/completions", json=body, headers=headers, timeout=1)
        except httpx.ReadTimeout:
            assert tries < DEADLINE_S
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 2000
    assert small.metric("vllm:prompt_tokens_total") == before + usage["prompt_tokens"]
    assert small.metric("slipway_requests_deduplicated_total") == once + tries - 1 > once
