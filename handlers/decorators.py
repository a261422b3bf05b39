# SPDX-License-Identifier: Apache-2.0
"""Decorators that mark the functions of a user's model.py."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def input_formatter(function: Function) -> Function:
    """Mark the function that turns a decoded request into what the engine takes."""
    return _mark(function, "input_formatter")


def output_formatter(function: Function) -> Function:
    """Mark the function that turns the engine's answer into what the client gets."""
    return _mark(function, "output_formatter")


def prediction_handler(function: Function) -> Function:
    """Mark a function that predicts. For files shared with other LMI images: vLLM has no use."""
    return _mark(function, "prediction_handler")


def init_handler(function: Function) -> Function:
    """Mark a function that loads a model. As prediction_handler: marked, not called."""
    return _mark(function, "init_handler")


def _mark(function: Function, kind: str) -> Function:
    setattr(function, f"is_{kind}", True)
    return function


def marked(module: ModuleType, kind: str) -> Callable[..., Any] | None:
    """The module's function of this kind: the first by name, imported ones included."""
    for _, value in sorted(vars(module).items()):
        # Static: a mock or a lazily loaded object would answer to any attribute, or fail over it.
        if callable(value) and inspect.getattr_static(value, f"is_{kind}", None) is True:
            function: Callable[..., Any] = value
            return function
    return None
