# SPDX-License-Identifier: Apache-2.0
"""In the server's process: vLLM's exceptions → a status and a message that repeats no request.

vLLM's own handlers put the value at fault into the message, and that may be the prompt.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pydantic
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.exceptions import VLLMError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

EXPECTED = (
    *(HTTPException, RequestValidationError, VLLMError, ValueError, TypeError),
    *(OverflowError, NotImplementedError),
)
"""Others are raised once more, after they were answered."""
_MODEL = re.compile(r"[A-Z]\w+")
"""The name of one of several models that a value may be of, in a fault's place."""


def described(error: Exception) -> tuple[int, str, str | None]:
    """The status, the message and the parameter at fault."""
    if isinstance(error, RequestValidationError | pydantic.ValidationError):
        faults = error.errors()
        if isinstance(faults[0], str):  # vLLM has one fault that is not pydantic's
            return 400, "the Content-Type of the body has to be application/json", None
        return 400, *_first_fault(faults)
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail), None
    if isinstance(error, EngineDeadError | EngineGenerateError):
        return 500, "the engine failed; the server's log says why", None
    info = create_error_response(error).error
    if isinstance(error, VLLMValidationError | VLLMUnprocessableEntityError):
        return info.code, error.args[0], error.parameter
    if info.code >= 500 and not isinstance(error, VLLMError):
        return info.code, "the engine failed on this request", None
    return info.code, info.message, info.param


def _first_fault(faults: Sequence[Any]) -> tuple[str, str | None]:
    """A sentence for the first fault that pydantic found, and the parameter it is in."""
    first = _inside(faults)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, VLLMValidationError):
        return cause.args[0], cause.parameter
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {cause}", None
    place = [part for part in first["loc"] if part != "body"]
    if first is not faults[0]:
        known = [*itertools.takewhile(lambda part: not _MODEL.fullmatch(str(part)), place)]
        if len(known) < len(place):
            parameter = clean_loc_for_param(tuple(known))
            return f"{parameter} has none of the forms that it may have", parameter
    parameter = clean_loc_for_param(tuple(place))
    message = first["msg"].removeprefix("Value error, ")
    return (f"{parameter}: {message}", parameter) if parameter else (message, None)


def _inside(faults: Sequence[Any]) -> Any:
    """The first fault. If a value may be a text or a list, and the fault is that the list is no
    text, the list's fault is returned instead.
    """
    first = faults[0]
    *place, last = first["loc"] or ("",)
    if first["type"] != "string_type" or last != "str":
        return first
    depth = len(place)
    inside = (it for it in faults if [*it["loc"][:depth]] == place and len(it["loc"]) > depth + 1)
    return next(inside, first)
