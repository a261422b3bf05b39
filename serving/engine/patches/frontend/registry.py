# SPDX-License-Identifier: Apache-2.0
"""The patches of the server's process, which are put in place in steps of its start."""

import logging
from collections.abc import Sequence

from serving.engine.patches.frontend import (
    forced_calls,
    forms,
    media_names,
    messages,
    refusals,
    responses,
    speech,
)
from serving.engine.patches.frontend.context import Context
from serving.engine.patches.outputs import accounting
from serving.patching import patch
from serving.patching.patch import Patch

log = logging.getLogger(__name__)

MODELS: Sequence[Patch] = (forms.PATCH,)
"""Applied before vLLM's routes are imported, because the routes keep objects built from the
models.
"""
OUTPUTS: Sequence[Patch] = (
    *(accounting.TOKENS, accounting.ADAPTER_NAMES),
    *(accounting.QUICK, accounting.ARRAYS),
)
"""Before vLLM's client is made."""
SERVING: Sequence[Patch] = (
    media_names.PATCH,
    *(messages.BOUNDS, messages.TOOLS, messages.CALLS),
    *(responses.TOKENS, responses.MESSAGES),
    *(refusals.NUMBERS, refusals.CONSTRAINTS),
    forced_calls.PATCH,
    *(speech.SALTS, speech.LIMITS),
)
"""Once vLLM's serving objects are there."""
PATCHES = (*MODELS, *OUTPUTS, *SERVING)


def mend_models() -> None:
    """Apply MODELS. Raises Unfit."""
    patch.apply(MODELS, log)


def check_outputs() -> None:
    """Look whether OUTPUTS fit. Raises Unfit."""
    patch.apply(OUTPUTS, log)


def mend_serving(context: Context) -> None:
    """Apply SERVING. Raises Unfit."""
    patch.apply(SERVING, log, context)
