# SPDX-License-Identifier: Apache-2.0
"""The fields of a client's body, and the headers, that reach the engine."""

import json

import pytest

from handlers.records import MOST_VALUES
from serving.cache_hints.intent import digest
from serving.inference.content.checks import (
    INPUTS,
    MESSAGES,
    PROMPT_LOGPROBS,
    SEQUENCES,
    TOKENS,
)
from serving.inference.content.fields import GUIDED
from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

REMOTE = {"do_remote_prefill": True, "remote_host": "10.0.0.7", "remote_block_ids": [1]}
INTERNAL = [
    ("kv_transfer_params", REMOTE),
    ("ec_transfer_params", REMOTE),
    ("vllm_xargs", {"kv_cache_report_mode": "full"}),
]


@pytest.fixture(scope="module")
async def large(anyio_backend):
    async with running(max_request_size=10**7) as it:
        yield it


async def refused(served, path, body) -> str:
    """The error for a body that the engine did not get."""
    served.engine.bodies.clear()
    answer = await served.post(path, body)
    assert answer.status_code == (424 if path == "/invocations" else 400), answer.text
    assert served.engine.bodies == []
    return str(answer.json()["error"])


@pytest.mark.parametrize(("key", "value"), INTERNAL)
async def test_internals_of_the_engine_are_not_for_clients(shared, key, value):
    for path, body in (
        ("/invocations", {"inputs": "a", "parameters": {key: value}}),
        ("/invocations", {"prompt": "a", key: value}),
        ("/v1/completions", {"prompt": "a", key: value}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], key: value}),
        ("/v1/completions", b'{"prompt": "a", "%s\\u005f%s": 1}' % (*key.encode().split(b"_", 1),)),
        ("/v1/completions", b'{"%s": null, "prompt": "a", "%s": {}}' % ((key.encode(),) * 2)),
    ):
        told = await refused(shared, path, body)
        assert f"{key} is not for clients; OPTION_TRUST_REQUEST_INTERNALS=true" in told
        assert "10.0.0.7" not in told
    lines = json.dumps({"prompt": "a", key: value}).encode() + b'\n{"prompt": "b"}\n'
    answer = await shared.invoke(lines, headers={"content-type": "application/jsonlines"})
    first, second = map(json.loads, answer.text.splitlines())
    assert key in first["error"]
    assert second["choices"][0]["text"] == "b"
    assert (await shared.invoke({"prompt": "a", key: None})).status_code == 200


@pytest.mark.parametrize(("key", "value"), INTERNAL)
async def test_an_operator_can_trust_all_who_send_requests(key, value):
    async with running(trust_request_internals=True) as served:
        assert (await served.invoke({"prompt": "a", key: value})).status_code == 200
        assert served.engine.bodies[-1][key] == value


async def test_what_lmis_users_send_goes_through(shared):
    parameters = {
        **{
            "max_new_tokens": 9,
            "temperature": 0.5,
            "top_k": 4,
            "repetition_penalty": 1.1,
            "seed": 1,
        },
        **{"stop": ["x"], "bad_words": ["no"], "logit_bias": {"5": 1}, "n": 2, "details": True},
        **{"request_id": "abc", "response_format": {"type": "json_object"}, "best_of": 3},
    }
    answer = await shared.invoke({"inputs": "a", "parameters": parameters})
    assert answer.status_code == 200, answer.text
    for key in parameters.keys() - {"max_new_tokens", "details", "best_of"}:
        assert served_as(shared)[key] == parameters[key]
    assert "best_of" not in served_as(shared)


async def test_parameters_name_no_model(shared):
    """An adapter's inner name would be used without being held, and with the base model's salt."""
    parameters = {"model": "one@0123456789abcdef", "adapters": "one"}
    answer = await shared.invoke({"inputs": "a", "parameters": parameters})
    assert answer.status_code == 200
    assert not parameters.keys() & served_as(shared).keys()


def served_as(served):
    return served.engine.bodies[-1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("request_id", "a" * 300),
        ("bad_words", ["word"] * 4000),
        ("stop", ["x" * 20_000]),
        ("stop_token_ids", [*range(100, 4000)]),
        ("allowed_token_ids", [100_000] * 400_000),
        ("logit_bias", {f"{n:012}": -100 for n in range(120_000)}),
        ("response_format", {"type": "json_schema", "json_schema": {"enum": ["x" * 70_000]}}),
        ("structured_outputs", {"regex": "a" * 70_000}),
        ("tools", [{"type": "function", "function": {"name": "x" * 300_000}}]),
    ],
)
async def test_what_costs_the_engine_more_than_the_client_has_a_limit(large, key, value):
    assert f"{key} has more than " in await refused(
        large, "/v1/completions", {"prompt": "a", key: value}
    )
    lmi = {"inputs": "a", "parameters": {key: value}}
    assert f"{key} has more than " in await refused(large, "/invocations", lmi)


@pytest.mark.parametrize("key", GUIDED)
async def test_a_guided_key_becomes_the_structured_outputs_that_vllm_has_in_its_place(shared, key):
    """vLLM (0.32) ignores these keys, and answers as if they were missing."""
    value = ["yes", "no"] if key == "guided_choice" else "[ab]{2}"
    more = {key: value, "guided_decoding_backend": "outlines", "guided_whitespace_pattern": " "}
    for path, body in (
        ("/invocations", {"inputs": "a", "parameters": more}),
        ("/invocations", {"prompt": "a", "structured_outputs": None} | more),
        ("/v1/completions", {"prompt": "a", "response_format": None} | more),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]} | more),
    ):
        answer = await shared.post(path, body)
        assert answer.status_code == 200, answer.text
        engines = served_as(shared)
        assert engines["structured_outputs"] == {GUIDED[key]: value}
        assert not [it for it in engines if it.startswith("guided")]  # vLLM would warn of them
    assert (await shared.invoke({"prompt": "a", key: None})).status_code == 200
    assert "structured_outputs" not in served_as(shared)


@pytest.mark.parametrize(
    "more",
    [
        {"guided_regex": "a"},
        {"structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}},
    ],
)
async def test_a_guided_key_stands_alone(shared, more):
    parameters = {"guided_json": {"type": "object"}, **more}
    told = f"guided_json and {next(iter(more))} cannot both"
    for path, body in (
        ("/invocations", {"inputs": "a", "parameters": parameters}),
        ("/v1/completions", {"prompt": "a"} | parameters),
        ("/v1/chat/completions", {"messages": [user()]} | parameters),
    ):
        assert told in await refused(shared, path, body)


async def test_a_guided_key_beside_a_name_that_is_no_text(shared):
    body = b'{"prompt": "a", "guided_regex": "a", "\xff": 1}'
    assert "not JSON" in await refused(shared, "/v1/completions", body)


async def test_a_guided_key_has_the_limit_of_structured_outputs(large):
    parameters = {"guided_regex": "a" * 70_000}
    for path, body in (
        ("/invocations", {"inputs": "a", "parameters": parameters}),
        ("/v1/completions", {"prompt": "a"} | parameters),
    ):
        assert "structured_outputs has more than 65536 bytes" in await refused(large, path, body)


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({"prompt": "a", "n": SEQUENCES}, True),
        ({"prompt": "a", "n": SEQUENCES + 1}, False),
        ({"prompt": ["a"] * 8, "n": SEQUENCES // 8}, True),
        ({"prompt": ["a"] * 8, "n": SEQUENCES // 8 + 1}, False),
        ({"prompt": [[1, 2]] * 8, "n": SEQUENCES // 8 + 1}, False),
        ({"prompt": [1] * 2000, "n": 2}, True),
        ({"prompt": [], "n": 2}, True),
        ({"inputs": ["a"] * 8, "parameters": {"n": 200, "details": True}}, False),
        ({"inputs": ["short"] * 1000}, True),
        ({"inputs": ["a"] * (SEQUENCES + 1)}, False),
        ({"prompt": ["a"] * (SEQUENCES + 1)}, False),
    ],
)
async def test_the_number_of_a_requests_answers_has_a_limit(large, body, fits):
    if fits:
        # The fake engine takes no tokens; what matters is that it is asked.
        large.engine.bodies.clear()
        await large.invoke(body)
        assert len(large.engine.bodies) == 1
    else:
        told = await refused(large, "/invocations", body)
        assert f"n times the prompts may be at most {SEQUENCES}" in told


@pytest.mark.parametrize("n", ["2000", 2.5, [5], True])
async def test_n_is_a_number(shared, n):
    assert "n should be a whole number" in await refused(
        shared, "/v1/completions", {"prompt": "a", "n": n}
    )


@pytest.fixture
async def embedding(anyio_backend):
    async with running(max_request_size=10**7) as it:
        it.engine.embeds = True
        yield it


async def test_the_number_of_a_requests_inputs_has_a_limit(embedding):
    for path, key in (("/v1/embeddings", "input"), ("/invocations", "inputs")):
        for inputs in (["a"] * INPUTS, ["short"] * 1000, "a"):
            assert (await embedding.post(path, {key: inputs})).status_code == 200
        for much in (["a"] * (INPUTS + 1), ["a"] * 200_000):
            assert f"at most {INPUTS} inputs" in await refused(embedding, path, {key: much})
    tokens = {"input": [[1, 2]] * (INPUTS + 1)}
    assert "inputs" in await refused(embedding, "/v1/embeddings", tokens)
    for key in ("messages", "input"):
        conversation = [{"role": "user", "content": "a"}]
        batch = {key: [conversation] * (INPUTS + 1)}
        assert "inputs" in await refused(embedding, "/v1/embeddings", batch)


def user(*parts):
    return {"role": "user", "content": [*parts] if parts else "a"}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [user()] * (MESSAGES + 1)},
        {"messages": [user(*["a"] * MESSAGES)]},
        {"messages": [user(*["a"] * (MESSAGES // 2))] * 2},
        {"messages": [[user()]] * 2 + [[user()] * MESSAGES]},
        {"messages": [[], [user()] * (MESSAGES + 1)]},
        {"input": [user()] * (MESSAGES + 1)},
        {"input": [[user()] * (MESSAGES + 1)]},
        {"input": [{"type": "function_call_output", "output": ["a"] * (MESSAGES + 1)}]},
    ],
)
async def test_the_number_of_a_requests_messages_has_a_limit(large, embedding, body):
    """The engine's models take long to read each of them, and block the event loop."""
    path = "/v1/embeddings" if "input" in body else "/v1/chat/completions"
    assert f"may have {MESSAGES} messages" in await refused(embedding, path, body)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"input": [1, 2]}, "input should be a text or a list of items"),
        ({"input": ["a"]}, "input should be a text or a list of items"),
        ({"input": {"a": 1}}, "input should be a text or a list of items"),
        (
            {"input": [{"type": "file_search_call", "tools": [1] * (MOST_VALUES + 2)}]},
            f"input may have at most {MOST_VALUES} values",
        ),
        ({"tools": [1]}, "tools should be a list of objects"),
        ({"tools": [{}] * (INPUTS + 1)}, f"tools may be at most {INPUTS}"),
    ],
)
async def test_the_engine_does_not_report_on_each_item(large, more, told):
    """The engine's model of a request would take seconds for 60 KB of numbers, and block the event
    loop.
    """
    assert told in await refused(large, "/v1/responses", {"input": "a"} | more)


async def test_items_that_are_no_text_are_refused(shared):
    assert "list of items" in await refused(shared, "/v1/responses", b'{"input":[{"a":"\xff"}]}')


async def test_the_parts_before_messages_have_a_limit(large):
    """The same limit on Anthropic's path."""
    body = {"messages": [user()], "system": ["a"] * (INPUTS + 1)}
    assert f"system may have {INPUTS} parts" in await refused(large, "/v1/messages", body)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": [-1] * 100}, "prompt should be"),
        ({"prompt": [1, "a"]}, "prompt should be"),
        ({"prompt": ["a", 1]}, "prompt should be"),
        ({"prompt": [[1], ["a"]]}, "prompt should be"),
        ({"prompt": [[[1]]]}, "prompt should be"),
        ({"prompt": [None]}, "prompt should be"),
        ({"messages": [1]}, "messages should be"),
        ({"messages": ["a"]}, "messages should be"),
        ({"messages": [[], [1]]}, "messages should be"),
        ({"messages": [user(), 1]}, "messages should be"),
        ({"prompt": [1] * (TOKENS + 1)}, "more than 2097152 tokens"),
        ({"prompt": [[1] * (TOKENS // 2 + 1)] * 2}, "more than 2097152 tokens"),
    ],
)
async def test_a_list_that_the_engine_would_explain_item_by_item_is_refused(large, body, told):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    assert told in await refused(large, path, body)


async def test_a_conversation_is_one_input(large):
    messages = [{"role": "user", "content": "a"}] * (INPUTS + 1)
    assert (await large.invoke({"messages": messages})).status_code == 200


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ({"max_pattern_size": 64, "min_count": 8}, True),
        ({"max_pattern_size": 50, "min_pattern_size": 3, "min_count": 10}, True),
        ({"max_pattern_size": 20, "min_count": 3}, True),
        ({}, True),
        (None, True),
        ({"max_pattern_size": 65, "min_count": 2}, False),
        ({"max_pattern_size": 64, "min_count": 9}, False),
        ({"max_pattern_size": 10**9, "min_pattern_size": 2000, "min_count": 2}, False),
        ({"max_pattern_size": 2, "min_count": 10**9}, False),
    ],
)
async def test_repetitions_are_looked_for_in_few_tokens(shared, found, fits):
    """The engine searches for them after every token, in the loop that serves everybody."""
    for path, body in (
        ("/v1/completions", {"prompt": "a", "repetition_detection": found}),
        ("/invocations", {"inputs": "a", "parameters": {"repetition_detection": found}}),
    ):
        if fits:
            assert (await shared.post(path, body)).status_code == 200
        else:
            assert "max_pattern_size" in await refused(shared, path, body)


@pytest.mark.parametrize("found", [[], 3, {"max_pattern_size": "64"}, {"min_count": 2.5}])
async def test_repetition_detection_has_whole_numbers(shared, found):
    body = {"prompt": "a", "repetition_detection": found}
    assert "whole numbers" in await refused(shared, "/v1/completions", body)


LONG = "a" * (PROMPT_LOGPROBS // 21)


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({"prompt": LONG, "prompt_logprobs": 20}, False),
        ({"prompt": LONG, "prompt_logprobs": 19}, True),
        ({"prompt": LONG, "logprobs": 20, "echo": True}, False),
        ({"prompt": LONG, "logprobs": 20, "echo": 1}, False),
        ({"prompt": LONG, "logprobs": 20}, True),
        ({"prompt": LONG, "echo": True}, True),
        ({"prompt": LONG, "prompt_logprobs": 0, "n": 30}, False),
        ({"prompt": [LONG[:1000]] * 1000, "prompt_logprobs": True, "n": 1}, True),
        ({"messages": [{"role": "user", "content": LONG}], "prompt_logprobs": 20}, False),
        (
            {"messages": [{"role": "user", "content": LONG}], "echo": True, "top_logprobs": 20},
            False,
        ),
        ({"messages": [{"role": "user", "content": LONG}], "echo": True}, True),
        ({"inputs": LONG, "parameters": {"details": True, "decoder_input_details": True}}, True),
    ],
)
async def test_log_probabilities_of_prompts_have_a_limit(large, body, fits):
    """vLLM makes an object for each of them."""
    large.engine.bodies.clear()
    if fits:
        assert (await large.invoke(body)).status_code == 200
    else:
        assert "log probabilities of prompts" in await refused(large, "/invocations", body)


@pytest.mark.parametrize("value", ["many", [1]])
async def test_prompt_logprobs_is_a_number(shared, value):
    body = {"prompt": "a", "prompt_logprobs": value}
    told = await refused(shared, "/v1/completions", body)
    assert "prompt_logprobs should be a whole number" in told


async def calls_of(served, headers):
    """The engine's calls for a request with these headers, on two paths."""
    served.engine.calls.clear()
    for path in ("/invocations", "/v1/completions"):
        answer = await served.post(path, {"prompt": "a"}, headers=headers)
        assert answer.status_code == 200, answer.text
    assert len(served.engine.calls) == 2
    return served.engine.calls


async def test_no_header_steers_the_engine(shared):
    headers = {"X-data-parallel-rank": "1", "X-Vllm-Priority": "-9", "X-Request-Id": "mine"}
    headers |= {"endpoint-load-metrics-format": "JSON", "Cookie": "a", "X-Slipway-Lean": "1"}
    headers |= {"Authorization": "Bearer of-a-key", "Accept-Language": "en"}
    headers |= {"content-type": "application/json"}
    for call in await calls_of(shared, headers):
        told = (call.request_id, call.trace, call.session, call.priority)
        assert told == ("mine", {}, None, None)
        assert call.request == {"prompt": "a"}


async def test_headers_that_the_engine_reads(shared):
    trace = {"traceparent": "00-1", "tracestate": "a=b"}
    headers = {**trace, "X-Session-ID": "s", "content-type": "application/json"}
    for call in await calls_of(shared, headers):
        assert (call.trace, call.session) == (trace, digest(None, "s"))


@pytest.mark.parametrize(
    "attributes",
    [
        "route=/v1/load_lora_adapter",
        "route=/adapters",
        "route=/sleep",
        "route=/metrics",
        "route=http://127.0.0.1/",
        "route=/v1/completions/",
        "a=1, route=/v1/files",
        "route=",
    ],
)
async def test_custom_attributes_lead_nowhere_else(shared, attributes):
    headers = {"X-Amzn-SageMaker-Custom-Attributes": attributes}
    shared.engine.bodies.clear()
    answer = await shared.invoke({"inputs": "a b", "prompt": "a b"}, headers=headers)
    assert answer.status_code == 424
    assert "it should be one of /v1/chat/completions, /v1/completions, " in answer.json()["error"]
    assert shared.engine.bodies == []


@pytest.mark.parametrize("attributes", ["route=/v1/completions", "a=1;route=/v1/completions, b=2"])
async def test_custom_attributes_lead_to_the_engines_own_paths(shared, attributes):
    headers = {"X-Amzn-SageMaker-Custom-Attributes": attributes}
    body = {"prompt": "a b", "inputs": "c"}
    there = await shared.invoke(body, headers=headers)
    assert there.json() == (await shared.post("/v1/completions", body)).json()
    streamed = await shared.invoke(body | {"stream": True}, headers=headers)
    assert streamed.text.endswith("data: [DONE]\n\n")
    lines = {"content-type": "application/jsonlines", **headers}
    answer = await shared.invoke(b'{"prompt":"a"}\n{"prompt":"b"}\n', headers=lines)
    assert "is for one request; several lines came" in answer.text


@pytest.mark.parametrize("attributes", ["route=/invocations", "reroute=/adapters", "a=1"])
async def test_other_custom_attributes_are_left_alone(shared, attributes):
    headers = {"X-Amzn-SageMaker-Custom-Attributes": attributes}
    answer = await shared.invoke({"inputs": "a b"}, headers=headers)
    assert answer.json() == {"generated_text": "b a"}


async def test_an_adapter_call_has_the_limit_of_all_bodies(shared):
    shared.pipeline.adapters, before = object(), shared.pipeline.adapters
    try:
        answer = await shared.post("/adapters", b" " * 30_001)
        assert answer.status_code == 413
        assert "SERVING_MAX_REQUEST_SIZE sets the limit" in answer.json()["message"]
        assert "name is missing" in (await shared.post("/adapters", b" " * 30_000)).text
    finally:
        shared.pipeline.adapters = before


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/completions", {"prompt": "a", **{f"k{n}": n for n in range(140_000)}}, "keys"),
        ("/v1/completions", {"prompt": "a", "x": [0] * 2_700_000}, "values"),
        ("/v1/completions", b'{"prompt":"a","x":[%b]}' % b",".join([b"[]"] * 2_700_000), "values"),
        ("/v1/completions", {"prompt": "a", "x": [""] * 1_100_000}, "texts"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a", "x": [{}] * 70_000}]},
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": [], "documents": [{}] * 70_000},
            "documents may have",
        ),
        (
            "/v1/chat/completions",
            {"messages": [], "chat_template_kwargs": {f"{n}": 1 for n in range(8000)}},
            "kwargs",
        ),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"1": "x"}}, "token ids to numbers"),
        *(
            ("/v1/completions", {"prompt": "a", key: it}, "between -2^63")
            for key in ("top_k", "stream_interval", "priority")
            for it in (2**64, -(2**64), 10**400)
        ),
    ],
    ids=lambda it: f"{it}"[:40],
)
async def test_the_keys_and_values_of_a_body_have_limits(large, path, body, told):
    assert told in await refused(large, path, body)


async def test_the_keys_of_a_request_that_may_be_repeated_have_a_limit(large):
    """The field `stream` is read before all other fields, because a stream's answer is not
    shared.
    """
    body = {"prompt": "a", "stream": False, **{f"k{n}": n for n in range(140_000)}}
    answer = await large.post(
        "/v1/completions", body, headers={"X-Amzn-SageMaker-Inference-Id": "1"}
    )
    assert (answer.status_code, "at most 131072 keys" in answer.text) == (400, True)


async def test_marks_in_texts_are_no_values(large):
    text = '{[,:"' * 600_000
    answer = await large.post("/v1/completions", {"prompt": text})
    assert answer.status_code == 200


@pytest.mark.parametrize("prompt", [[{}] * 9, [{"a": 1}], [[{}]], [1.5], ["a", 1], [[1], "a"]])
async def test_prompts_are_texts_or_tokens(served, prompt):
    """For each item, vLLM would report why it is neither, and block the event loop."""
    answer = await served.client.post("/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400
    assert "prompt should be a text or tokens" in answer.text
