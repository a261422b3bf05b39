# SPDX-License-Identifier: Apache-2.0
"""The values between a wire format and the engine."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

T = TypeVar("T")


class FormatError(ValueError):
    """A request breaks its format's rules. The message is meant for the client.

    parameter: the faulty part of the request, if there is one.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


_HALF = re.compile(
    rb"\\u[dD](?:[89abAB]\w\w(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB]\w\w\\u[dD])[c-fC-F]\w\w)"
)
"""Half of a pair of surrogates (RFC 8259, section 7)."""
_TRIES = 1000
OF_VALUES = (b",", b"[", b"{")
"""A byte before each value in JSON, except the only value of an object, which has a key."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text without an end is read once as well. A body that is not JSON may have one."""
MOST_VALUES = 65_536
"""Most values in a request's messages, items or documents, at any depth. vLLM reads each on the
event loop.
"""
TOO_DEEP = "the body is nested too deeply; send fewer lists and objects within others"


def read(decode: Callable[[bytes], T], body: bytes) -> T:
    """Decode a body. Raises FormatError if the text is not JSON, or not of the decoder's type."""
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise FormatError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if "trailing characters" in str(error) and _SEVERAL.match(body):
            raise FormatError(
                "the body has several lines of JSON; send it as application/jsonlines"
            ) from None
        half = _half(body) if isinstance(error, msgspec.DecodeError) else _undecoded_half(error)
        raise FormatError(half or f"the body is not JSON: {error}") from None
    except RecursionError:
        raise FormatError(TOO_DEEP) from None


def has_more(value: bytes | msgspec.Raw, most: int, marks: Sequence[bytes] = OF_VALUES) -> bool:
    """Whether JSON has one of the marks more often than this outside of its texts. That takes far
    less time than to read the JSON.
    """
    if len(value) <= most:
        return False
    found = bytes(value)
    if all(found.count(mark) <= most for mark in marks):
        return False
    found = _TEXT.sub(b"", found)
    return any(found.count(mark) > most for mark in marks)


def is_list(value: msgspec.Raw) -> bool:
    """Whether a value is a JSON list."""
    return bytes(memoryview(value)[:1]) == b"["


_SEVERAL = re.compile(rb"\s*\{[^\n]*\}[ \t\r]*\n\s*\{")
"""An object on one line, and the beginning of another one on the next."""
_FLAGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1", 1), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0", 0), False),
}


def flag(value: Any) -> Any:
    """Return the truth value that vLLM would read, with pydantic's lax mode: true for `"true"`,
    `"on"` and `1`. Other values are returned unchanged.

    https://docs.pydantic.dev/latest/concepts/conversion_table/
    """
    if isinstance(value, str):
        return _FLAGS.get(value.lower(), value)
    return _FLAGS.get(value, value) if isinstance(value, int | float) else value


def _half(body: bytes) -> str:
    """Return the message about half of a surrogate pair in a body, or ""."""
    for half in itertools.islice(_HALF.finditer(body), _TRIES):
        before = body[max(half.start() - 64, 0) : half.start()]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:  # otherwise its backslash is escaped
            return f"{_ONE_HALF} (byte {half.start()})"
    return ""


def _undecoded_half(error: UnicodeDecodeError) -> str:
    wrong = error.object[error.start : error.start + 2]
    return _ONE_HALF if wrong[:1] == b"\xed" and wrong[1:] >= b"\xa0" else ""


_ONE_HALF = (
    "the body has half of a surrogate pair, which is no character: leave out the text that was cut "
    "within one, or send both halves"
)


class Step(msgspec.Struct, gc=False):
    """The new part of one sequence of a stream since the previous step."""

    text: str
    token_ids: Sequence[int] = ()
    texts: Sequence[str] = ()
    """The text of each token."""
    logprobs: Sequence[float | None] = ()
    """Text of the tokens."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int | None = None
    """None if an earlier step had it."""


class Reply(Protocol):
    """Turns the engine's answer to a request from OpenAI's format into another format."""

    def whole(self, answer: bytes) -> bytes:
        """Return the JSON body of an answer that is not streamed."""


class StepReply(Reply, Protocol):
    """A reply that also renders the steps of a stream, so that engines need not make SSE events."""

    def step(
        self, step: Step, *, before: bytes, after: bytes, write: Callable[[bytes], object]
    ) -> None:
        """Write the JSON objects for a step, all at once. before, after: the framing of each."""


class EngineCall(msgspec.Struct, frozen=True):
    """A request after its format has parsed it.

    path: the engine's path that answers it. body: the engine's request: the client's bytes if they
    already are one, otherwise the format's values. reply: renders the answer; None if the engine's
    answer has the right format. steps: the same reply, if the answer is a stream. ignored: names of
    the request's keys and parameters that have no effect.
    """

    path: str
    body: bytes | dict[str, Any]
    reply: Reply | None = None
    steps: StepReply | None = None
    ignored: tuple[str, ...] = ()
