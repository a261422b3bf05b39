# SPDX-License-Identifier: Apache-2.0
"""Rerank, score, classify, pooling and tokens: limits, errors, salts, the switch, /invocations."""

import pytest

from lmi_config.options.declared import Settings
from serving.inference.content.checks import INPUTS, MESSAGES, SHORTENED, TOKENIZED
from serving.protocol import (
    AGENTS_PATHS,
    AUDIO_PATHS,
    PAIRS_PATHS,
    TOKENIZER_PATHS,
    UNFORMATTED_PATHS,
)
from serving.router.routes import Route as Routed
from serving.router.routes import route_of
from tests.fake_engine import whole
from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

RERANKED = {"query": "a", "documents": ["b", "c"]}
BODIES = {
    "/rerank": RERANKED,
    "/v1/rerank": RERANKED,
    "/v2/rerank": RERANKED,
    "/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/v1/score": {"queries": "a", "items": ["b", "c"]},
    "/classify": {"input": ["a", "b"]},
    "/pooling": {"input": ["a", "b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
async def served(anyio_backend):
    """A server whose engine returns the path and the body that it got."""

    repeat = whole(lambda call: {"path": call.path, "body": call.request})
    async with running(max_request_size=20_000_000) as it:
        it.engine.answers |= dict.fromkeys((*BODIES, "/v1/responses"), repeat)
        yield it


@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_bodies_pass_untouched_but_for_their_salt(served, path, body):
    answer = await served.post(path, body)
    assert answer.json() == {"path": path, "body": body}
    salted = (await served.post(path, {**body, "cache_salt": "mine"})).json()["body"]
    assert (salted["cache_salt"] == "mine") == (path in TOKENIZER_PATHS)  # which have no caches
    missing = await served.post(path, b"[")
    assert missing.status_code == 400
    assert missing.json()["error"].keys() == {"message", "type", "param", "code"}
    assert route_of(b"POST", path) is Routed.INFERENCE


async def test_a_model_that_does_not_do_it_says_so(shared):
    for path in PAIRS_PATHS:
        answer = await shared.post(path, RERANKED)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"the model does not answer {path}"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"query": "a", "documents": ["b"] * (INPUTS + 1)}, f"may have at most {INPUTS} texts"),
        ({"text_1": ["b"] * 200_000, "text_2": "a"}, "text_1 may have at most"),
        ({"query": "a", "documents": [None]}, "documents should be a text or a list of texts"),
        ({"query": "a", "documents": [{"text": "b"}]}, "documents should be a text"),
        ({"query": 5, "documents": []}, "query should be a text"),
        (
            {"query": {"content": [{}] * 5000}, "documents": [{"content": [{}] * 4000}]},
            f"may have {MESSAGES} parts, and these have 9000",
        ),
        ({"query": "a" * 20_000, "documents": ["b"] * 2000}, "with the query beside each document"),
        (
            {"query": "a", "documents": ["b"] * 2000, "instruction": "a" * 20_000},
            "with the query beside each document",
        ),
        (
            {"text_1": "a", "text_2": "b" * (SHORTENED + 1), "max_tokens_per_doc": 5},
            "are not shortened by max_tokens_per_query",
        ),
        ({**RERANKED, "kv_transfer_params": {"a": 1}}, "not for clients"),
    ],
)
async def test_limits_of_comparisons(served, body, told):
    for path in PAIRS_PATHS:
        answer = await served.post(path, body)
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]


async def test_what_comparisons_may_have(served):
    for body in (
        {"query": "a", "documents": ["b"] * INPUTS},
        {"query": "a" * 5_000, "documents": ["b"] * INPUTS},
        {"text_1": "a", "text_2": "b" * (SHORTENED - 100), "max_tokens_per_doc": 5},
        {"text_1": "a", "text_2": "b" * (SHORTENED + 1)},
    ):
        assert (await served.post("/score", body)).status_code == 200


async def test_pictures_to_compare_come_from_allowed_hosts_only(served):
    picture = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/a.png"}}
    for body in (
        {"query": "a", "documents": [{"content": [picture]}]},
        {"query": {"content": [picture]}, "documents": "b"},
    ):
        answer = await served.post("/rerank", body)
        assert answer.status_code == 400
        assert "169.254.169.254" in answer.json()["error"]["message"]


async def test_tokens_have_a_limit(served):
    for path, body in (("/tokenize", b'{"prompt":"%b"}'), ("/detokenize", b'{"tokens":[%b]}')):
        answer = await served.post(path, body % (b"1" * TOKENIZED))
        assert answer.status_code == 400
        assert f"at most {TOKENIZED} bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("secure", "given", "answered"),
    [(False, None, True), (True, None, False), (True, True, True), (False, False, False)],
)
def test_when_tokens_are_told(secure, given, answered):
    assert Settings(secure_mode=secure, enable_tokenize=given).tokenizes is answered


async def test_tokens_are_not_told_where_that_is_switched_off():
    async with running(enable_tokenize=False) as it:
        for path in TOKENIZER_PATHS:
            answer = await it.post(path, BODIES[path])
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"there is nothing at {path}"


@pytest.mark.parametrize(
    ("does", "body", "path"),
    [
        ("generates", {"input": "a"}, "/v1/responses"),
        ("classifies", {"input": "a"}, "/classify"),
        ("classifies", {"query": "a", "documents": ["b"]}, "/rerank"),
        ("classifies", {"text_1": "a", "text_2": "b"}, "/score"),
        ("embeds", {"query": "a", "documents": ["b"]}, "/rerank"),
        ("embeds", {"text_1": "a", "text_2": "b"}, "/score"),
    ],
)
async def test_invocations_by_keys(served, does, body, path):
    served.engine.embeds = does == "embeds"
    served.engine.classifies = does == "classifies"
    try:
        answer = await served.invoke(body)
    finally:
        served.engine.embeds = served.engine.classifies = False
    assert answer.json() == {"path": path, "body": body}


async def test_what_generates_compares_nothing(served):
    answer = await served.invoke(RERANKED)
    assert answer.status_code == 424
    assert "one of the keys prompt, inputs, messages or input" in answer.json()["error"]


async def test_responses_on_invocations_are_not_kept(served):
    answer = await served.invoke({"input": "a", "store": True})
    assert answer.status_code == 424
    assert "no answers are stored here" in answer.json()["error"]


def test_every_path_is_tried():
    assert BODIES.keys() == {*UNFORMATTED_PATHS} - {*AGENTS_PATHS, *AUDIO_PATHS}
