# SPDX-License-Identifier: Apache-2.0
"""Errors for vLLM's exceptions: they contain no text of the client's."""

import json

import httpx
import pytest
from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from tests.serving.engine.vllms_app import with_our_errors

pytestmark = pytest.mark.anyio

RAISED = {
    "absent": HTTPException(404, "no such thing"),
    "wrong": VLLMValidationError("is wrong", parameter="max_tokens", value="hush"),
    "dead": EngineDeadError(),
    "broken": RuntimeError("hush"),
}


@pytest.fixture(scope="module")
def app():
    found = with_our_errors(FastAPI())

    @found.post("/complete", dependencies=[Depends(validate_json_request)])
    async def complete(body: CompletionRequest) -> None: ...

    @found.post("/message")
    async def message(body: AnthropicMessagesRequest) -> None: ...

    @found.post("/respond")
    async def respond(body: ResponsesRequest) -> None: ...

    @found.get("/raise/{kind}")
    async def fail(kind: str) -> None:
        raise RAISED[kind]

    return found


async def answer(app, method, path, content=None, kind="application/json"):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        headers = {"content-type": kind}
        found = await client.request(method, path, content=content, headers=headers)
    assert "hush" not in found.text
    error = found.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == found.status_code
    return found.status_code, error["message"], error["param"]


@pytest.mark.parametrize(
    ("kind", "status", "message", "parameter"),
    [
        ("absent", 404, "no such thing", None),
        ("wrong", 400, "is wrong", "max_tokens"),
        ("dead", 500, "the engine failed; the server's log says why", None),
        ("broken", 500, "the engine failed on this request", None),
    ],
)
async def test_errors_for_exceptions_of_vllms(app, kind, status, message, parameter):
    assert await answer(app, "GET", f"/raise/{kind}") == (status, message, parameter)


async def test_the_first_fault_of_a_body(app):
    content = b'{"prompt": "hush", "temperature": "hush", "stream": "hush"}'
    status, message, parameter = await answer(app, "POST", "/complete", content)
    assert status == 400
    assert parameter in ("temperature", "stream")
    assert message.startswith(f"{parameter}: Input should be")


@pytest.mark.parametrize(
    ("path", "body", "message", "parameter"),
    [
        (
            "/message",
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "Input should be 'text', 'image', 'tool_use'",
            "messages.0.content.0.type",
        ),
        ("/message", {"messages": [{"role": "user", "content": 5}]}, "", "messages.0.content"),
        ("/respond", {"input": [{"type": "hush"}]}, "none of the forms", "input.0"),
        ("/respond", {"input": 5}, "Input should be a valid string", "input"),
    ],
)
async def test_the_fault_is_sought_in_a_list_that_may_be_a_text(
    app, path, body, message, parameter
):
    content = json.dumps({"model": "a", "max_tokens": 1, **body}).encode()
    status, found, where = await answer(app, "POST", path, content)
    assert (status, where) == (400, parameter)
    assert message in found


async def test_a_body_that_is_no_json(app):
    status, message, parameter = await answer(app, "POST", "/complete", b'{"prompt": "hush"')
    assert (status, parameter) == (400, None)
    assert message.startswith("the body is not JSON: ")


async def test_a_body_of_another_type(app):
    found = await answer(app, "POST", "/complete", b"{}", kind="text/plain")
    assert found == (400, "the Content-Type of the body has to be application/json", None)
