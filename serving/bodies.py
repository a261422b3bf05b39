"""What a body asks for, in any format, read without the rest of it."""

import contextlib
from typing import NamedTuple

import msgspec
from starlette.types import Receive, Scope

from serving.errors import BadRequest, TooLarge


class Asked(NamedTuple):
    """adapter: its name, "" for the base model by name, None where nothing is said of it.
    sequences: that the engine will work on at once.
    """

    adapter: str | None
    sequences: int
    stream: bool


class Said(msgspec.Struct):
    """What of a body tells its format, can name an adapter, or tells how much it asks for. The rest
    is skipped, not read.
    """

    adapters: str | list[str] | None = None
    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    inputs: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    requestType: msgspec.Raw = msgspec.Raw()  # noqa: N815 - LMI's name
    n: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()

    @property
    def streamed(self) -> bool:
        return bytes(self.stream) not in (b"", b"null", b"false")

    def asked(self, adapter: str | None) -> Asked:
        sequences = prompts(self.prompt or self.inputs or self.input)
        n = self.n
        if self.parameters and b'"n"' in bytes(self.parameters):
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                n = read_said(self.parameters).n
        if n:
            sequences *= _number(n)
        return Asked(adapter, sequences, self.streamed)


read_said = msgspec.json.Decoder(Said).decode


def given(value: msgspec.Raw) -> bool:
    """Whether a key is there, and not null."""
    return bytes(value) not in (b"", b"null")


def prompts(value: msgspec.Raw) -> int:
    """How many prompts there are in a text, a list of texts, of tokens, or of lists of tokens."""
    beginning = bytes(memoryview(value)[:64])
    if not beginning.startswith(b"[") or beginning[1:].lstrip()[:1].isdigit():
        return 1
    return len(msgspec.json.decode(value, type=list[msgspec.Raw])) or 1


def _number(value: msgspec.Raw) -> int:
    """A whole number, or 1."""
    text = bytes(value)
    return int(text) if text.isdigit() and len(text) < 6 else 1


def streamed(body: bytes) -> bool:
    """Whether a stream is asked for. What cannot be read has no answer but an error."""
    if b'"stream"' not in body:
        return False
    try:
        return read_said(body).streamed
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def command(body: bytes) -> str | None:
    """The requestType of a body that asks for nothing else."""
    try:
        said = read_said(body)
        if said.prompt or said.inputs or said.messages:
            return None
        return msgspec.json.decode(said.requestType, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


async def whole(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body. Raises TooLarge when it has more than `limit` bytes.

    A body that is too large but not absurdly so is read to its end all the same: a client that is
    still sending would not see the answer.
    """
    length = header(scope, b"content-length")
    announced = int(length) if length.isdigit() else 0
    if announced > 4 * limit:
        raise TooLarge(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the client left before it had sent the whole body")
        size += len(message.get("body", b""))
        if size <= limit:
            parts.append(message.get("body", b""))
        elif size > 4 * limit:
            raise TooLarge(limit)
        if not message.get("more_body", False):
            break
    if size > limit:
        raise TooLarge(limit)
    return parts[0] if len(parts) == 1 else b"".join(parts)
