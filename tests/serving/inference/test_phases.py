# SPDX-License-Identifier: Apache-2.0
"""What a server does of a request that a router has two servers answer."""

import asyncio
import json

import pytest
from prometheus_client import REGISTRY

from scripts.harness.wait import until_async
from serving.access.caller import Caller
from serving.access.identity import Signer
from serving.engine.base import HANDED_OVER
from tests.serving.access.test_access import SECRET
from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

STREAMED = {"stream": True, "max_tokens": 50, "n": 3}
MESSAGES = [{"role": "user", "content": "a b"}]
BODIES = [
    ("/v1/completions", {"prompt": "a b", **STREAMED, "min_tokens": 9, "logprobs": 5}),
    ("/v1/chat/completions", {"messages": MESSAGES, **STREAMED, "max_completion_tokens": 50}),
    ("/invocations", {"inputs": "a b", "parameters": {"max_new_tokens": 50}, "stream": True}),
]


@pytest.fixture(scope="module")
async def server(anyio_backend):
    async with running(router_secret=SECRET) as it:
        yield it


async def ask(it, path, body, phase, **headers):
    caller = Caller(name="team-a", tenant="team-a", counted=True, phase=phase)
    headers["x-slipway-identity"] = Signer(SECRET).signed(caller).decode()
    return await it.client.post(path, content=json.dumps(body), headers=headers)


def used() -> float:
    """Tokens that are counted as somebody's."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "slipway_tokens_total"
    )


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_prompt_alone_is_computed_and_nobodys(server, path, body):
    before = used()
    assert (await ask(server, path, body, "prefill")).status_code == 200
    got = server.engine.bodies[-1]
    assert (got["max_tokens"], got["stream"], got["n"]) == (1, False, 1)
    assert not any(got.get(key) for key in ("min_tokens", "max_completion_tokens", "logprobs"))
    assert "kv_transfer_params" not in got
    prefilled = used()
    assert prefilled == before
    assert (await ask(server, path, body, "decode")).status_code == 200
    whole = server.engine.bodies[-1]
    assert whole.pop("kv_transfer_params") == {HANDED_OVER: True}
    assert {**got, **whole} == {**got, **whole, "cache_salt": got["cache_salt"]}  # of one tenant
    assert used() > before


async def test_a_retry_of_a_whole_request_gets_no_prefills_answer(server):
    """Both have the Inference-Id of the client's."""
    body = {"inputs": "wait a b", "parameters": {"max_new_tokens": 50}}
    headers = {"x-amzn-sagemaker-inference-id": "one"}
    asked = []
    for count, phase in enumerate(("", "prefill"), 1):
        work = ask(server, "/invocations", body, phase, **headers)
        asked.append(asyncio.create_task(work))
        await until_async(lambda count=count: server.engine.running == count)
    server.engine.gate.set()
    assert {it.status_code for it in await asyncio.gather(*asked)} == {200}


KEYS = {"/v1/responses": "input", "/v1/embeddings": "input"}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/tokenize"])
async def test_nothing_else_is_computed_for_others(server, path):
    answer = await ask(server, path, {KEYS.get(path, "prompt"): "a"}, "prefill")
    assert answer.status_code == 400
    assert f"prompts on {path} are not computed for other servers" in answer.text


async def test_a_client_cannot_say_so_itself(server):
    for params in ({HANDED_OVER: True}, {"do_remote_prefill": True}):
        body = {"prompt": "a", "kv_transfer_params": params}
        for phase in ("", "decode"):
            answer = await ask(server, "/v1/completions", body, phase)
            assert answer.status_code == 400
            assert "kv_transfer_params is not for clients" in answer.text
