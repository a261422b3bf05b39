# SPDX-License-Identifier: Apache-2.0
"""In the server's process: what vLLM 0.32 makes of the requests of agents, mended.

- Responses and Messages have no names for pictures, so that vLLM's caches of media would have them
  by their contents, for all clients.
- A prompt of Responses would get a token of the beginning before the one that the chat template
  begins with, which no chat and no message does.
- Of what the assistant has said before, Responses would take the first part alone, and fail where
  that is no text, or where there is none.
- Claude Code asks for 32,000 tokens, with 31,999 for thoughts, of every model. Either is what there
  may be at most: a model with less room, or without thoughts, is not to refuse that.
- An empty list of tools would make Messages of a model that calls none an error.
- A call that was cut off would make Messages an error, since its arguments are no JSON.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

import partial_json_parser  # type: ignore[import-untyped]
from openai.types.responses import ResponseOutputMessage
from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses import utils
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers.chat_utils import MM_PARSER_MAP, TEXT_PART_TYPES

from serving.aio import in_thread

_MEDIA = MM_PARSER_MAP.keys() - TEXT_PART_TYPES


def mend(state: State, *, thinks: bool) -> None:
    """Have all that comes from now on be as it should. thinks: whether thoughts can be limited."""
    renderer = state.online_renderer
    renderer.__class__ = _naming(type(renderer))
    if handler := getattr(state, "anthropic_serving_messages", None):
        handler.__class__ = _lenient(type(handler), thinks)
    tokenized, message_of = (
        ResponsesRequest.build_tok_params,
        utils._construct_message_from_response_item,
    )

    def as_a_chat(request: Any, model: Any) -> Any:
        return dataclasses.replace(tokenized(request, model), add_special_tokens=False)

    def whole(item: Any, prev_msg: Any = None) -> Any:
        return message_of(_in_one_part(item), prev_msg)

    ResponsesRequest.build_tok_params = as_a_chat
    utils._construct_message_from_response_item = whole


def _in_one_part(item: Any) -> Any:
    """What the assistant has said, as one text."""
    if isinstance(item, ResponseOutputMessage):
        item = {"role": "assistant", "content": [part.model_dump() for part in item.content]}
    if not isinstance(item, dict) or item.get("role") != "assistant":
        return item
    if isinstance(content := item.get("content"), str):
        return item
    texts = [part.get("text") or part.get("refusal") or "" for part in content or ()]
    return {"role": "assistant", "content": "".join(texts)}


class _Bounded(ChatCompletionRequest, defer_build=True):  # type: ignore[misc, call-arg]  # of vLLM
    """A chat whose `max_tokens` are what there may be at most, where the context has room."""

    def build_tok_params(self, model: Any) -> Any:
        unbounded = self.model_copy(update={"max_tokens": None, "max_completion_tokens": None})
        return super(_Bounded, unbounded).build_tok_params(model)


def _lenient(handler_class: Any, thinks: bool) -> Any:
    class Lenient(handler_class):  # type: ignore[misc]  # vLLM is not type-checked
        @classmethod
        def to_chat_completion_request(cls, *rest: Any, **more: Any) -> Any:
            chat = super().to_chat_completion_request(*rest, **more)
            if not thinks:
                chat.thinking_token_budget = None
            if not chat.tools:
                chat.tools = chat.tool_choice = None
            chat.__class__ = _Bounded
            return chat

        def messages_full_converter(self, generator: Any) -> Any:
            (choice, *_) = generator.choices
            for call in choice.message.tool_calls:
                call.function.arguments = _as_object(call.function.arguments)
            return super().messages_full_converter(generator)

    return Lenient


def _as_object(arguments: str) -> str:
    """A call's arguments as a JSON object: of a call that was cut off, what there is of it."""
    try:
        found = partial_json_parser.loads(arguments)
    except ValueError:  # there is nothing yet
        found = {}
    return json.dumps(found if isinstance(found, dict) else {})


def _naming(renderer_class: Any) -> Any:
    class Naming(renderer_class):  # type: ignore[misc]  # vLLM is not type-checked
        name_medium: Callable[[str], str] | None = None
        """Names a medium by its content: of a copy that is one call's (calls.StandIn.own)."""

        async def preprocess_chat(self, request: Any, messages: Any, **more: Any) -> Any:
            if (name := self.name_medium) and (media := _media(messages)):
                await in_thread(_name, media, name)
            return await super().preprocess_chat(request, messages, **more)

    return Naming


def _media(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """The parts of messages that have media."""
    found = []
    for message in messages:
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        message["content"] = parts = [*content]  # pydantic lets some be read only once
        found += [part for part in parts if isinstance(part, dict) and _MEDIA & part.keys()]
    return found


def _name(media: Iterable[dict[str, Any]], name: Callable[[str], str]) -> None:
    for part in media:
        given = {key: part[key] for key in _MEDIA & part.keys()}
        part["uuid"] = name(json.dumps(given, sort_keys=True))
