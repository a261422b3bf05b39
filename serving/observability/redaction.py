# SPDX-License-Identifier: Apache-2.0
"""Hides secrets in what is logged or printed: the environment's, and what looks like one."""

import json
import re
import urllib.parse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lmi_config.options.files import Given
from lmi_config.options.redaction import HIDDEN, masked, parts

MIN_SECRET = 8
"""Characters of a secret; shorter ones would make holes into harmless words."""

_values: re.Pattern[str] | None = None


def redacted(text: str) -> str:
    """The text without the values of secret environment variables, and what looks like one."""
    if _values:
        text = _values.sub(HIDDEN, text)
    return masked(text)


def hide(environ: Mapping[str, str], argued: Mapping[str, Given] = MappingProxyType({})) -> None:
    """Have `redacted` know the values of secret variables, also as Python, JSON and URLs write
    them, and each line of those that have several. argued: what the command line says instead.
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
    """The value as JSON has it, without secrets."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {redacted(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return redacted(str(value))
