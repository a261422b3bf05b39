# SPDX-License-Identifier: Apache-2.0
"""The usage in answers of Messages: which tokens count as written into a cache.

vLLM counts all computed tokens of whole blocks in `cache_creation_input_tokens`, whether the client
has asked for that or not. Anthropic's clients take such tokens for dearer ones. Here they only
count for a request with a mark (`cache_control`) at its prompt's end. All others are
`input_tokens`, so that the three fields still add up to the prompt.
"""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response

_CREATED, _INPUT = "cache_creation_input_tokens", "input_tokens"
_START, _DELTA = "event: message_start\ndata: ", "event: message_delta\ndata: "


async def messages(serving: Any, request: Any, raw: Any) -> Any:
    """Answer a request of Messages, as calls.Route has it. raw: the call's stand-in."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse

    answer = await serving.create_messages(request, raw)
    marked = raw.call.marked
    if isinstance(answer, AnthropicMessagesResponse):
        found = answer.model_dump(mode="json", exclude_none=True)
        found["usage"] = told(found["usage"], marked=marked)
        return Response(msgspec.json.encode(found), media_type="application/json")
    return _events(answer, marked=marked) if isinstance(answer, AsyncGenerator) else answer


async def _events(events: AsyncGenerator[str, None], *, marked: bool) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            yield _retold(event, marked=marked)


def _retold(event: str, *, marked: bool) -> str:
    """An event with its usage, which the first and the last but one of a stream have."""
    for beginning in (_START, _DELTA):
        if event.startswith(beginning):
            found = msgspec.json.decode(event.removeprefix(beginning))
            owner = found["message"] if beginning is _START else found
            if owner.get("usage"):
                owner["usage"] = told(owner["usage"], marked=marked)
            return f"{beginning}{msgspec.json.encode(found).decode()}\n\n"
    return event


def told(usage: dict[str, Any], *, marked: bool) -> dict[str, Any]:
    """Return the usage for the client. marked: whether a mark is at the prompt's end. Usage
    without numbers of caches stays as it is: the operator has switched them off, or it comes before
    the prompt is computed.
    """
    if (created := usage.get(_CREATED)) is None:
        return usage
    kept = created if marked else 0
    # No lifetime of an hour is granted: what is kept at all counts as the shorter one.
    lifetimes = {"ephemeral_5m_input_tokens": kept, "ephemeral_1h_input_tokens": 0}
    return usage | {
        _INPUT: usage[_INPUT] + created - kept,
        _CREATED: kept,
        "cache_creation": lifetimes,
    }
