# SPDX-License-Identifier: Apache-2.0
"""The facts of a start that patches of the server's process need."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple


class Context(NamedTuple):
    """state: of vLLM's app, with its serving objects. args: vLLM's arguments. thinks: whether
    thoughts can be limited. is_constrained: whether the answer has a constraint that one of vLLM's
    serving objects is making.
    """

    state: Any
    args: Namespace
    thinks: bool
    is_constrained: Callable[[Any], bool]
