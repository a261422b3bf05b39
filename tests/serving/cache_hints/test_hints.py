# SPDX-License-Identifier: Apache-2.0
"""The hints of clients about KV caches, by the names of their fields. No hint is ever an error."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from serving.cache_hints import intent as intent_module
from serving.cache_hints import marks
from serving.cache_hints.intent import (
    FIELDS,
    ID_BYTES,
    MOST_S,
    NO_INTENT,
    READ_HERE,
    CacheIntent,
    HintKeys,
    digest,
    own_key,
    read,
)
from serving.protocol import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    CONVERSATIONS,
    MESSAGES,
    RESPONSES,
    SESSION_ID,
)
from tests import agents
from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

SAID = [{"role": "user", "content": "Hi"}]
KEPT = {"type": "ephemeral"}
S, P = digest(None, "s"), digest(None, "p")

_keys = msgspec.json.Decoder(HintKeys).decode


def intent(headers: Mapping[str, str], body: Any, **more: Any) -> CacheIntent:
    content = json.dumps(body).encode()
    named = {name.lower().encode(): value.encode() for name, value in headers.items()}
    return read(named, _keys(content), content, None, **more)


def part(**mark: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a", **mark}]}]


def answered(mark: Any) -> list[dict[str, Any]]:
    """A conversation with the mark in a tool's result."""
    found = [{"type": "text", "text": "a", "cache_control": mark}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": found}
    return [*SAID, {"role": "user", "content": [result]}]


Hinted = list[tuple[dict[str, str], dict[str, Any], Any]]
OWN: Hinted = [
    # SageMaker
    ({"X-Amzn-SageMaker-Session-Id": "s"}, {}, {"session": S}),
    ({"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"}, {}, {"session": ""}),
    ({}, {"requestType": "CLOSE"}, {"final": True}),
    ({}, {"requestType": "NEW_SESSION"}, {"final": False}),
    # vLLM
    ({"X-Session-ID": "s"}, {}, {"session": S}),
    ({}, {"session_id": "s"}, {"session": S}),
    ({"X-Session-ID": "café"}, {}, {"session": digest(None, "café")}),
    ({"X-Session-ID": "s"}, {"session_id": "p"}, {"session": S}),
    # Dynamo
    (
        {"X-Dynamo-Session-ID": "s", "X-Dynamo-Parent-Session-ID": "p", "session-id": "q"},
        {},
        {"session": S, "parent": P},
    ),
    (
        {"X-Dynamo-Session-ID": "s", "X-Dynamo-Session-Final": "true"},
        {},
        {"session": S, "final": True},
    ),
    ({"X-Slipway-Session-Final": "True"}, {}, {"final": True}),
    ({"X-Dynamo-Session-Final": "false"}, {}, {"final": False}),
    # Claude Code
    ({"X-Claude-Code-Session-Id": "s"}, {}, {"session": S, "parent": ""}),
    (
        {"X-Claude-Code-Session-Id": "p", "X-Claude-Code-Agent-Id": "s"},
        {},
        {"session": S, "parent": P},
    ),
    (
        {
            "X-Claude-Code-Session-Id": "q",
            "X-Claude-Code-Agent-Id": "s",
            "X-Claude-Code-Parent-Agent-Id": "p",
        },
        {},
        {"session": S, "parent": P},
    ),
    # Codex, OpenCode, pi, OpenHands, AIPerf
    ({"session-id": "s"}, {}, {"session": S}),
    ({"thread-id": "s", "session-id": "q"}, {}, {"session": S}),
    ({"thread-id": "s", "x-codex-parent-thread-id": "p"}, {}, {"session": S, "parent": P}),
    ({"x-session-id": "s", "x-parent-session-id": "p"}, {}, {"session": S, "parent": P}),
    ({"x-session-id": "s", "x-parent-session-id": "s"}, {}, {"session": S, "parent": ""}),
    ({"session_id": "s", "x-client-request-id": "q"}, {}, {"session": S}),
    ({"x-client-request-id": "q"}, {}, {"session": ""}),
    ({"x-litellm-session-id": "s"}, {}, {"session": S}),
    ({"X-Correlation-ID": "q", "X-Session-Affinity": "s"}, {}, {"session": S}),
    # OpenAI
    ({}, {"prompt_cache_key": "s"}, {"bucket": S, "session": "", "seconds": 0}),
    ({}, {"prompt_cache_retention": "24h"}, {"seconds": MOST_S}),
    ({}, {"prompt_cache_retention": "in_memory"}, {"seconds": 0}),
    ({}, {"prompt_cache_options": {"ttl": "30m"}}, {"seconds": 1800, "low": False}),
    ({}, {"prompt_cache_options": {"mode": "implicit"}}, {"seconds": 1800}),
    ({}, {"prompt_cache_options": {"mode": "explicit"}}, {"seconds": 0, "low": True}),
    (
        {},
        {
            "prompt_cache_options": {"mode": "explicit"},
            "messages": part(prompt_cache_breakpoint={"mode": "explicit", "ttl": "12h"}),
        },
        {"seconds": 43_200, "low": False},
    ),
    ({}, {"input": part(prompt_cache_breakpoint={"mode": "explicit"})}, {"seconds": 1800}),
    # Anthropic
    ({}, {"cache_control": KEPT}, {"seconds": 300, "marked": 300}),
    ({}, {"cache_control": {**KEPT, "ttl": "1h"}}, {"seconds": 3600, "marked": 3600}),
    ({}, {"messages": part(cache_control=KEPT)}, {"seconds": 300, "marked": 300}),
    ({}, {"messages": answered({**KEPT, "ttl": "1h"})}, {"seconds": 3600, "marked": 3600}),
    (
        {},
        {"messages": SAID, "system": [{"type": "text", "text": "a", "cache_control": KEPT}]},
        {"seconds": 0, "marked": 0},
    ),
    ({}, {"messages": [*part(cache_control=KEPT), *SAID]}, {"seconds": 0, "marked": 0}),
    (
        {"X-Session-ID": "s"},
        {
            "messages": SAID,
            "tools": [{"name": "a", "cache_control": {**KEPT, "ttl": "1h"}}],
        },
        {"seconds": 1800, "marked": 0},
    ),
    # Dynamo, NeMo Agent Toolkit
    ({}, {"nvext": {"agent_hints": {"priority": -1, "osl": 512}}}, {"low": True}),
    ({}, {"nvext": {"agent_hints": {"priority": 990}}}, {"low": False}),
    ({}, {"nvext": {"agent_hints": {"final": True}}}, {"final": True}),
    ({}, {"nvext": {"cache_control": {**KEPT, "ttl": "600s"}}}, {"seconds": 600, "marked": 0}),
    # vLLM's proposal
    ({}, {"agent_hint": {"cache_control": {"ttl": 900}}}, {"seconds": 900}),
    # Ours
    ({}, {"document_order": "canonical"}, {"any_order": True}),
    ({}, {"document_order": "given"}, {"any_order": False, "taken": ("document_order",)}),
    ({}, {"document_order": None}, {"any_order": False, "taken": ()}),
    # The longest counts
    (
        {"X-Session-ID": "s"},
        {"cache_control": KEPT, "nvext": {"cache_control": {"ttl": "1h"}}},
        {"seconds": 3600, "marked": 300},
    ),
]
IGNORED: Hinted = [
    ({"X-Session-ID": "s" * 257}, {}, "x-session-id"),
    ({}, {"session_id": "é" * 129}, "session_id"),
    ({}, {"session_id": 5}, "session_id"),
    ({}, {"session_id": "s" * 5000}, "session_id"),
    ({"X-Dynamo-Session-Final": "perhaps"}, {}, "x-dynamo-session-final"),
    ({}, {"prompt_cache_key": ["a"]}, "prompt_cache_key"),
    ({}, {"prompt_cache_options": "explicit"}, "prompt_cache_options"),
    ({}, {"prompt_cache_options": {"mode": "later"}}, "prompt_cache_options"),
    ({}, {"prompt_cache_retention": "forever"}, "prompt_cache_retention"),
    ({}, {"cache_control": {**KEPT, "ttl": "5 minutes"}}, "cache_control"),
    ({}, {"cache_control": {**KEPT, "ttl": True}}, "cache_control"),
    ({}, {"cache_control": [1]}, "cache_control"),
    ({}, {"messages": [*part(cache_control=KEPT), *SAID]}, "cache_control"),
    ({}, {"messages": part(cache_control="yes")}, "cache_control"),
    (
        {},
        {"messages": [*part(prompt_cache_breakpoint={"mode": "explicit"}), *SAID]},
        "prompt_cache_breakpoint",
    ),
    ({}, {"nvext": [1]}, "nvext"),
    ({}, {"nvext": {"agent_hints": "a"}}, "nvext.agent_hints"),
    ({}, {"nvext": {"agent_hints": {"priority": "high"}}}, "nvext.agent_hints.priority"),
    ({}, {"nvext": {"agent_hints": {"priority": 2**40}}}, "nvext.agent_hints.priority"),
    ({}, {"nvext": {"agent_hints": {"osl": 512}}}, "nvext.agent_hints.osl"),
    ({}, {"nvext": {"agent_hints": {"final": 1}}}, "nvext.agent_hints.final"),
    ({}, {"nvext": {"agent_hints": {"strict_priority": 1}}}, "nvext.agent_hints.strict_priority"),
    (
        {},
        {"nvext": {"agent_hints": {"speculative_prefill": True}}},
        "nvext.agent_hints.speculative_prefill",
    ),
    (
        {},
        {"nvext": {"agent_hints": {"latency_sensitivity": 0.5}}},
        "nvext.agent_hints.latency_sensitivity",
    ),
    ({}, {"nvext": {"agent_hints": {"prefix_id": "a"}}}, "nvext.agent_hints.prefix_id"),
    ({}, {"nvext": {"agent_hints": {"total_requests": 10}}}, "nvext.agent_hints.total_requests"),
    ({}, {"nvext": {"agent_hints": {"iat": 250}}}, "nvext.agent_hints.iat"),
    # NeMo Agent Toolkit's lifetime, which is shorter than any pause
    ({}, {"nvext": {"cache_control": {**KEPT, "ttl": "2s"}}}, "nvext.cache_control"),
    ({}, {"nvext": {"session_control": {"action": "open"}}}, "nvext.session_control"),
    ({}, {"agent_hint": 5}, "agent_hint"),
    ({}, {"agent_hint": {"cache_control": {"ttl": "x"}}}, "agent_hint"),
    ({}, {"document_order": "cached"}, "document_order"),
    ({}, {"document_order": True}, "document_order"),
    ({}, {"document_order": ["canonical"]}, "document_order"),
]
ALL: Any = [(headers, body) for headers, body, _ in (*OWN, *IGNORED)]


@pytest.mark.parametrize(("headers", "body", "expected"), OWN)
def test_what_is_made_of_the_fields(headers, body, expected):
    found = intent(headers, body if "input" in body else {"messages": SAID, **body})
    assert {name: getattr(found, name) for name in expected} == expected
    assert {*found.taken, *found.ignored} <= {*FIELDS}


@pytest.mark.parametrize(("headers", "body", "field"), IGNORED)
def test_odd_values_are_ignored_and_named(headers, body, field):
    found = intent(headers, {"messages": SAID, **body})
    assert {*found.ignored} == {field}
    plain = CacheIntent(taken=found.taken, ignored=found.ignored)
    assert found == plain
    assert field in FIELDS
    assert field in found.told


def test_the_operators_key_comes_before_other_clients_and_after_sagemaker():
    own = own_key("X-Conversation")
    assert own({b"x-conversation": b"s"}, b"{}") == "s"
    assert own_key("customer.id")({}, b'{"customer.id": "s"}') == "s"
    for body in (b'{"customer": 5}', b"[]", b"no JSON", b'{"customer": "\\ud800"}', b""):
        assert own_key("customer")({}, body) == ""
    assert own_key(None)({b"": b"s"}, b'{"": "s"}') == ""
    assert intent({"X-Session-ID": "q"}, {}, own="s").session == S
    assert intent({"X-Amzn-SageMaker-Session-Id": "s"}, {}, own="q").session == S


NAMES = (SESSION_ID, *CONVERSATIONS)


@pytest.mark.parametrize("value", [b"s", b"NEW_SESSION", b"", b"\xff" * 200, b"s" * (ID_BYTES + 1)])
@pytest.mark.parametrize("own", ["", "o", "o" * (ID_BYTES + 1)])
@pytest.mark.parametrize("names", [(), *((it,) for it in NAMES), NAMES])
def test_a_name_alone_is_read_as_it_is_with_all_else(names, own, value):
    """Most requests with a hint only name their conversation, so the rest is not looked for."""
    headers = dict.fromkeys(names, value)
    whole = intent_module._Reading(headers, HintKeys(), None, "a").intent(own, low=False)
    assert read(headers, HintKeys(), None, "a", own=own) == whole


def test_nothing_is_read_of_a_request_without_hints(monkeypatch):
    monkeypatch.delattr(intent_module, "_Reading")
    assert intent({"Content-Type": "application/json"}, {"messages": SAID}) is NO_INTENT


def test_of_a_name_alone_nothing_else_is_looked_for(monkeypatch):
    monkeypatch.delattr(intent_module._Reading, "intent")
    assert intent({"X-Session-ID": "s"}, {"messages": SAID}).session == S


def test_a_tenants_session_is_no_others():
    assert len({digest(it, "s") for it in (None, "", "a", "b")}) == 4
    found = read({b"x-session-id": b"s"}, HintKeys(), b"", "a")
    assert found.session == digest("a", "s")
    assert "s" not in (found.session, found.told)


def test_every_agent_marks_the_end_of_its_prompts():
    call = {"id": "1", "name": "look", "input": {}}
    for body in (agents.claude("Hi"), agents.claude("Hi", *agents.claude_goes_on(call, "sunny"))):
        assert intent({}, body).marked == 300
    codex = intent(agents.CODEX_HEADERS, agents.codex("Hi"))
    assert codex.session == codex.bucket == digest(None, agents.CODEX_HEADERS["session_id"])


def test_bodies_that_are_too_large_are_not_searched_for_marks(monkeypatch):
    monkeypatch.setattr(marks, "LARGEST", 100)
    found = intent({}, {"messages": part(cache_control=KEPT), "user": "a" * 100})
    assert (found.marked, found.ignored) == (0, ("cache_control",))


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": 5, "x": "\\"cache_control\\"", "y": {"cache_control": 1}}',
        b'{"messages": [5, [{"cache_control": {}}], null], "system": {"cache_control": {}}}',
        b'{"messages": ' + b'[{"content": ' * 9 + b'[{"cache_control": {}}]' + b"}]" * 9 + b"}",
        b'{"cache_control": {"ttl": ' + b"[" * 900 + b"]" * 900 + b"}}",
    ],
)
def test_no_body_is_an_error(body):
    found = read({}, _keys(body), body, None)
    assert (found.marked, found.seconds) == (0, 0)


def test_the_last_marks_of_many_count():
    many = [{"type": "text", "text": "a", "cache_control": {**KEPT, "ttl": "1h"}}] * 200
    last = [{"type": "text", "text": "a", "cache_control": KEPT}] * marks.MOST
    found = intent({}, {"messages": [{"role": "user", "content": many + last}]})
    assert found.marked == 300


# Through HTTP

PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a b"},
    CHAT_COMPLETIONS: {"messages": SAID},
    RESPONSES: {"input": "a b"},
    MESSAGES: {"messages": SAID, "max_tokens": 4},
    "/invocations": {"inputs": "a b"},
}


def counted(field: str, taken: str) -> float:
    labels = {"field": field, "taken": taken}
    return REGISTRY.get_sample_value("slipway_cache_hints_total", labels) or 0


@pytest.mark.parametrize("path", PROMPTS)
async def test_no_hint_changes_an_answer(door, path):
    """The engine does not get a hint under a key that a later vLLM could obey."""

    def text(answer):
        found = answer.json()
        for key in ("id", "created"):
            found.pop(key, None)
        return found

    plain = text(await door.post(path, PROMPTS[path]))
    for headers, body in ALL:
        if "messages" in body or "input" in body or "requestType" in body:
            continue
        headers = {name: it for name, it in headers.items() if "SageMaker" not in name}
        sent = {name: it.encode() for name, it in headers.items()}
        door.engine.calls.clear()
        answer = await door.post(path, {**PROMPTS[path], **body}, headers=sent)
        assert answer.status_code == 200, (headers, body, answer.text)
        assert text(answer) == plain
        (call,) = door.engine.calls
        assert READ_HERE.isdisjoint(call.request)
        found = intent(headers, {**PROMPTS[path], **body})
        assert (call.session, call.marked) == (found.session or None, found.marked > 0)


async def test_hints_are_counted(door):
    before = counted("x-session-id", "true"), counted("prompt_cache_key", "false")
    body = {"prompt": "a", "prompt_cache_key": 5}
    await door.post(COMPLETIONS, body, headers={"X-Session-ID": "s"})
    assert counted("x-session-id", "true") == before[0] + 1
    assert counted("prompt_cache_key", "false") == before[1] + 1


async def test_a_client_is_told_what_was_understood(door):
    headers = {"X-Slipway-Cache": "1", "X-Session-ID": "s", "X-Slipway-Session-Final": "true"}
    answer = await door.post(COMPLETIONS, {"prompt": "a", "session_id": "p"}, headers=headers)
    assert answer.headers["X-Slipway-Cache"] == f"session={S[:12]} seconds=1800 final"
    lines = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    kind = {"content-type": "application/jsonlines", "X-Slipway-Cache": "1"}
    assert (await door.invoke(lines, headers=kind)).status_code == 200
    assert "X-Slipway-Cache" not in (await door.post(COMPLETIONS, {"prompt": "a"})).headers


async def test_the_engine_gets_the_session_of_lmis_parameters_as_a_digest(door):
    door.engine.calls.clear()
    await door.invoke({"inputs": "a", "parameters": {"session_id": "s"}})
    (call,) = door.engine.calls
    assert call.session == S
    assert "session_id" not in call.request


async def test_tenants_and_operators_keys_name_sessions():
    async with running(cache_salt_header="X-Tenant", session_key="customer") as it:
        for tenant in ("a", "b"):
            body = {"prompt": "a", "customer": "s"}
            await it.post(COMPLETIONS, body, headers={"X-Tenant": tenant, "X-Session-ID": "q"})
        assert [call.session for call in it.engine.calls] == [digest(it, "s") for it in "ab"]
