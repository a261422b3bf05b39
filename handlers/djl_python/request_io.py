# SPDX-License-Identifier: Apache-2.0
"""Records that files written for LMI name in annotations or derive from.

On vLLM's path nothing makes one: an input formatter gets a dict, an output formatter a Response.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Token:
    """A token of a prompt or of an answer."""

    id: int
    text: str
    log_prob: float | None = None
    special_token: bool | None = None
    error_msg: str | None = None


@dataclasses.dataclass
class Sequence:
    """One of the texts that were generated for a request."""

    tokens: list[Token] = dataclasses.field(default_factory=list)
    top_tokens: list[list[Token]] = dataclasses.field(default_factory=list)
    cumulative_log_prob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclasses.dataclass
class RequestInput:
    """A request."""

    request_id: int | None = None
    output_formatter: Callable[..., Any] | str | None = None
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    server_parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    tgi_compat: bool = False


@dataclasses.dataclass
class TextInput(RequestInput):
    """A request for text."""

    input_text: str | list[str] | None = None
    input_ids: list[int] = dataclasses.field(default_factory=list)
    adapters: Any = None
    tokenizer: Any = None
    found_adapters: bool = False


@dataclasses.dataclass
class RequestOutput:
    """An answer."""

    request_id: int | None = None
    input: RequestInput | None = None
    finished: bool = False


@dataclasses.dataclass
class TextGenerationOutput(RequestOutput):
    """An answer of generated texts, by their indices."""

    sequences: dict[int, Sequence] = dataclasses.field(default_factory=dict)
    best_sequence_index: int = 0
    prompt_tokens_details: list[Token] = dataclasses.field(default_factory=list)
    other_sequences_indices: list[int] = dataclasses.field(default_factory=list)
