# SPDX-License-Identifier: Apache-2.0
"""vLLM's models of requests, mended: bodies that took minutes are fast, and other bodies read as
before.
"""

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from serving.engine import vllm
from serving.engine.patches.frontend import forms
from serving.errors import BadRequest
from serving.inference.content import checks
from serving.inference.content.fields import fields
from tests.serving.engine import vllms_app

USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "a", "parameters": {}}}
UNITS: dict[str, list[tuple[str, Any]]] = {
    "/v1/responses": [
        *(("input", it) for it in (USER, {}, 5, "a", [], {"a": [1] * 50}, {"type": "a"})),
        *(("input", USER | {"content": it}) for it in (1, [{}] * 30, [5] * 30, [{"type": "x"}])),
        *(("input", {"type": it, "x": [{}] * 60}) for it in ("reasoning", "message", "mcp_call")),
        ("input", {"type": "additional_tools", "role": "developer", "tools": [{}] * 20}),
        ("input", {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}),
        ("input", {"type": "function_call_output", "call_id": "a", "output": [{}] * 30}),
        ("input", {"type": "file_search_call", "results": [{"attributes": {"a": []}}] * 9}),
        *(("tools", it) for it in ({}, {"type": "function"}, {"type": "file_search"})),
        ("include", "a"),
        ("previous_input_messages", {}),
    ],
    "/v1/chat/completions": [
        *(("messages", it) for it in (USER, {}, 5, {"role": 5}, {"role": "user", "content": [{}]})),
        ("messages", {"role": "assistant", "content": [{"type": "x", "y": {}}] * 30}),
        ("messages", {"role": "assistant", "tool_calls": [{}] * 30}),
        ("messages", {"role": "assistant", "tool_calls": [TOOL] * 30}),
        *(("documents", it) for it in ({"a": "b"}, 5, [])),
        *(("tools", it) for it in (TOOL, {}, 5)),
        *(("logprob_token_ids", it) for it in ("a", 5)),
    ],
    "/v1/messages": [
        *(("messages", it) for it in (USER, {}, 5, {"role": "user", "content": [{}] * 30})),
        ("messages", {"role": "user", "content": [{"type": "tool_result", "content": [{}] * 9}]}),
        *(("system", it) for it in ({}, {"type": "text", "text": "a"})),
        *(("tools", it) for it in ({}, {"name": "a", "input_schema": {}})),
    ],
    "/v1/completions": [
        *(("prompt", it) for it in ("a", 1, [1], {}, "a b " * 500)),
        ("prompt_embeds", 5),
        ("allowed_token_ids", "a"),
    ],
}
KEYS = {
    "/v1/responses": ("metadata", "zzz", "tool_choice", "text", "logit_bias"),
    "/v1/chat/completions": (
        *("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "zzz", "logit_bias"),
        *("tool_choice", "response_format"),
    ),
    "/v1/messages": ("metadata", "zzz", "chat_template_kwargs", "output_config"),
}


def bodies(size: int):
    for path, units in UNITS.items():
        for key, unit in units:
            yield path, {key: [unit] * (size // (len(json.dumps(unit)) + 2))}
            if isinstance(unit, dict) and isinstance(unit.get("content"), list):
                part = unit["content"][0]
                many = [part] * (size // (len(json.dumps(part)) + 2))
                yield path, {key: [unit | {"content": many}]}
    for path, keys in KEYS.items():
        for key in keys:
            yield path, {key: {f"k{n:07}": {} for n in range(size // 16)}}
        yield path, {f"k{n:07}": "a" for n in range(size // 17)}


@pytest.fixture(scope="module", autouse=True)
def imported():
    """All modules that the start imports, which mends the models."""
    vllm._import()


@pytest.fixture(scope="module")
def app(imported):
    """vLLM's routes, without an engine: a body that they accept gets a 5xx answer."""
    return vllms_app.generating()


def test_the_server_itself_reads_bodies_once():
    """In a process that imports only the server's modules."""
    program = """
from serving.engine import vllm
vllm._import()
from pydantic import ValidationError
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
try:
    ResponsesRequest.model_validate({"input": [{"x": "y"}] * 2000})
except ValidationError as error:
    print("faults:", error.error_count())
"""
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(said.rpartition(":")[2]) < 20, said[-500:]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("size", [256 * 1024, pytest.param(4 * 1024**2, marks=pytest.mark.nightly)])
def test_no_body_holds_the_event_loop(app, size):
    """Turns are measured by the thread's own CPU time, which excludes other work on the machine.
    Bodies that checks.py refuses go no further, as in the server.
    """
    base = {"model": "m", "max_tokens": 1}
    needed = {"/v1/responses": {"input": "a"}, "/v1/completions": {"prompt": "a"}}
    slow = []

    async def ask(client, path, more):
        body = json.dumps({**base, "messages": [USER], **needed.get(path, {}), **more}).encode()
        began = time.thread_time()
        try:
            checks.check(found := fields(body), trusted=False)
            if path == "/v1/responses":
                checks.check_kept(found)
                checks.check_items(found)
        except BadRequest:
            return time.thread_time() - began
        await client.post(path, content=body, headers={"content-type": "application/json"})
        return time.thread_time() - began

    async def all_of_them():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            for path, more in bodies(size):
                took = await ask(client, path, more)
                if took > 0.5:
                    slow.append((round(took, 2), path, f"{more}"[:80]))

    asyncio.run(all_of_them())
    assert slow == []


def unmended(model: type[BaseModel]) -> Any:
    """vLLM's own model: its schema is built again."""
    return type("Own", (model,), {"__module__": model.__module__})


ITEMS = [
    USER,
    *(USER | {"type": "message"}, {"role": "assistant", "content": "b"}),
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "a"}], "type": "message"},
    {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "b"},
    {
        "type": "function_call_output",
        "call_id": "a",
        "output": [{"type": "input_text", "text": "b"}],
    },
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
    {
        "type": "reasoning",
        "id": "a",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "a"}],
    },
    {"type": "item_reference", "id": "a"},
    {"id": "a"},
    {"type": "custom_tool_call", "call_id": "a", "name": "b", "input": "c"},
    {"type": "custom_tool_call_output", "call_id": "a", "output": "b"},
    {
        "type": "web_search_call",
        "id": "a",
        "status": "completed",
        "action": {"type": "search", "query": "b"},
    },
    {"type": "computer_call_output", "call_id": "a", "output": {"type": "computer_screenshot"}},
    {"type": "mcp_call", "id": "a", "name": "b", "arguments": "{}", "server_label": "c"},
]
TOOLS = [
    {"type": "function", "name": "a", "parameters": {}, "strict": True},
    {"type": "web_search"},
    {"type": "custom", "name": "a"},
    {"type": "mcp", "server_label": "a", "server_url": "https://example.com"},
]


@pytest.mark.parametrize(
    "more",
    [*({"input": [it]} for it in ITEMS), *({"input": "a", "tools": [it]} for it in TOOLS)],
    ids=lambda it: f"{it}"[:60],
)
def test_a_request_is_what_vllm_takes_it_for(more):
    body = {"model": "m", **more}
    left_out = {"request_id"}
    expected = unmended(ResponsesRequest).model_validate(json.loads(json.dumps(body)))
    found = ResponsesRequest.model_validate(body)

    def shape(it: Any) -> Any:
        items = it.input if isinstance(it.input, list) else []
        told = it.model_dump(exclude=left_out, warnings=False)
        for item in told["input"] if items else ():
            if isinstance(item, dict) and str(item.get("id", "")).startswith(
                ("msg_", "rs_", "fc_")
            ):
                del item["id"]  # made up
        return [type(item) for item in items], told

    assert shape(found) == shape(expected)


def test_an_item_is_read_as_the_form_that_its_type_names():
    with pytest.raises(ValidationError) as error:
        ResponsesRequest.model_validate({"input": [{"type": "mcp_call", "id": "a"}] * 9})
    assert error.value.error_count() < 12
    assert {it["loc"][-1] for it in error.value.errors()} >= {"arguments", "name", "server_label"}


def test_all_models_are_mended():
    for model in forms.models():
        lists = [
            it for it in forms._schemas(model.__pydantic_core_schema__) if it["type"] == "list"
        ]
        assert all(it["fail_fast"] for it in lists)
