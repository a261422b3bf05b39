# SPDX-License-Identifier: Apache-2.0
"""Requests that agents' APIs refuse, with the error texts: OpenAI's Responses, and Anthropic's
Messages.
"""

import json

import msgspec
import pytest

from serving.errors import BadRequest, EngineFailed, NotFound, NotReady, TimedOut, shape
from tests.fake_engine import streaming, whole
from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
SAID = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("previous_input_messages", SAID),
        ("background", True),
        ("store", True),
    ],
)
async def test_no_responses_are_kept(shared, key, value):
    answer = await shared.post(RESPONSES, {"input": "a", key: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(f"{key}: no answers are stored here; ")
    assert error["param"] == key


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (RESPONSES, {"input": "a", "kv_transfer_params": {}}, "not for clients"),
        (RESPONSES, {"input": "a", "text": {"format": "a" * 70_000}}, "text has more than"),
        (MESSAGES, {"messages": SAID, "vllm_xargs": {"a": 1}}, "not for clients"),
        (MESSAGES, {"messages": SAID, "output_config": "a" * 70_000}, "output_config has more"),
        (MESSAGES, {"messages": SAID, "stop_sequences": ["a" * 17_000]}, "stop_sequences has"),
        (COUNT, {"messages": SAID, "metadata": {"a": "a" * 17_000}}, "metadata has more than"),
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "system",
                        "content": [{"type": "tool_addition", "tool": "a" * 300_000}],
                    }
                ]
            },
            "the tools in messages have more than",
        ),
    ],
)
async def test_limits(path, body, told):
    async with running(max_request_size=10**6) as served:
        answer = await served.post(path, body)
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("no"), 400, "invalid_request_error"),
        (NotFound("no"), 404, "not_found_error"),
        (NotReady("no"), 503, "overloaded_error"),
        (TimedOut(3), 504, "timeout_error"),
        (EngineFailed("no"), 500, "api_error"),
    ],
)
def test_errors_as_anthropic_has_them(error, status, kind):
    errors = shape(MESSAGES)
    assert errors.status(error) == status
    found = msgspec.json.decode(errors.body(error))
    assert found == {"type": "error", "error": {"type": kind, "message": str(error)}}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            RESPONSES,
            {
                "type": "error",
                "code": "InternalServerError",
                "message": "the engine ended the answer early; the server's log says why",
                "param": None,
            },
        ),
        (
            MESSAGES,
            {
                "type": "error",
                "error": {
                    "type": "api_error",
                    "message": "the engine ended the answer early; the server's log says why",
                },
            },
        ),
    ],
)
async def test_an_error_in_a_stream_is_an_event_of_its_api(path, expected):
    first = 'event: begun\ndata: {"type":"begun"}\n\n'
    async with running() as served:
        served.engine.answers[path] = streaming(first.encode(), RuntimeError("boom"))
        answer = await served.post(path, {"input": "a", "messages": SAID, "stream": True})
    assert answer.status_code == 200
    begun, error, end = answer.text.split("\n\n")
    assert begun == first.strip()
    name, data = error.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == expected
    assert end == ""


async def test_what_the_engine_says_in_a_stream_of_messages_is_not_repeated():
    events = (b"event: a\ndata: {}\n\n", EngineFailed("deep inside"))
    async with running() as served:
        served.engine.answers[MESSAGES] = streaming(*events)
        answer = await served.post(MESSAGES, {"messages": SAID, "stream": True})
    assert "deep inside" not in answer.text
    assert "the engine failed while it generated" in answer.text


async def test_an_engines_refusal_has_the_shape_of_the_api():
    async def refuse(call, sink, usage):
        await sink.fail(BadRequest("not like this"))

    async with running() as served:
        served.engine.answers[MESSAGES] = refuse
        answer = await served.post(MESSAGES, {"messages": SAID})
    assert answer.status_code == 400
    assert answer.json() == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "not like this"},
    }


@pytest.mark.parametrize(
    ("headers", "more"),
    [
        ({"anthropic-version": "2023-06-01"}, {}),
        ({}, {"anthropic_version": "bedrock-2023-05-31"}),
        ({"X-Amzn-SageMaker-Custom-Attributes": f"route={MESSAGES}"}, {"model": "lmi"}),
    ],
)
async def test_messages_in_anthropics_shape_on_invocations(headers, more):
    asked = []

    def messages(call):
        asked.append(call.request)
        return {"type": "message"}

    async with running() as it:
        it.engine.answers[MESSAGES] = whole(messages)
        answer = await it.invoke({"max_tokens": 8, "messages": SAID, **more}, headers=headers)
        assert answer.json() == {"type": "message"}
        (body,) = asked
        assert body["model"] in it.settings.model_names
        chat = await it.invoke({"messages": SAID})
        assert "choices" in chat.json()
