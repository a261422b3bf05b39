# SPDX-License-Identifier: Apache-2.0
"""Decorators that mark the functions of a user's model.py."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def input_formatter(function: Function) -> Function:
    """Mark the function that turns a decoded request into a request for the engine."""
    return _mark(function, "input_formatter")


def output_formatter(function: Function) -> Function:
    """Mark the function that turns the engine's answer into the client's answer."""
    return _mark(function, "output_formatter")


def prediction_handler(function: Function) -> Function:
    """Mark a function that predicts. For files shared with other LMI images: vLLM has no use."""
    return _mark(function, "prediction_handler")


def init_handler(function: Function) -> Function:
    """Mark a function that loads a model. Like prediction_handler: it is marked, but not called."""
    return _mark(function, "init_handler")


def _mark(function: Function, kind: str) -> Function:
    setattr(function, f"is_{kind}", True)
    return function


def marked(module: ModuleType, kind: str) -> Callable[..., Any] | None:
    """Return the module's first function of this kind by name, also an imported one; or None."""
    for _, value in sorted(vars(module).items()):
        # Static: a mock or a lazily loaded object would have any attribute, or fail.
        if callable(value) and inspect.getattr_static(value, f"is_{kind}", None) is True:
            function: Callable[..., Any] = value
            return function
    return None
