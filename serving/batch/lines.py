# SPDX-License-Identifier: Apache-2.0
"""The lines of a batch: requests in its input, answers in its output.

Both are OpenAI's (platform.openai.com/docs/guides/batch). As there, a batch whose input is at fault
fails as a whole, and says which lines are at fault; a body that cannot be answered is the fault of
its line alone. Faults have the codes of Azure's documentation of the same API
(learn.microsoft.com/azure/ai-services/openai/how-to/batch, Error codes), and two further ones.
"""

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

import msgspec

from serving.batch.objects import Fault

LINES = 50_000
"""In a batch: OpenAI's limit. There may be as many blank ones."""
FAULTS = 100
"""That are listed."""
CUSTOM_ID = 512
"""Characters."""

EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}
"""The error of a line that there was no time for, in OpenAI's words."""


def digest(custom_id: str) -> bytes:
    """The digest of a custom_id in memory, 16 bytes, because a batch has many."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Line(NamedTuple):
    """A request of a batch."""

    custom_id: str
    body: bytes


class _Input(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Answered(msgspec.Struct):
    custom_id: str


_read_input = msgspec.json.Decoder(_Input).decode
_read_answered = msgspec.json.Decoder(_Answered).decode


def requests(file: BinaryIO) -> Iterator[Line]:
    """The requests in an input that validate() has no fault to find with. Blank lines are none."""
    for line in file:
        if line.strip():
            found = _read_input(line)
            yield Line(found.custom_id, bytes(found.body))


def validate(file: BinaryIO, endpoint: str, longest: int) -> tuple[int, list[Fault]]:
    """How many requests an input has, and its faults. longest: bytes that a line may have."""
    seen: set[bytes] = set()
    faults: list[Fault] = []
    for number, line in enumerate(_lines(file, longest), 1):
        if line.strip() and (fault := _fault(line, number, endpoint, longest, seen)):
            faults.append(fault)
        if len(faults) == FAULTS:
            break
        if len(seen) > LINES or number > 2 * LINES:
            return len(seen), [Fault("too_many_tasks", f"a batch may have {LINES} lines", number)]
    if not seen and not faults:
        faults.append(
            Fault("empty_file", "the input file has no lines; write one for each request")
        )
    return len(seen), faults


def _lines(file: BinaryIO, longest: int) -> Iterator[bytes]:
    """The lines of a file; of one that is longer, so much that it can be seen."""
    while line := file.readline(longest + 1):
        yield line
        while len(line) > longest and not line.endswith(b"\n"):
            line = file.readline(longest + 1)


def _fault(line: bytes, number: int, endpoint: str, longest: int, seen: set[bytes]) -> Fault | None:
    """The fault of a line; its custom_id, if any, then counts as seen."""
    if len(line) > longest:
        return Fault("invalid_request", f"the line is longer than {longest} bytes", number)
    try:
        found = _read_input(line)
    except msgspec.ValidationError as error:
        return Fault("invalid_request", str(error), number)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Fault("invalid_json_line", "the line should be a JSON object", number)
    if not 0 < len(found.custom_id) <= CUSTOM_ID:
        message = f"custom_id should have 1 to {CUSTOM_ID} characters"
        return Fault("invalid_request", message, number, "custom_id")
    custom_id = digest(found.custom_id)
    if custom_id in seen:
        message = "custom_id is that of a line before; give each its own"
        return Fault("duplicate_custom_id", message, number, "custom_id")
    seen.add(custom_id)
    if found.method != "POST":
        return Fault("invalid_method", "method should be POST", number, "method")
    if found.url != endpoint:
        message = f"url should be the batch's endpoint, {endpoint}"
        return Fault("url_mismatch", message, number, "url")
    if not bytes(found.body).startswith(b"{"):
        return Fault("invalid_request", "body should be a JSON object", number, "body")
    return None


def answered(file: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """The digests of the custom_ids of answers, and where each ends in the file, up to the first
    that is not whole: the process ended while it was written.
    """
    end = 0
    for line in file:
        end += len(line)
        try:
            custom_id = digest(_read_answered(line).custom_id)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        if not line.endswith(b"\n"):
            return
        yield custom_id, end


def new_request() -> str:
    """The id of one request of a batch."""
    return f"batch_req_{secrets.token_hex(16)}"


def answer(request: str, line: Line, status: int, body: bytes) -> bytes:
    """The line that answers one, in the output or, from status 400 on, among the errors."""
    try:
        content: object = msgspec.Raw(msgspec.json.format(body, indent=-1))  # it may have lines
    except msgspec.MsgspecError:
        content = body.decode(errors="replace")  # a formatter's
    response = {"status_code": status, "request_id": request, "body": content}
    entry = {"id": request, "custom_id": line.custom_id, "response": response, "error": None}
    return msgspec.json.encode(entry) + b"\n"


def expired(line: Line) -> bytes:
    """The line, among the errors, of one that there was no time for."""
    entry = {"id": new_request(), "custom_id": line.custom_id, "response": None, "error": EXPIRED}
    return msgspec.json.encode(entry) + b"\n"
