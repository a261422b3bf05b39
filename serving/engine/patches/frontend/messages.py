# SPDX-License-Identifier: Apache-2.0
"""Requests of Messages, as Claude Code sends them, are answered by models of all sizes."""

import json
from functools import wraps
from typing import Any

import partial_json_parser  # type: ignore[import-untyped]

from serving.engine.patches.frontend import forms
from serving.engine.patches.frontend.context import Context
from serving.patching.patch import SERVER, Name, Patch, replace

_SERVING = "vllm.entrypoints.anthropic.serving"
_OF_IT = f"{_SERVING}:AnthropicServingMessages"


def _put_bounds(_: Context) -> None:
    from vllm.entrypoints.anthropic import serving
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    class Bounded(ChatCompletionRequest):  # type: ignore[misc]  # vLLM is not type-checked
        """A chat with `max_tokens` as an upper limit: it is lowered if the context has less
        room.
        """

        def build_tok_params(self, model: Any) -> Any:
            unbounded = self.model_copy(update={"max_tokens": None, "max_completion_tokens": None})
            return super(Bounded, unbounded).build_tok_params(model)

    forms.read_as_one_form(Bounded)
    serving.ChatCompletionRequest = Bounded  # makes each chat from messages


def _put_tools(context: Context) -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    def make(to_chat: Any) -> Any:
        @wraps(to_chat.__func__)
        def lenient(cls: Any, *rest: Any, **more: Any) -> Any:
            chat = to_chat.__func__(cls, *rest, **more)
            if not context.thinks:
                chat.thinking_token_budget = None
            if not chat.tools:
                chat.tools = chat.tool_choice = None
            return chat

        return classmethod(lenient)

    replace(AnthropicServingMessages, "to_chat_completion_request", make)


def _put_calls(_: Context) -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    def make(convert: Any) -> Any:
        @wraps(convert)
        def whole(self: Any, generator: Any) -> Any:
            (choice, *_) = generator.choices
            for call in choice.message.tool_calls:
                call.function.arguments = _as_object(call.function.arguments)
            return convert(self, generator)

        return whole

    replace(AnthropicServingMessages, "messages_full_converter", make)


def _as_object(arguments: str) -> str:
    """A call's arguments as a JSON object. For a call that was cut off, the existing part."""
    try:
        found = partial_json_parser.loads(arguments)
    except ValueError:  # there is nothing yet
        found = {}
    return json.dumps(found if isinstance(found, dict) else {})


def _answers(context: Context) -> bool:
    return bool(getattr(context.state, "anthropic_serving_messages", None))


BOUNDS = Patch(
    name="messages_bounds",
    process=SERVER,
    names=(
        Name(f"{_OF_IT}._build_base_request", says=("return ChatCompletionRequest(",)),
        Name(
            "vllm.entrypoints.openai.chat_completion.protocol:"
            "ChatCompletionRequest.build_tok_params",
            "self, model_config",
        ),
    ),
    does="Treats `max_tokens` of a message as an upper limit.",
    why="Claude Code asks every model for 32,000 tokens, and vLLM refuses a request that does not "
    "fit the context.",
    without="models with a shorter context refuse Claude Code's requests",
    closed=False,
    needed=_answers,
    put=_put_bounds,
)
TOOLS = Patch(
    name="messages_tools",
    process=SERVER,
    names=(Name(f"{_OF_IT}.to_chat_completion_request", "anthropic_request, ..."),),
    does="Drops an empty list of tools, and a limit on thinking for a model without reasoning.",
    why="Claude Code sends both to every model, and vLLM refuses them if the model has neither.",
    without="models without tool calls or reasoning refuse Claude Code's requests",
    closed=False,
    needed=_answers,
    put=_put_tools,
)
CALLS = Patch(
    name="messages_calls",
    process=SERVER,
    names=(Name(f"{_OF_IT}.messages_full_converter", "self, generator"),),
    does="Completes the arguments of a truncated call, so that they are valid JSON.",
    why="vLLM decodes them as JSON for its answer, and fails.",
    without="a message with a call that `max_tokens` truncated is an error",
    closed=False,
    needed=_answers,
    put=_put_calls,
)
