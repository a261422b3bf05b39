# SPDX-License-Identifier: Apache-2.0
"""The cache_salt of a body, observed in the bodies that the engine gets."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.base import Call
from serving.errors import BadRequest
from serving.inference.content.fields import fields
from serving.kv_cache import salt as kv_salt
from tests.serving.conftest import running

PLAIN = b'{"prompt": "a"}'


def salted(body: bytes, tenant: str | None) -> dict[str, Any]:
    """The request that the engine gets."""
    found = kv_salt.digest(tenant, fields(body).salt(), None)
    ending: Any = None
    return Call("/v1/completions", json.loads(body), 0, ending, "a", salt=found).request


def salt(body: bytes, tenant: str | None = None) -> str:
    found: str = salted(body, tenant)["cache_salt"]
    return found


def body(cache_salt: object) -> bytes:
    return json.dumps({"prompt": "a", "cache_salt": cache_salt}).encode()


def test_without_a_salt_a_body_stays_as_it_is():
    assert salted(PLAIN, None) == json.loads(PLAIN)
    assert salted(body(None), None) == json.loads(body(None))


def test_all_who_differ_have_another_salt():
    cases = [(body("a"), None), (body("b"), None), (PLAIN, "a"), (PLAIN, ""), (body("a"), "b")]
    cases += [(body("b"), "a"), (body("a"), "")]
    salts = [salt(*case) for case in cases]
    assert len({*salts}) == len(cases)
    assert salts == [salt(*case) for case in cases]


def test_the_engine_gets_a_digest():
    assert salt(body("secret")) != "secret"
    assert len(salt(body("../../etc"))) == 32


@pytest.mark.parametrize("refused", [b'{"cache_salt": ["a"]}', b'{"cache_salt": 3}'])
def test_a_salt_that_is_no_text_is_refused(refused):
    with pytest.raises(BadRequest, match="cache_salt should be a text"):
        salted(refused, None)


def test_an_empty_salt_is_refused():
    with pytest.raises(BadRequest, match="cache_salt should not be empty"):
        salted(b'{"cache_salt": ""}', "tenant")


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text()), st.text())
def test_nothing_else_changes(found, tenant):
    found.pop("cache_salt", None)
    whole = json.dumps(found, indent=1).encode() + b" \n"
    assert salted(whole, tenant) == {**found, "cache_salt": salt(whole, tenant)}


def test_escapes_hide_no_salt():
    hidden = b'{"prompt": "a", "cache\\u005fsalt": "b"}'
    for tenant in ("mine", None):
        assert salted(hidden, tenant)["cache_salt"] == salt(body("b"), tenant)


@pytest.mark.anyio
async def test_a_tenant_that_is_named_twice_is_refused():
    """If a gateway added its header beside the client's own, the client would choose the tenant."""
    async with running(cache_salt_header="X-Tenant") as served:
        for headers in (
            [("X-Tenant", "victim"), ("X-Tenant", "attacker")],
            [("X-Tenant", "same"), ("x-tenant", "same")],
            [("X-Tenant", ""), ("X-Tenant", "attacker")],
        ):
            for path, status in (("/invocations", 424), ("/v1/completions", 400)):
                answer = await served.post(path, {"prompt": "a"}, headers=headers)
                assert answer.status_code == status
                assert "the request has X-Tenant 2 times" in answer.text
                assert "victim" not in answer.text
        assert served.engine.bodies == []
        retried = {"X-Amzn-SageMaker-Inference-Id": "1"}
        waits = {"prompt": "a wait"}
        first = asyncio.create_task(served.invoke(waits, headers={**retried, "X-Tenant": "victim"}))
        while not served.engine.bodies:
            await asyncio.sleep(0.01)
        named = [*retried.items(), ("X-Tenant", "victim"), ("X-Tenant", "attacker")]
        assert (await served.invoke(waits, headers=named)).status_code == 424
        served.engine.gate.set()
        assert (await first).status_code == 200
        served.engine.bodies.clear()
        for headers in ([("X-Tenant", "one")], [("X-Tenant", "")], []):
            assert (await served.invoke({"prompt": "a"}, headers=headers)).status_code == 200
        assert len({body["cache_salt"] for body in served.engine.bodies}) == 2


@pytest.mark.anyio
@pytest.mark.parametrize("embeds", [False, True])
async def test_a_salt_stands_at_the_top_of_every_format(embeds):
    async with running() as served:
        served.engine.embeds = embeds
        for found in (
            {"inputs": "a", "cache_salt": "mine"},
            {"inputs": "a", "parameters": {"cache_salt": "mine"}},
            {"inputs": "a", "cache_salt": "mine", "parameters": {"cache_salt": "other"}},
        ):
            assert (await served.invoke(found)).status_code == 200
            [engines] = served.engine.bodies
            assert engines["cache_salt"] == salt(body("mine"))
            served.engine.bodies.clear()
        for path, key in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
            if embeds == (key == "input"):
                answer = await served.post(path, {key: "a", "cache_salt": "mine"})
                assert answer.status_code == 200
                assert served.engine.bodies[-1]["cache_salt"] == salt(body("mine"))
        for wrong in (3, "", ["mine"]):
            answer = await served.invoke({"inputs": "a", "cache_salt": wrong})
            assert answer.status_code == 424
            assert "cache_salt" in answer.text
        assert (await served.invoke({"inputs": "a", "cache_salt": None})).status_code == 200
        assert "cache_salt" not in served.engine.bodies[-1]
