# SPDX-License-Identifier: Apache-2.0
"""A server's part of a request that a router splits between two servers."""

import asyncio
import hashlib
import json

import pytest
from prometheus_client import REGISTRY

from serving.access.caller import Caller, HandOver
from serving.engine.base import HANDED_OVER, RECEIVED
from tests.serving.access.test_access import SECRET, identity_for
from tests.serving.conftest import running
from tests.support.harness.wait import until_async

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
    headers["x-slipway-identity"] = await identity_for(it, caller)
    return await it.client.post(path, content=json.dumps(body), headers=headers)


def used() -> float:
    """Tokens that are charged to a caller."""
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


@pytest.fixture(scope="module")
async def transferring(anyio_backend):
    """A server whose engine fetches KV from other engines."""
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    async with running(
        router_secret=SECRET, server_role="prefill", kv_transfer_config=connector
    ) as it:
        yield it


WHERE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.5"}


async def hand_over(it, path, body, front=None, signed=None, **more):
    """Send a request whose body begins with the transfer parameters of its prompt's KV. signed:
    bytes that are signed instead of these parameters.
    """
    front = json.dumps(WHERE).encode() if front is None else front
    digest = hashlib.sha256(front if signed is None else signed).hexdigest()
    more = {"phase": "decode", "hand_over": HandOver(len(front), digest), **more}
    identity = await identity_for(it, Caller(tenant="team-a", counted=True, **more))
    headers = {"x-slipway-identity": identity}
    return await it.client.post(path, content=front + json.dumps(body).encode(), headers=headers)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_prompt_is_kept_for_an_engine_that_fetches_it(transferring, path, body):
    it = transferring
    body = json.loads(json.dumps(body))
    body.pop("n", None)
    assert (await ask(it, path, body, "prefill")).status_code == 200
    assert it.engine.bodies[-1]["kv_transfer_params"] == {"do_remote_decode": True}
    answer = await hand_over(it, path, body)
    assert answer.status_code == 200
    assert "remote" not in answer.text
    params = it.engine.bodies[-1]["kv_transfer_params"]
    assert params.pop(RECEIVED)
    assert params == WHERE
    assert (await ask(it, path, body, "")).status_code == 200
    assert "kv_transfer_params" not in it.engine.bodies[-1]


@pytest.mark.parametrize("several", [{"n": 3}, {"prompt": ["a", "b"]}])
async def test_what_would_be_fetched_several_times_is_computed(transferring, several):
    """vLLM frees a prompt's KV after it was fetched once."""
    body = {"prompt": "a", **several}
    answer = await ask(transferring, "/v1/completions", body, "prefill")
    assert answer.status_code == 400
    assert (await hand_over(transferring, "/v1/completions", body)).status_code == 200
    assert transferring.engine.bodies[-1]["kv_transfer_params"] == {HANDED_OVER: True}


async def test_each_line_of_a_body_is_computed_but_the_first(transferring):
    front = json.dumps(WHERE).encode()
    signed = HandOver(len(front), hashlib.sha256(front).hexdigest())
    caller = Caller(counted=True, phase="decode", hand_over=signed)
    answer = await transferring.client.post(
        "/invocations",
        content=front + b'{"inputs": "a b"}\n{"inputs": "c d"}',
        headers={
            "x-slipway-identity": await identity_for(transferring, caller),
            "content-type": "application/jsonlines",
        },
    )
    assert answer.status_code == 200, answer.text
    got = [it["kv_transfer_params"] for it in transferring.engine.bodies[-2:]]
    assert sorted("remote_host" in it for it in got) == [False, True]


@pytest.mark.parametrize("front", [b"", b"{}", b'{"do_remote_prefill": true}'])
async def test_only_what_the_router_has_signed_is_fetched(transferring, front):
    before = len(transferring.engine.bodies)
    body = {"prompt": "a"}
    answer = await hand_over(transferring, "/v1/completions", body, front, signed=b"other")
    assert answer.status_code == 400
    assert "differ from those that the router signed" in answer.text
    own = {**body, "kv_transfer_params": WHERE}
    for answer in (
        await hand_over(transferring, "/v1/completions", own),
        await ask(transferring, "/v1/completions", own, ""),
    ):
        assert answer.status_code == 400
        assert "kv_transfer_params is not for clients" in answer.text
    assert len(transferring.engine.bodies) == before


async def test_what_leads_to_a_prompts_kv_is_no_part_of_the_clients_body(transferring):
    """Its size counts against no limit: the limit is 30,000 bytes here."""
    front = json.dumps({**WHERE, "remote_block_ids": [[*range(9000)]]}).encode()
    assert len(front) > 30_000
    body = {"prompt": "a " * 14_000}
    assert (await hand_over(transferring, "/v1/completions", body, front)).status_code == 200
    body = {"prompt": "a " * 16_000}
    answer = await hand_over(transferring, "/v1/completions", body, front)
    assert answer.status_code == 413
    assert "30000" in answer.text.replace(",", "")


async def test_a_retry_of_a_whole_request_gets_no_prefills_answer(server):
    """Both requests have the client's Inference-Id."""
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


@pytest.mark.parametrize(
    "front",
    [
        *(
            b"",
            b"[]",
            b"{",
            b'{"a":"\xff"}',
            b'{"tp_size":1e999}',
            b'{"tp_size":' + b"9" * 5000 + b"}",
        ),
        *(
            b'{"a":' * 5000 + b"1" + b"}" * 5000,
            b'{"do_remote_prefill":true,"remote_block_ids":"a"}',
        ),
        *(b'{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_port":"x"}', b"{}"),
    ],
)
async def test_what_was_signed_and_leads_nowhere_is_computed_here(transferring, front):
    """A router of another version, or with wrong data, costs no answer."""
    answer = await hand_over(transferring, "/v1/completions", {"prompt": "a"}, front)
    assert answer.status_code == 200, answer.text
    assert transferring.engine.bodies[-1]["kv_transfer_params"] == {HANDED_OVER: True}


async def test_what_was_computed_of_a_prompt_that_nobody_waits_for_is_charged(server):
    server.engine.gate.clear()
    before = used()
    asked = asyncio.create_task(ask(server, "/v1/completions", {"prompt": "wait a b"}, "prefill"))
    await until_async(lambda: server.engine.running == 1)
    asked.cancel()
    await until_async(lambda: used() > before)
    server.engine.gate.set()
