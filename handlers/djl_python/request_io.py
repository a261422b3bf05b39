# SPDX-License-Identifier: Apache-2.0
"""Records that files written for LMI name in annotations, derive from, or fill themselves.

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
    request_id: int | None = dataclasses.field(default=None, init=False)

    def as_dict(self) -> dict[str, Any]:
        """In LMI's names, without unset flags."""
        told = {"id": self.id, "text": self.text, "log_prob": self.log_prob}
        more = {"special_token": self.special_token, "error_msg": self.error_msg}
        return told | {name: value for name, value in more.items() if value}

    def as_tgi_dict(self) -> dict[str, Any]:
        """In the names of text generation inference."""
        told = {"id": self.id, "text": self.text, "logprob": self.log_prob}
        return told | ({"special": self.special_token} if self.special_token else {})


class Iterator:
    """An index that can be advanced."""

    def __init__(self) -> None:
        self._index = 0

    def get_index(self) -> int:
        return self._index

    def next_index(self) -> int:
        self._index += 1
        return self._index - 1


@dataclasses.dataclass
class Sequence:
    """A generated text of a request, read token by token."""

    tokens: list[Token] = dataclasses.field(default_factory=list)
    top_tokens: list[list[Token]] = dataclasses.field(default_factory=list)
    cumulative_log_prob: float = 0.0
    finish_reason: str | None = None
    _last_token_index: int | None = None
    stop_reason: str | None = None
    _read: Iterator = dataclasses.field(init=False, default_factory=Iterator)
    _read_top: Iterator = dataclasses.field(init=False, default_factory=Iterator)

    def set_next_token(self, token: Token, is_last_token: bool = False) -> None:
        self.tokens.append(token)
        if is_last_token:
            self._last_token_index = len(self.tokens) - 1

    def set_next_top_tokens(self, top_tokens: list[Token]) -> None:
        self.top_tokens.append(top_tokens)

    def has_next_token(self) -> bool:
        return self._read.get_index() < len(self.tokens)

    def has_next_top_tokens(self) -> bool:
        return self._read_top.get_index() < len(self.top_tokens)

    def get_next_token(self) -> tuple[Token | None, int, bool, bool]:
        """The next token, its index, and whether it is the first and the last one."""
        if not self.has_next_token():
            return None, 0, False, False
        index = self._read.next_index()
        return self.tokens[index], index, index == 0, index == self._last_token_index

    def get_last_token(self) -> Token | None:
        """The last token, once it is known to be the last."""
        last = self._last_token_index
        return None if last is None else self.tokens[last]

    def get_next_top_tokens(self) -> list[Token] | None:
        return self.top_tokens[self._read_top.next_index()] if self.has_next_top_tokens() else None


@dataclasses.dataclass
class RequestInput:
    """A request."""

    request_id: int | None = None
    client_request_id: str | None = None
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


@dataclasses.dataclass
class RequestOutput:
    """An answer."""

    request_id: int | None = None
    input: RequestInput = dataclasses.field(default_factory=RequestInput)
    finished: bool = False


@dataclasses.dataclass
class TextGenerationOutput(RequestOutput):
    """An answer of generated texts, by their indices."""

    sequences: dict[int, Sequence] = dataclasses.field(default_factory=dict)
    best_sequence_index: int = 0
    prompt_tokens_details: list[Token] = dataclasses.field(default_factory=list)
    other_sequences_indices: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.sequences.setdefault(self.best_sequence_index, Sequence())

    def set_next_token(
        self,
        token: Token,
        sequence_index: int = 0,
        is_last_token: bool = False,
        finish_reason: str | None = None,
    ) -> None:
        sequence = self.sequences.setdefault(sequence_index, Sequence())
        sequence.set_next_token(token, is_last_token)
        sequence.finish_reason = finish_reason or sequence.finish_reason

    def set_next_top_tokens(self, top_tokens: list[Token], sequence_index: int) -> None:
        self.sequences[sequence_index].set_next_top_tokens(top_tokens)

    def set_best_sequence_index(self, sequence_index: int) -> None:
        self.best_sequence_index = sequence_index

    def set_finish_reason(self, finish_reason: str, sequence_index: int = 0) -> None:
        self.sequences[sequence_index].finish_reason = finish_reason

    def get_tokens_as_dict(self, sequence_index: int = 0) -> list[dict[str, Any]]:
        return self._as_dicts(self.sequences[sequence_index].tokens)

    def get_prompt_tokens_as_dict(self) -> list[dict[str, Any]]:
        return self._as_dicts(self.prompt_tokens_details)

    def get_top_tokens_as_dict(self, sequence_index: int = 0) -> list[list[dict[str, Any]]]:
        return [self._as_dicts(tokens) for tokens in self.sequences[sequence_index].top_tokens]

    def _as_dicts(self, tokens: list[Token]) -> list[dict[str, Any]]:
        tgi = self.input.tgi_compat
        return [token.as_tgi_dict() if tgi else token.as_dict() for token in tokens]
