# SPDX-License-Identifier: Apache-2.0
"""The patches of the server's process, which are put in place in two steps of its start."""

import logging
from collections.abc import Sequence

from serving.engine.patches.frontend import (
    forced_calls,
    forms,
    media_names,
    messages,
    refusals,
    responses,
)
from serving.engine.patches.frontend.context import Context
from serving.patching import patch
from serving.patching.patch import Patch

log = logging.getLogger(__name__)

MODELS: Sequence[Patch] = (forms.PATCH,)
"""Before vLLM's routes are imported, which keep what is made of a model then."""
SERVING: Sequence[Patch] = (
    media_names.PATCH,
    *(messages.BOUNDS, messages.TOOLS, messages.CALLS),
    *(responses.TOKENS, responses.MESSAGES),
    *(refusals.NUMBERS, refusals.CONSTRAINTS),
    forced_calls.PATCH,
)
"""Once vLLM's serving objects are there."""
PATCHES = (*MODELS, *SERVING)


def mend_models() -> None:
    """Apply MODELS. Raises Unfit."""
    patch.apply(MODELS, log)


def mend_serving(context: Context) -> None:
    """Apply SERVING. Raises Unfit."""
    patch.apply(SERVING, log, context)
