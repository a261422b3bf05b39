# SPDX-License-Identifier: Apache-2.0
"""In the server's process: a stream of a chat is told which parser vLLM made for it.

What: vLLM's serving object of chats, by a subclass that stands in its place before it is built.
Why: a parser keeps what it has seen of an answer, so each token may go to it once, whether vLLM
renders the token's event or a stream does (streams.Deltas). vLLM makes the parser in the middle of
its rendering and hands it out nowhere.
Upstream: vllm/entrypoints/openai/chat_completion/serving.py.
Without it: vLLM renders all events of chats whose tokens have to be parsed, which is slower.
"""

import inspect
from typing import Any

from vllm.entrypoints.openai.chat_completion import serving
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.parser.abstract_parser import DelegatingParser

_OF_DELTA = ("delta_text", "delta_token_ids", "request", "prompt_token_ids", "finished")


def applies() -> bool:
    """Whether the installed vLLM makes and calls parsers in this way."""
    taken = inspect.signature(DelegatingParser.parse_delta).parameters
    return hasattr(OpenAIServingChat, "_make_parser") and {*_OF_DELTA} <= {*taken}


def install() -> None:
    """Have vLLM build this in the place of its own."""
    if applies():
        serving.OpenAIServingChat = Chats


class Chats(OpenAIServingChat):  # type: ignore[misc]  # vLLM is not type-checked
    """vLLM's chats, which tell the call's client of their parsers (calls.CallClient)."""

    def _make_parser(self, *rest: Any, **more: Any) -> Any:
        parser = super()._make_parser(*rest, **more)
        if watch := getattr(self.engine_client, "watch", None):  # vLLM's own client has none
            watch(parser)
        return parser
