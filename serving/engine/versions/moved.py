# SPDX-License-Identifier: Apache-2.0
"""Modules of vLLM that have another path in another supported version."""

import importlib
from collections.abc import Mapping
from typing import Any

PLACES: Mapping[str, tuple[str, ...]] = {
    "chat_utils": ("vllm.renderers.chat_utils", "vllm.entrypoints.chat_utils"),
    "cli_args": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
}
"""Name → modules that may have it, the newest version first: chat_utils since 0.32, cli_args since
0.33.
"""

TEXT_PART_TYPES = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
"""The parts of a chat's messages that are text. vLLM has this set since 0.32."""


def chat_utils() -> Any:
    """Parts of messages, and chat templates."""
    return _first("chat_utils")


def cli_args() -> Any:
    """The parser of vLLM's command line."""
    return _first("cli_args")


def reasoning_ended(request: Any, parser: Any, prompt: list[int]) -> bool | None:
    """Whether the prompt of a chat ends the reasoning; None if the engine must find out. prompt:
    its tokens. vLLM has this function since 0.32.
    """
    if hasattr(request, "resolve_reasoning_ended"):
        return request.resolve_reasoning_ended(parser, prompt)  # type: ignore[no-any-return]
    if not request.include_reasoning or request._grammar_from_parser:
        return True
    reasons = parser is not None and parser.reasoning_parser is not None
    return parser.is_reasoning_end(prompt) if reasons else None


def _first(name: str) -> Any:
    """Raises ModuleNotFoundError, which names the newest place, if no place has it."""
    newest, *before = PLACES[name]
    for place in (newest, *before):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not place.startswith(str(error.name)):
                raise  # a module that it imports is missing
    raise ModuleNotFoundError(f"vLLM has none of {', '.join(PLACES[name])}", name=newest)
