"""What of a client's body reaches the engine, and what of its headers."""

import json

import pytest

from serving.guard import SEQUENCES
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
    async with running(max_request_size=10**6) as it:
        yield it


async def refused(served, path, body) -> str:
    """What is told of a body that the engine did not get."""
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
        ("session_id", "a" * 300),
        ("bad_words", ["word"] * 4000),
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
    ],
)
async def test_one_request_asks_for_so_many_answers(large, body, fits):
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


async def test_no_header_steers_the_engine(shared):
    seen: list[bytes] = []

    async def app(scope, receive, send):
        seen.extend(name for name, _ in scope["headers"])
        await inner(scope, receive, send)

    inner, shared.engine.app = shared.engine.app, app
    try:
        headers = {"X-data-parallel-rank": "1", "X-Vllm-Priority": "-9", "X-Request-Id": "mine"}
        for path in ("/invocations", "/v1/completions"):
            assert (await shared.post(path, {"prompt": "a"}, headers=headers)).status_code == 200
    finally:
        shared.engine.app = inner
    assert b"x-request-id" in seen
    assert not {b"x-data-parallel-rank", b"x-vllm-priority"} & {*seen}


@pytest.mark.parametrize(
    "attributes",
    [
        "route=/v1/load_lora_adapter",
        "route=/adapters",
        "route=/sleep",
        "route=/metrics",
        "route=http://127.0.0.1/",
    ],
)
async def test_custom_attributes_lead_nowhere_else(shared, attributes):
    headers = {"X-Amzn-SageMaker-Custom-Attributes": attributes}
    answer = await shared.invoke({"inputs": "a b"}, headers=headers)
    assert answer.json() == {"generated_text": "b a"}


async def test_an_adapter_call_has_the_limit_of_all_bodies(shared):
    shared.engine.adapters, before = object(), shared.engine.adapters
    try:
        answer = await shared.post("/adapters", b" " * 30_001)
        assert answer.status_code == 413
        assert "SERVING_MAX_REQUEST_SIZE sets the limit" in answer.json()["message"]
        assert "name is missing" in (await shared.post("/adapters", b" " * 30_000)).text
    finally:
        shared.engine.adapters = before
