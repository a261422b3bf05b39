# SPDX-License-Identifier: Apache-2.0
"""What passes between a wire format and the engine."""

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

T = TypeVar("T")

LEAN = b"x-slipway-lean"
"""The header that asks the engine to leave out of a stream what the reply does not read."""


class FormatError(ValueError):
    """A request that its format does not allow. The message is meant for the client.

    parameter: the part of the request that is at fault, where one is.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


def read(decode: Callable[[bytes], T], body: bytes) -> T:
    """Decode a body. Raises FormatError for what is not JSON, or not of the decoder's type."""
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise FormatError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise FormatError("the body is nested too deeply") from None


class Reply(Protocol):
    """Turns the engine's answer to one request, in OpenAI's shape, into the format's own."""

    def whole(self, answer: bytes) -> bytes:
        """The JSON body of an answer that is not streamed."""

    def event(self, data: bytes) -> list[bytes]:
        """The JSON objects that one server-sent event's data becomes: none, one or several."""


@dataclasses.dataclass(frozen=True)
class EngineCall:
    """A request as the engine takes it.

    reply: None where the engine's answer is the format's. lean: the reply reads nothing of a stream
    but texts, tokens, their log probabilities and why it ended.
    """

    path: str
    body: bytes
    reply: Reply | None = None
    lean: bool = False
