# SPDX-License-Identifier: Apache-2.0
"""The engine's own formats, OpenAI's and Anthropic's: bodies and answers are passed through."""

import functools
from collections.abc import Callable, Mapping

from handlers.records import EngineCall

_ONE_TOKEN = {"max_tokens": 1, "stream": False}
_ONE_SEQUENCE = {
    **_ONE_TOKEN,
    **{"n": 1, "min_tokens": 0, "use_beam_search": False},
    **dict.fromkeys(("stream_options", "logprobs", "prompt_logprobs")),
}
PROMPT_ALONE: Mapping[str, Mapping[str, object]] = {
    "/v1/completions": {**_ONE_SEQUENCE, "echo": False},
    "/v1/chat/completions": {
        **_ONE_SEQUENCE,
        **{"max_completion_tokens": None, "top_logprobs": 0},
    },
    "/v1/messages": _ONE_TOKEN,
}
"""By path, the keys that reduce a body to its prompt, with as little generation as possible."""


@functools.cache
def on(path: str) -> Callable[[bytes], EngineCall]:
    """Return the format of bodies for one of the engine's paths."""
    return functools.partial(EngineCall, path)
