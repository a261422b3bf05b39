# SPDX-License-Identifier: Apache-2.0
"""A body of any of LMI's content types → requests as JSON."""

import csv
import io
import itertools
from collections.abc import Iterator

import msgspec

from handlers.records import FormatError

KEYS = ("prompt", "inputs", "messages", "input", "requestType")
"""Every JSON request has one of these keys."""

JSON_LINES = ("application/jsonlines", "application/x-jsonlines", "application/jsonl")


ROWS = 1024
"""Most prompts in a CSV."""
LINE = 2**20
"""Most bytes in a line of a CSV. A field has at most 128 KiB."""
LINES = 100_000
"""Most JSON lines in a body."""


def requests(body: bytes, content_type: str) -> Iterator[bytes]:
    """Return the requests in a body: one, or for JSON lines one for each line that is not blank.

    content_type: the header's value. Text is a prompt, unless it is a JSON request. A CSV has its
    prompts in the column `inputs`. Unknown types count as JSON. Raises FormatError for text that is
    not UTF-8, a CSV without the column, a body without lines, and too many lines.
    """
    match content_type.partition(";")[0].strip().lower():
        case "text/plain" if not _is_request(body):
            return iter([_lmi(_text(body))])
        case "text/csv":
            return iter([_lmi(_column(body))])
        case kind if kind in JSON_LINES:
            return _lines(body)
    return iter([body])


def _lines(body: bytes) -> Iterator[bytes]:
    if body.count(b"\n") > LINES:
        raise FormatError(f"the body has more than {LINES} lines")
    lines = (line for line in io.BytesIO(body) if line.strip())
    first = next(lines, None)
    if first is None:
        raise FormatError("the body has no lines; send at least one")
    return itertools.chain([first], lines)


def _lmi(inputs: str | list[str]) -> bytes:
    return msgspec.json.encode({"inputs": inputs})


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"the body is not UTF-8: {error.reason}") from None


_Keys = msgspec.defstruct("_Keys", [(key, msgspec.Raw, msgspec.Raw()) for key in KEYS])
_read_keys = msgspec.json.Decoder(_Keys).decode


def _is_request(body: bytes) -> bool:
    try:
        found = _read_keys(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return any(bytes(getattr(found, key)) for key in KEYS)


def _column(body: bytes) -> list[str]:
    """Return the column `inputs`. Reading stops at the limits of a CSV."""
    found: list[str] = []
    try:
        rows = csv.DictReader(_csv_lines(body), strict=True)
        if "inputs" not in (rows.fieldnames or ()):
            raise FormatError("the first line of the CSV should name a column `inputs`")
        for row in rows:
            if (value := row.get("inputs")) is None:
                raise FormatError("every row of the CSV should have `inputs`")
            if len(found) == ROWS:
                raise FormatError(f"the CSV has more than {ROWS} rows; send them in several")
            found.append(value)
    except csv.Error as error:
        raise FormatError(f"the body is not CSV: {error}") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"the body is not UTF-8: {error.reason}") from None
    if not found:
        raise FormatError("the CSV has no rows; there should be one")
    return found


def _csv_lines(body: bytes) -> Iterator[str]:
    text = io.TextIOWrapper(io.BytesIO(body), "utf-8-sig", newline="")  # Excel writes a BOM first
    while line := text.readline(LINE + 1):
        if len(line) > LINE:
            raise FormatError(f"a line of the CSV is longer than {LINE} characters")
        yield line
