# SPDX-License-Identifier: Apache-2.0
"""Forms with a file, as OpenAI's audio paths take them: multipart/form-data (RFC 7578)."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from handlers.records import FormatError

CONTENT_TYPE = "multipart/form-data"
FILE = "file"
FIELDS = 64
FIELDS_SIZE = 64 * 1024
"""Fields that a form may have, and bytes of their names, headers and values together."""

_TRUE = {"true", "1", "yes", "on", "y", "t"}  # as pydantic reads a text that is to be true or false
_LISTED = "[]"  # what the name of a field ends with that may be there several times


@dataclass(frozen=True)
class Form:
    """file: its content. fields: names and values, in their order; `file` is none of them."""

    file: bytes
    fields: tuple[tuple[str, str], ...]

    def json(self) -> bytes:
        """The fields as a JSON object of texts; what is a number or a switch is one in it."""
        return msgspec.json.encode({name: _value(name, value) for name, value in self.fields})

    def rendered(self, keys: Mapping[str, object]) -> tuple[bytes, bytes]:
        """The same form with these fields in the place of those so named, and its content type."""
        kept = [(name, value) for name, value in self.fields if name not in keys]
        fields = [*kept, *((name, f"{value}") for name, value in keys.items())]
        boundary = secrets.token_hex(16).encode()  # which no content can have guessed
        head = b"--%b\r\nContent-Disposition: form-data; name=" % boundary
        parts = [b'%b"%b"\r\n\r\n%b\r\n' % (head, n.encode(), v.encode()) for n, v in fields]
        file = b'%b"%b"; filename="%b"\r\nContent-Type: application/octet-stream\r\n\r\n'
        name = FILE.encode()
        body = b"".join(
            (*parts, file % (head, name, name), self.file, b"\r\n--%b--\r\n" % boundary)
        )
        return body, b"multipart/form-data; boundary=" + boundary


def parse(body: bytes, content_type: str) -> Form:
    """Read a form. Raises FormatError for what is none, or has no file or more than one, a field
    twice, or too many.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != CONTENT_TYPE.encode() or not boundary:
        raise FormatError(f"the body should be {CONTENT_TYPE} with a `{FILE}`", FILE)
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise FormatError(f"the body is not {CONTENT_TYPE}: {error}") from None
    if not reader.ended:
        raise FormatError(f"the body is not {CONTENT_TYPE}: it ends in the middle")
    if reader.file is None:
        raise FormatError(f"the form should have a file named `{FILE}`", FILE)
    return Form(reader.file, tuple(reader.fields))


@dataclass
class _Reader:
    """What the parser has come across."""

    file: bytes | None = None
    fields: list[tuple[str, str]] = field(default_factory=list)
    ended: bool = False
    _size: int = 0
    _parts: int = 0
    _header: list[bytes] = field(default_factory=lambda: [b"", b""])
    _disposition: bytes = b""
    _name: str = ""
    _is_file: bool = False
    _content: list[bytes] = field(default_factory=list)

    def callbacks(self) -> Any:
        names = (
            *("part_begin", "part_data", "part_end", "end"),
            *("header_begin", "header_field", "header_value", "header_end", "headers_finished"),
        )
        return {f"on_{name}": getattr(self, name) for name in names}

    def part_begin(self) -> None:
        self._parts += 1
        if self._parts > FIELDS:
            raise FormatError(f"a form may have at most {FIELDS} fields")
        self._disposition, self._content = b"", []

    def header_begin(self) -> None:
        self._header = [b"", b""]

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header[0] += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header[1] += data[start:end]

    def header_end(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = self._header[1]

    def headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"")
        if kind != b"form-data" or not name:
            raise FormatError("each part of the form should have a Content-Disposition and a name")
        self._name = _text(name, "the name of a field")
        self._is_file = self._name == FILE
        if self._is_file != (b"filename" in options):
            raise FormatError(f"`{FILE}` should be a file, and nothing else should", self._name)
        known = any(self._name == name for name, _ in self.fields)
        if (self._is_file and self.file is not None) or (
            known and not self._name.endswith(_LISTED)
        ):
            raise FormatError(f"{self._name} is there twice", self._name)
        if not self._is_file and any(it in self._name for it in '"\r\n\\'):
            raise FormatError("the name of a field should be plain")

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._count(end - start)
        self._content.append(data[start:end])

    def part_end(self) -> None:
        content = b"".join(self._content)
        if self._is_file:
            self.file = content
        else:
            self.fields.append((self._name, _text(content, self._name)))

    def end(self) -> None:
        self.ended = True

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > FIELDS_SIZE:
            raise FormatError(f"the fields of a form may have at most {FIELDS_SIZE} bytes")


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
