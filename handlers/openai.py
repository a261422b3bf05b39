# SPDX-License-Identifier: Apache-2.0
"""The engine's own formats, OpenAI's and Anthropic's: bodies and answers pass untouched."""

import functools
from collections.abc import Callable

from handlers.records import EngineCall


@functools.cache
def on(path: str) -> Callable[[bytes], EngineCall]:
    """What reads the bodies of one of the engine's paths."""
    return functools.partial(EngineCall, path)
