"""A body of any content type that LMI takes → requests as JSON."""

import csv
import io

import msgspec

from handlers.records import FormatError

KEYS = ("prompt", "inputs", "messages", "requestType")
"""One of these is in every JSON request."""

JSON_LINES = ("application/jsonlines", "application/x-jsonlines", "application/jsonl")


def requests(body: bytes, content_type: str) -> list[bytes]:
    """The requests in a body: one, or for JSON lines one for each line that is not blank.

    content_type: as the header has it. Text is a prompt, unless it is a JSON request after all, and
    a CSV has its prompts in the column `inputs`; what is of no type that is known counts as JSON.
    Raises FormatError for text that is not UTF-8, a CSV without the column, and lines without any.
    """
    match content_type.partition(";")[0].strip().lower():
        case "text/plain" if not _is_request(body):
            return [_lmi(_text(body))]
        case "text/csv":
            return [_lmi(_column(_text(body)))]
        case kind if kind in JSON_LINES:
            lines = [line for line in body.splitlines() if line.strip()]
            if not lines:
                raise FormatError("the body has no lines")
            return lines
    return [body]


def _lmi(inputs: str | list[str]) -> bytes:
    return msgspec.json.encode({"inputs": inputs})


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"the body is not UTF-8: {error.reason}") from None


def _is_request(body: bytes) -> bool:
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return any(key in found for key in KEYS)


def _column(text: str) -> list[str]:
    try:
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        found = [row.get("inputs") for row in rows]
        if "inputs" not in (rows.fieldnames or ()):
            raise FormatError("the first line of the CSV should name a column `inputs`")
    except csv.Error as error:
        raise FormatError(f"the body is not CSV: {error}") from None
    if not found or None in found:
        raise FormatError("every row of the CSV should have `inputs`, and there should be one")
    return [value for value in found if value is not None]
