# SPDX-License-Identifier: Apache-2.0
"""The tokens that an answer says it has used, read from its end as it passes."""

import json
import re
from typing import NamedTuple

from serving.router.usage import counted

TAIL = 4096
"""Bytes of an answer that are kept: `usage` stands near its end in all APIs."""

_USAGE = re.compile(rb'(?<!\\)"usage"\s*:\s*(?=\{)')
"""In a text its quotes would be escaped."""


class Usage(NamedTuple):
    """Tokens, by the engine's own count."""

    prompt: int
    cached: int
    """Prompt tokens from a KV cache."""
    completion: int


class UsageReader:
    """Reads one answer."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> None:
        """More of the body."""
        self._tail = (self._tail + data)[-TAIL:]

    def read(self) -> Usage | None:
        """The tokens that the last readable `usage` of the answer reports, or None."""
        found = [*_USAGE.finditer(self._tail)]
        if not found:
            return None
        try:
            usage, _ = json.JSONDecoder().raw_decode(self._tail[found[-1].end() :].decode())
            prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
            completion = usage.get("completion_tokens", usage.get("output_tokens", 0))
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or 0
            return Usage(counted(prompt), counted(cached), counted(completion))
        except (ValueError, AttributeError, RecursionError):
            return None
