# SPDX-License-Identifier: Apache-2.0
"""Forms with a file, for OpenAI's paths of audio and files: multipart/form-data (RFC 7578)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from handlers.records import FormatError

CONTENT_TYPE = "multipart/form-data"
FILE = "file"
FIELDS = 64
FIELDS_SIZE = 64 * 1024
"""Most parts of a form, and most bytes of all parts except its file."""
_PIECE = 64 * 1024
"""Bytes that are read before the limits are checked."""

_TRUE = {"true", "1", "yes", "on", "y", "t"}  # pydantic's texts for true
_LISTED = "[]"  # the suffix of a field that may be repeated


@dataclass(frozen=True)
class Form:
    """A form. file: the file's content. fields: names and values in order, without `file`."""

    file: bytes
    fields: tuple[tuple[str, str], ...]

    def json(self) -> bytes:
        """The fields as a JSON object of texts; numbers and switches are converted."""
        return msgspec.json.encode({name: _value(name, value) for name, value in self.fields})

    def values(self) -> dict[str, Any]:
        """The fields by name. A field that may be repeated is a list."""
        found: dict[str, Any] = {}
        for name, value in self.fields:
            if name.endswith(_LISTED):
                found.setdefault(name, []).append(value)
            else:
                found[name] = value
        return found


def parse(body: bytes, content_type: str) -> Form:
    """Read a complete form. Raises what FormReader raises."""
    file: list[bytes] = []
    reader = FormReader(content_type, file.append)
    reader.read(body)
    reader.require_whole()
    return Form(b"".join(file), tuple(reader.fields))


class FormReader:
    """Reads a form as its bytes arrive.

    Every function raises FormatError: if the body is not a form, has no file or several, has a
    field twice, or is too large.
    """

    def __init__(self, content_type: str, sink: Callable[[bytes], object]) -> None:
        """sink: gets the file's content, piece by piece."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != CONTENT_TYPE.encode() or not boundary:
            raise FormatError(f"the body should be {CONTENT_TYPE} with a `{FILE}`", FILE)
        self.fields: list[tuple[str, str]] = []
        """Names and values in order, without the file."""
        self.filename: str | None = None
        """The client's name of the file; None before the file."""
        self.size = 0
        """Received bytes of the file."""
        self._sink = sink
        self._read = self._parts = 0
        self._ended = False
        # The current part
        self._header = self._value = self._disposition = b""
        self._name = ""
        self._content = bytearray()
        names = ("part_begin", "part_data", "part_end", "end")
        headers = ("header_begin", "header_field", "header_value", "header_end", "headers_finished")
        callbacks: Any = {f"on_{name}": getattr(self, f"_{name}") for name in (*names, *headers)}
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as error:
            raise _no_form(error) from None

    def read(self, data: bytes) -> None:
        """Parse the next bytes."""
        for place in range(0, len(data), _PIECE):
            piece = data[place : place + _PIECE]
            try:
                self._parser.write(piece)
            except FormParserError as error:
                raise _no_form(error) from None
            self._read += len(piece)
            if self._read - self.size > FIELDS_SIZE:
                raise FormatError(f"a form may have at most {FIELDS_SIZE} bytes beside its file")

    def require_whole(self) -> None:
        """End the body. Raises FormatError if it is incomplete."""
        if not self._ended:
            raise _no_form("it ends in the middle")
        if self.filename is None:
            raise FormatError(f"the form should have a file named `{FILE}`", FILE)

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > FIELDS:
            raise FormatError(f"a form may have at most {FIELDS} fields")
        self._disposition = b""
        self._content.clear()

    def _header_begin(self) -> None:
        self._header = self._value = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value

    def _headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"")
        if kind != b"form-data" or not name:
            raise FormatError("each part of the form should have a Content-Disposition and a name")
        self._name = _text(name, "the name of a field")
        filename = options.get(b"filename")
        if (self._name == FILE) != (filename is not None):
            raise FormatError(f"`{FILE}` should be a file, and nothing else should", self._name)
        if filename is not None:
            known = self.filename is not None
            self.filename = filename.decode(errors="replace")
        else:
            known = any(self._name == name for name, _ in self.fields)
            known = known and not self._name.endswith(_LISTED)
        if known:
            raise FormatError(f"{self._name} is repeated; send it once", self._name)
        if any(it in self._name for it in '"\r\n\\'):
            raise FormatError("the name of a field should be plain")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self.size += end - start
            self._sink(data[start:end])
        else:
            self._content += data[start:end]

    def _part_end(self) -> None:
        if self._name != FILE:
            self.fields.append((self._name, _text(bytes(self._content), self._name)))

    def _end(self) -> None:
        self._ended = True


def _no_form(why: object) -> FormatError:
    return FormatError(f"the body is not {CONTENT_TYPE}: {why}")


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{name} should be UTF-8", name) from None


def _value(name: str, value: str) -> str | bool | int:
    if name == "stream":
        return value.strip().lower() in _TRUE
    if name == "n" and value.isascii() and value.isdigit() and len(value) < 6:
        return int(value)
    return value
