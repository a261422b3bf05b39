# SPDX-License-Identifier: Apache-2.0
"""A request of Responses gets the prompt of the same chat."""

import dataclasses
from functools import wraps
from typing import Any

from serving.engine.patches.frontend.context import Context
from serving.patching.patch import SERVER, Name, Patch, replace

_REQUEST = "vllm.entrypoints.openai.responses.protocol"
_UTILS = "vllm.entrypoints.openai.responses.utils"


def _put_tokens(_: Context) -> None:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    def make(build_tok_params: Any) -> Any:
        @wraps(build_tok_params)
        def as_a_chat(self: Any, model: Any) -> Any:
            return dataclasses.replace(build_tok_params(self, model), add_special_tokens=False)

        return as_a_chat

    replace(ResponsesRequest, "build_tok_params", make)


def _put_messages(_: Context) -> None:
    from vllm.entrypoints.openai.responses import utils

    def make(message_of: Any) -> Any:
        @wraps(message_of)
        def whole(item: Any, prev_msg: Any = None) -> Any:
            return message_of(_in_one_part(item), prev_msg)

        return whole

    replace(utils, "_construct_message_from_response_item", make)


def _in_one_part(item: Any) -> Any:
    """Join the texts of an assistant's message into one text."""
    from openai.types.responses import ResponseOutputMessage

    if isinstance(item, ResponseOutputMessage):
        item = {"role": "assistant", "content": [part.model_dump() for part in item.content]}
    if not isinstance(item, dict) or item.get("role") != "assistant":
        return item
    if isinstance(content := item.get("content"), str):
        return item
    texts = [part.get("text") or part.get("refusal") or "" for part in content or ()]
    return {"role": "assistant", "content": "".join(texts)}


def _answers(context: Context) -> bool:
    return bool(getattr(context.state, "openai_serving_responses", None))


TOKENS = Patch(
    name="responses_tokens",
    process=SERVER,
    names=(Name(f"{_REQUEST}:ResponsesRequest.build_tok_params", "self, model_config"),),
    does="Makes vLLM tokenize prompts of Responses without special tokens.",
    why="vLLM adds a beginning-of-sequence token, although the chat template already begins with "
    "one. It does not do so for chats and messages.",
    without="prompts of Responses begin with two such tokens",
    closed=False,
    needed=_answers,
    put=_put_tokens,
)
MESSAGES = Patch(
    name="responses_messages",
    process=SERVER,
    names=(
        Name(f"{_UTILS}:_construct_message_from_response_item", "item, prev_msg"),
        Name(
            f"{_UTILS}:construct_chat_messages_with_tool_call",
            says=("= _construct_message_from_response_item(",),
        ),
    ),
    does="Joins the parts of the assistant's earlier messages.",
    why="vLLM uses only the first part, and fails if that part is not text or if there is none.",
    without="an earlier answer of several parts is truncated, or ends the request with an error",
    closed=False,
    needed=_answers,
    put=_put_messages,
)
