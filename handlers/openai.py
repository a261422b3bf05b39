# SPDX-License-Identifier: Apache-2.0
"""OpenAI's formats are the engine's own: bodies and answers pass untouched."""

import functools
from collections.abc import Callable

from handlers.records import EngineCall


@functools.cache
def on(path: str) -> Callable[[bytes], EngineCall]:
    """What reads the bodies of one of the engine's paths."""
    return functools.partial(EngineCall, path)
