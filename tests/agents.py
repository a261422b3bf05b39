# SPDX-License-Identifier: Apache-2.0
"""Requests as agents send them: their keys, headers and kinds of items, with short texts.

Sources: Codex's serialisation of requests (openai/codex, codex-rs: codex-api/src/common.rs,
protocol/src/models.rs, tools/src/tool_spec.rs), and the requests of Claude Code 2.1.

sent() has requests that released clients have sent.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

CLIENTS = Path(__file__).parent / "serving" / "cache_hints" / "clients"
"""A file for each client: its name, version and command, and its requests. CONTRIBUTING.md says how
to record them.
"""

WHERE = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
"""The only tool call that the model can make."""
SCHEMA = {**WHERE, "additionalProperties": False}
PERMISSIONS = "<permissions instructions>Ask first.</permissions instructions>"
SURROUNDINGS = "<environment_context><cwd>/src</cwd></environment_context>"

CODEX_HEADERS = {
    "originator": "codex_cli_rs",
    "user-agent": "codex_cli_rs/0.120.0 (Ubuntu 24.4.0; x86_64) xterm",
    "session_id": "019d2f6e-5a6c-7b40-a3a8-6c2f7b1d9e10",
    "accept": "text/event-stream",
}
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,context-management-2025-06-27,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.69 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
CLAUDE_PATH = "/v1/messages?beta=true"

Turns = list[Mapping[str, Any]]


class Sent(NamedTuple):
    """A request of a released client. client: the file's name. what: the turn of the conversation
    that it is.
    """

    client: str
    what: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.client}: {self.what}"


def sent() -> list[Sent]:
    """All requests of released clients."""
    return [
        Sent(client=file.stem, **request)
        for file in sorted(CLIENTS.glob("*.json"))
        for request in json.loads(file.read_text())["requests"]
    ]


def codex(task: str, *further: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A request of Codex. further: the items after the task."""
    function: dict[str, Any] = {
        "type": "function",
        "name": "get_weather",
        "description": "The weather in a city",
        "strict": False,
        "parameters": SCHEMA,
    }
    return {
        "model": "lmi",
        "instructions": "You are a coding agent. Be brief.",
        "input": [
            _said("developer", PERMISSIONS),
            _said("user", SURROUNDINGS),
            _said("user", task),
            *further,
        ],
        "tools": [
            function,
            {"type": "web_search", "external_web_access": False},
            {
                "type": "namespace",
                "name": "mcp__docs",
                "description": "Documents",
                "tools": [{**function, "name": "look_up"}],
            },
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019d2f6e-5a6c-7b40-a3a8-6c2f7b1d9e10",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "c0ffee"},
        **more,
    }


def codex_goes_on(call: Mapping[str, Any], result: Any) -> Turns:
    """The items after a call: the model's reasoning, the call, and its result."""
    return [
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me look."}],
        },
        {
            "type": "function_call",
            "name": call["name"],
            "arguments": call["arguments"],
            "call_id": call["call_id"],
        },
        {"type": "function_call_output", "call_id": call["call_id"], "output": result},
    ]


def _said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


KEPT = {"type": "ephemeral"}


def claude(task: str, *further: Mapping[str, Any], bill: str = "0f1a2", **more: Any) -> Any:
    """A request of Claude Code. further: the messages after the task. bill: the part of the billing
    header that differs between requests.
    """
    billing = f"x-anthropic-billing-header: cc_version=2.1.69.b2a; cc_entrypoint=cli; cch={bill};"
    last = {"cache_control": KEPT}  # the last message of each request has it
    first = {
        "role": "user",
        "content": [
            {"type": "text", "text": "<system-reminder>The date is today's.</system-reminder>"},
            {"type": "text", "text": task, **({} if further else last)},
        ],
    }
    return {
        "model": "lmi",
        "max_tokens": 32_000,
        "messages": [first, *further],
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are an agent.", "cache_control": KEPT},
            {"type": "text", "text": "Be brief.", "cache_control": KEPT},
        ],
        "tools": [
            {
                "name": "get_weather",
                "description": "The weather in a city",
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    **SCHEMA,
                },
                "eager_input_streaming": True,
                "cache_control": KEPT,
            }
        ],
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
        **more,
    }


def claude_goes_on(call: Mapping[str, Any], result: Any) -> Turns:
    """The messages after a call: the model's thinking, the call, and its result."""
    return [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": "c2ln"},
                {"type": "text", "text": "Let me look."},
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["name"],
                    "input": call["input"],
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call["id"], "content": result},
                {
                    "type": "text",
                    "text": "<system-reminder>Go on.</system-reminder>",
                    "cache_control": KEPT,
                },
            ],
        },
    ]


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The names and the data of a stream's events."""
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def codex_reads(text: str) -> list[dict[str, Any]]:
    """The items of a stream as Codex takes them: those that are done, once it is complete."""
    found = events(text)
    names = [name for name, _ in found]
    assert names[0] == "response.created"
    assert names[-1] == "response.completed", found[-1]
    usage = found[-1][1]["response"]["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0
    assert usage["output_tokens_details"]["reasoning_tokens"] >= 0
    return [data["item"] for name, data in found if name == "response.output_item.done"]


def claude_reads(text: str) -> dict[str, Any]:
    """The message that a stream adds up to, assembled as Anthropic's clients do it."""
    found = events(text)
    names = [name for name, _ in found]
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    message = {**found[0][1]["message"], "content": []}
    blocks = message["content"]
    arguments: dict[int, str] = {}
    for name, data in found:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(data["content_block"])
        elif name == "content_block_delta":
            block, delta = blocks[data["index"]], data["delta"]
            if delta["type"] == "input_json_delta":
                so_far = arguments.get(data["index"], "")
                arguments[data["index"]] = so_far + delta["partial_json"]
            elif delta["type"] in ("text_delta", "thinking_delta"):
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif name == "message_delta":
            message |= data["delta"]
            message["usage"] = {**message["usage"], **data["usage"]}
    for index, text_of in arguments.items():
        blocks[index]["input"] = json.loads(text_of)
    return message
