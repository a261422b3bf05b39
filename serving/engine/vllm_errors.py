# SPDX-License-Identifier: Apache-2.0
"""Error answers of vLLM's → our exceptions, in messages that repeat nothing of the prompt."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from serving.errors import BadRequest, EngineFailed, NotFound, NotReady, ServingError

_PROMPT_KEYS = (
    *("prompt", "input", "messages", "suffix", "documents", "system", "instructions", "tools"),
    *("query", "queries", "items", "data_1", "data_2", "text_1", "text_2", "instruction"),
)
_PROTOCOL_KEYS = ("role", "type")  # their values say how to read a prompt, not what is in it
_PIECE = 20  # characters
_BEGINNING = 24  # characters
_LONGEST = 10_000  # characters; vLLM's own words are fewer
_TEXTS = 2**16  # of a request that are looked at; a message about one with more is not passed on
_WORD = re.compile(r"(?<!\w)")  # before the first letter of one


def from_engine(status: int, answer: bytes, request: bytes) -> ServingError:
    """The exception for an error that the engine answered in OpenAI's shape.

    vLLM likes to repeat what it was sent; a message that repeats the prompt is not passed on.
    """
    try:
        error = msgspec.json.decode(answer)["error"]
        message, parameter = str(error["message"]), error.get("param")
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        message, parameter = "the engine answered with an error", None
    if _repeats_prompt(message, request):
        message = f"{parameter or 'the request'} is not valid"
    if status == 404:
        return NotFound(message)
    if status == 503:
        return NotReady(message)
    if status >= 500:
        return EngineFailed(message)
    return BadRequest(message, parameter)


def _repeats_prompt(message: str, request: bytes) -> bool:
    """Whether a message has a text of the request's prompt in it, or a piece of one.

    A text's beginning is found in any length, another piece where it has twice _PIECE characters.
    """
    if len(message) > _LONGEST:
        return True
    try:
        body = msgspec.json.decode(request, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    readings = (message, _ESCAPE.sub(_unescaped, message))
    pieces = {
        reading[start : start + _PIECE]
        for reading in readings
        for start in range(len(reading) - _PIECE + 1)
    }
    beginnings = {
        reading[word.start() : word.start() + length]
        for reading in readings
        for word in _WORD.finditer(reading)
        for length in range(1, _BEGINNING + 1)
    }
    texts = [*islice(_texts([body.get(key) for key in _PROMPT_KEYS]), _TEXTS + 1)]
    return len(texts) > _TEXTS or any(
        text.strip()[:_BEGINNING] in beginnings or _has_piece(pieces, text) for text in texts
    )


def _has_piece(pieces: set[str], text: str) -> bool:
    # Not at every place: a prompt can be as large as a body, and a message is short.
    return any(text[start : start + _PIECE] in pieces for start in range(0, len(text), _PIECE))


def _texts(prompt: Any) -> Iterator[str]:
    """All texts in a JSON value, but those that only say how to read others."""
    remaining = [prompt]  # no recursion: what the decoder bears is nested too deeply for it
    while remaining:
        value = remaining.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            remaining.extend(value)
        elif isinstance(value, dict):
            remaining.extend(item for key, item in value.items() if key not in _PROTOCOL_KEYS)


_ESCAPE = re.compile(
    r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|.)", re.DOTALL
)


def _unescaped(escape: re.Match[str]) -> str:
    """The character that an escape of Python's or JSON's stands for."""
    code = escape[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}.get(code, code)
