# SPDX-License-Identifier: Apache-2.0
"""Forced tool calls fit their function's schema (serving/engine/requests/tools.py)."""

from serving.engine.patches.frontend.context import Context
from serving.patching.patch import SERVER, Name, Patch

_PARSER = "vllm.parser.abstract_parser"


def _put(context: Context) -> None:
    from serving.engine.requests import tools

    tools.bind(context.state, context.args)


PATCH = Patch(
    name="forced_calls",
    process=SERVER,
    names=(
        Name(f"{_PARSER}:DelegatingParser.adjust_request", "self, request"),
        Name(f"{_PARSER}:", says=("tool_parser.structural_tag_model",)),
        Name(
            "vllm.tool_parsers.abstract_tool_parser:ToolParser",
            has=("supports_required_and_named", "structural_tag_model"),
        ),
        Name("vllm.renderers.online_renderer:OnlineRenderer", has=("parser", "use_harmony")),
        Name(
            "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat",
            has=("parser_cls", "create_chat_completion"),
        ),
        Name(
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses",
            has=("parser", "create_responses"),
        ),
        Name("vllm.utils.mistral:is_mistral_tool_parser"),
    ),
    does="Constrains the arguments of a forced call to their function's schema. If the model's "
    "own format has no grammar, a second serving object answers with calls in JSON.",
    why='vLLM constrains them only if a function has `"strict": true`, and forces no call '
    "without a parser of the model's own format.",
    without="forced calls may violate their schema, or are not forced",
    closed=False,
    put=_put,
)
