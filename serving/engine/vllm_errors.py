# SPDX-License-Identifier: Apache-2.0
"""Errors of vLLM's → our exceptions, in messages that repeat nothing of the prompt."""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmi_config.options.declared import flags
from serving.engine.base import Call, public_name
from serving.errors import BadRequest, EngineFailed, NotFound, NotReady, ServingError

_PROMPT_KEYS = (
    *("prompt", "input", "messages", "suffix", "documents", "system", "instructions", "tools"),
    *("query", "queries", "items", "data_1", "data_2", "text_1", "text_2", "instruction"),
)
_PROTOCOL_KEYS = ("role", "type")  # their values describe the reading of a prompt, not its contents
_TOOL_KEYS = (*_PROTOCOL_KEYS, "name")
_PIECE = 20  # characters
_BEGINNING = 24  # characters
_SHORTEST = 4  # characters; shorter pieces are in every sentence
_LONGEST = 10_000  # characters; vLLM's own words are fewer
_TEXTS = 2**16  # of a request that are looked at; a message about one with more is not passed on
_START = re.compile(r"(?<!\w)")  # before the first letter of a word
_WORD = re.compile(r"[^\W\d_]+")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")


@functools.cache
def _words() -> frozenset[str]:
    """vLLM's own, in lower case (tools/generate/vllm_words.py)."""
    return frozenset(Path(__file__).with_name("vllm_words.txt").read_text().split())


def by_options(message: str) -> str:
    """A message of vLLM's, with vLLM's flags replaced by Slipway's variables."""
    return _FLAG.sub(lambda it: _variable(it[0]), message)


def _variable(flag: str) -> str:
    known = flags()
    if flag in known:
        return known[flag][0]
    positive = flag.replace("--no-", "--", 1)
    return f"{known[positive][0]}=false" if positive in known else flag


def from_engine(status: int, message: str, parameter: str | None, call: Call) -> ServingError:
    """The exception for an error from the engine.

    vLLM often repeats the input in a message; a message that repeats the prompt is not passed on.
    vLLM names adapters by their inner names; the message gets their public names.
    """
    if call.adapter:
        message = message.replace(call.adapter, public_name(call.adapter))
    message = by_options(message)
    if _repeats_prompt(message, call.body):
        why = "; the engine's reason has too much of it to be passed on" * (len(message) > _LONGEST)
        message = f"{parameter or 'the request'} is not valid{why}"
    if status == 404:
        return NotFound(message)
    if status == 503:
        return NotReady(message)
    if status >= 500:
        return EngineFailed(message)
    return BadRequest(message, parameter)


def refused(answer: Any, call: Call) -> ServingError:
    """The exception for an ErrorResponse of vLLM's."""
    error = answer.error
    return from_engine(error.code, error.message, error.param, call)


def _repeats_prompt(message: str, body: Mapping[str, Any]) -> bool:
    """Whether a message has a text of the request's prompt in it, or a piece of one.

    A text's beginning is found in any length, another piece if it has twice _PIECE characters.
    vLLM's own words do not count, although a prompt may contain them.
    """
    if len(message) > _LONGEST:
        return True
    readings = (message, _ESCAPE.sub(_unescaped, message))
    foreign = frozenset(word for reading in readings for word in _foreign(reading))
    pieces = {
        piece
        for reading in readings
        for start in range(len(reading) - _PIECE + 1)
        if _has_foreign(piece := reading[start : start + _PIECE], foreign)
    }
    beginnings = {
        reading[word.start() : word.start() + length]
        for reading in readings
        for word in _START.finditer(reading)
        for length in range(_SHORTEST, _BEGINNING + 1)
    }
    prompts = [body.get(key) for key in _PROMPT_KEYS if key != "tools"]
    found = itertools.chain(_texts(prompts), _texts(body.get("tools"), _TOOL_KEYS))
    texts = [*itertools.islice(found, _TEXTS + 1)]
    return len(texts) > _TEXTS or any(
        _begins(text, beginnings, foreign) or _has_piece(pieces, text) for text in texts
    )


def _foreign(text: str) -> Iterator[str]:
    """Words that are none of vLLM's, in lower case."""
    words = (word.lower() for word in _WORD.findall(text))
    return (word for word in words if len(word) > 1 and word not in _words())


def _has_foreign(part: str, foreign: frozenset[str]) -> bool:
    """Whether a part of a message may have any of its foreign words, or a part of one."""
    words = {word.lower() for word in _WORD.findall(part)}
    return any(word in it or it in word for word in words for it in foreign)


def _begins(text: str, beginnings: set[str], foreign: frozenset[str]) -> bool:
    beginning = text.strip()[:_BEGINNING]
    if len(beginning) < _SHORTEST or beginning not in beginnings:
        return False
    return _has_foreign(beginning, foreign) or not _WORD.search(beginning)


def _has_piece(pieces: set[str], text: str) -> bool:
    # Not at every place: a prompt can be as large as a body, and a message is short.
    return any(text[start : start + _PIECE] in pieces for start in range(0, len(text), _PIECE))


def _texts(prompt: Any, skipped: tuple[str, ...] = _PROTOCOL_KEYS) -> Iterator[str]:
    """All texts in a JSON value, except those that only describe the reading of others."""
    remaining = [prompt]  # no recursion: what the decoder bears is nested too deeply for it
    while remaining:
        value = remaining.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            remaining.extend(value)
        elif isinstance(value, dict):
            remaining.extend(item for key, item in value.items() if key not in skipped)


_ESCAPE = re.compile(
    r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|.)", re.DOTALL
)


def _unescaped(escape: re.Match[str]) -> str:
    """The character that an escape of Python's or JSON's stands for."""
    code = escape[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}.get(code, code)
