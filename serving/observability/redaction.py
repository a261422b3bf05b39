# SPDX-License-Identifier: Apache-2.0
"""Hides secrets in logged and printed text: the environment's, and text that looks like a secret.
Leaves texts of requests and answers out of the lines of libraries that handle them.
"""

import json
import logging
import re
import sys
import traceback
import urllib.parse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lmi_config.options.option_files import Given
from lmi_config.options.redaction import HIDDEN, masked, parts

MIN_SECRET = 8
"""Fewest characters of a hidden secret. Shorter ones would also hide parts of harmless words."""

_values: re.Pattern[str] | None = None


def redacted(text: str) -> str:
    """Return the text without values of secret variables and without other text like a secret."""
    if _values:
        text = _values.sub(HIDDEN, text)
    return masked(text)


def hide(environ: Mapping[str, str], argued: Mapping[str, Given] = MappingProxyType({})) -> None:
    """Make `redacted` hide the values of secret variables, also as Python, JSON and URLs write
    them, and each line of a value with several lines. argued: the command line's values.
    """
    global _values
    forms: set[str] = set()
    argued_values = ((name, given.text) for name, given in argued.items())
    for name, value in (*environ.items(), *argued_values):
        for text in parts(name, value):
            forms |= {
                text,
                repr(text)[1:-1],
                repr(text + "'\"")[1:-4],
                ascii(text)[1:-1],
                json.dumps(text)[1:-1],
                json.dumps(text, ensure_ascii=False)[1:-1],
                urllib.parse.quote(text),
                urllib.parse.quote(text, safe=""),
                urllib.parse.quote_plus(text),
            }
    # The longest first: one secret may be the beginning of another.
    values = sorted((form for form in forms if len(form) >= MIN_SECRET), key=len, reverse=True)
    _values = re.compile("|".join(map(re.escape, values))) if values else None


def plain(value: Any) -> Any:
    """Return the value in types of JSON, without secrets."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {redacted(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return redacted(str(value))


READERS = (
    *("vllm.tool_parsers", "vllm.reasoning", "vllm.parser", "vllm.renderers", "vllm.tokenizers"),
    *("vllm.entrypoints.anthropic", "vllm.entrypoints.generate", "vllm.entrypoints.pooling"),
    *("vllm.entrypoints.openai.chat_completion", "vllm.entrypoints.openai.completion"),
    *("vllm.entrypoints.openai.responses", "vllm.entrypoints.openai.parser"),
    *("vllm.entrypoints.serve.engine", "vllm.entrypoints.serve.exception_handling"),
    *("vllm.entrypoints.serve.tokenize", "vllm.entrypoints.speech_to_text", "vllm.inputs"),
    *("vllm.multimodal", "vllm.v1.structured_output", "vllm.v1.engine.async_llm"),
    *("vllm.logging_utils.dump_input", "vllm.v1.engine.detokenizer", "vllm.v1.engine.logprobs"),
    *("vllm.v1.engine.output_processor", "vllm.v1.engine.input_processor"),
    *("transformers", "tokenizers", "mistral_common", "openai", "openai_harmony", "xgrammar"),
    *("llguidance", "outlines", "lmformatenforcer", "jinja2", "PIL", "fastapi", "pydantic"),
)
"""Loggers whose lines may have a text of a request or of an answer, as may those of the loggers
below them. vLLM's (0.32) parsers log text that they cannot parse, which is the model's answer, and
exceptions repeat it.
"""
_READERS = tuple(f"{name}." for name in READERS)
_OF_ONE_REQUEST = ("vllm.v1.engine.core", "Unexpected error pre-processing request")
"""A logger that also reports why the engine has ended, and its only message about one request."""
LEFT_OUT = "(left out: it may be of a request)"


def leave_out(record: logging.LogRecord) -> bool:
    """Remove any text of a request from a record. Returns True: as a filter it keeps every record.

    The template stays, because it is in the library's code. The frames of an exception also stay.
    Lines of another process were filtered in that process.
    """
    if not record.pathname or not _is_of_a_reader(record):
        return True
    template = record.msg if _is_in_the_code(record) else LEFT_OUT
    record.msg, record.args = str(template), None
    if isinstance(record.exc_info, tuple) and (kind := record.exc_info[0]):
        frames = "".join(traceback.format_tb(record.exc_info[2]))
        facts = {**getattr(record, "facts", {}), "exception": f"{frames}{kind.__name__}"}
        record.facts, record.exc_info, record.exc_text = facts, None, None
    return True


def _is_of_a_reader(record: logging.LogRecord) -> bool:
    if f"{record.name}.".startswith(_READERS):
        return True
    name, message = _OF_ONE_REQUEST
    return record.name == name and str(record.msg).startswith(message)


def _is_in_the_code(record: logging.LogRecord) -> bool:
    """Whether a record's template is a constant of the logging function, or of its module."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        code = frame.f_code
        if (code.co_filename, code.co_name) == (record.pathname, record.funcName):
            kept = (it for it in frame.f_globals.values() if isinstance(it, str))
            return record.msg in code.co_consts or any(record.msg is it for it in kept)
    return False
