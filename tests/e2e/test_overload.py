# SPDX-License-Identifier: Apache-2.0
"""Far more clients than the real engine has room for, and clients that leave or retry."""

import asyncio
import json

import httpx
import pytest

from tests.e2e.conftest import serving
from tests.support.harness.wait import until

SEQUENCES = 8
SHARE = 10  # that many, and a quarter more
QUEUE = 64
CLIENTS = 512
DEADLINE_S = 300  # for a busy machine; a request that would wait longer is refused
ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(tiny_options, tmp_path_factory):
    """The tiny model with room for few requests."""
    environ = tiny_options | {
        "OPTION_MAX_ROLLING_BATCH_SIZE": str(SEQUENCES),
        "SERVING_JOB_QUEUE_SIZE": str(QUEUE),
        "OPTION_PREDICT_TIMEOUT": str(DEADLINE_S),
    }
    with serving(tmp_path_factory.mktemp("small") / "log", **environ) as it:
        it.ready()
        yield it


def engine(it):
    return it.total("vllm:num_requests_running", "vllm:num_requests_waiting")


def test_512_clients_and_a_queue_of_64(small):
    async def ask(client, number):
        prompt, stream = f"import {number}", number % 4 == 3
        if number % 2:
            parameters = {"max_new_tokens": 50, "ignore_eos_token": True}
            body = {"inputs": prompt, "parameters": parameters, "stream": stream}
            return await client.post("/invocations", json=body)
        body = {"prompt": prompt, "max_tokens": 50, "ignore_eos": True}
        return await client.post("/v1/completions", json=body)

    refused = 'slipway_requests_refused_total{reason="queue_full"}'
    before = small.metric(refused)

    def all_know():
        inside = [small.metric(f"slipway_requests_{name}") for name in ("in_flight", "queued")]
        return [*inside, small.metric(refused) - before] == [SHARE, QUEUE, CLIENTS - SHARE - QUEUE]

    async def all_at_once():
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(
            base_url=small.url, timeout=DEADLINE_S, limits=limits
        ) as client:
            with small.held():
                asked = asyncio.gather(*(ask(client, number) for number in range(CLIENTS)))
                await asyncio.to_thread(until, all_know, DEADLINE_S)
            return await asked

    answers = asyncio.run(all_at_once())
    told = {status: sum(it.status_code == status for it in answers) for status in (200, 503)}
    assert told == {200: SHARE + QUEUE, 503: CLIENTS - SHARE - QUEUE}
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
    left = "slipway_requests_queued", "slipway_requests_in_flight"
    until(lambda: small.total(*left) == engine(small) == 0)


def test_a_retry_is_not_computed_again(small):
    """boto3 retries in this way: it closes the connection after a time-out, and sends the request
    again.
    """
    computed, shared = "vllm:prompt_tokens_total", "slipway_requests_deduplicated_total"
    small.counted()
    before, once = small.metric(computed), small.metric(shared)
    headers = {"X-Amzn-SageMaker-Inference-Id": "3f9d"}
    body = {"prompt": "a b c d e f g h", "max_tokens": 20, "ignore_eos": True}

    def ask(client):
        return client.post("/v1/completions", json=body, headers=headers)

    async def insist():
        async with httpx.AsyncClient(base_url=small.url, timeout=DEADLINE_S) as client:
            with small.held():
                for n in range(3):
                    asked = asyncio.create_task(ask(client))
                    known = ("slipway_requests_in_flight", 1), (shared, once + n)
                    for name, count in known:
                        await asyncio.to_thread(until, lambda k=name, c=count: small.metric(k) == c)
                    if n < 2:
                        asked.cancel()
            return await asked

    answer = asyncio.run(insist())
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 20
    until(lambda: small.metric(computed) == before + usage["prompt_tokens"])
