# SPDX-License-Identifier: Apache-2.0
"""The names by which vLLM keeps the media of a call whose API has none for them."""

from collections.abc import Callable
from contextvars import ContextVar

NAME: ContextVar[Callable[[str], str] | None] = ContextVar("name", default=None)
"""Names a medium by what it is, for the clients that share caches with the one whose call is being
made. None where all clients do, or the API has names.
"""
