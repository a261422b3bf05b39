# SPDX-License-Identifier: Apache-2.0
"""A file in a form (multipart/form-data, RFC 7578): its content goes to disk as it comes."""

from email.message import Message as Head
from pathlib import Path

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from starlette.types import Receive, Scope

from serving.aio import in_thread
from serving.cancellation import ClientLeft
from serving.errors import BadRequest, TooLarge
from serving.http.bodies import header

FIELDS, FIELD = 16, 4096
"""Parts beside the file, and bytes of each."""
WRITTEN = 2**20
"""Bytes that are written at a time."""
BESIDE = 2**16
"""Bytes of a form beside the file."""


class Form:
    """What a form has. fields: the parts that are no file. filename: the client's, None without a
    file. size: of the file, in bytes.
    """

    def __init__(self, boundary: str) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self.content = bytearray()
        """Of the file, what is not written yet."""
        self._name = bytearray()
        self._value = bytearray()
        self._head = Head()
        self._field = bytearray()
        self._in_file = self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._name.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._header,
                "on_headers_finished": self._headed,
                "on_part_data": self._data,
                "on_part_end": self._part,
                "on_end": self._end,
            },
        )

    def write(self, data: bytes) -> None:
        """Take a piece of the form. Raises BadRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadRequest(f"the body is no form: {error}") from None

    def require_whole(self) -> None:
        """Raise BadRequest for a form without its end, or without a file."""
        if not self._ended:
            raise BadRequest("the form has no end")
        if self.filename is None:
            raise BadRequest("the form should have a part `file` with a filename", "file")

    def _begin(self) -> None:
        self._head = Head()
        self._field = bytearray()
        self._in_file = False

    def _header(self) -> None:
        self._head[self._name.decode("latin-1")] = self._value.decode("utf-8", "replace")
        self._name.clear()
        self._value.clear()

    def _headed(self) -> None:
        if self._part_name() == "file":
            if self.filename is not None:
                raise BadRequest("the form has several files; send one in each", "file")
            self.filename = self._head.get_filename() or "file"
            self._in_file = True
        elif len(self.fields) == FIELDS:
            raise BadRequest(f"the form has more than {FIELDS} fields")

    def _part_name(self) -> str:
        name = self._head.get_param("name", header="content-disposition")
        return name if isinstance(name, str) else ""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.content += data[start:end]
            self.size += end - start
            return
        self._field += data[start:end]
        if len(self._field) > FIELD:
            raise BadRequest(f"a field of the form has more than {FIELD} bytes")

    def _part(self) -> None:
        if not self._in_file:
            self.fields[self._part_name()] = self._field.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True


async def received(scope: Scope, receive: Receive, path: Path, largest: int) -> Form:
    """A form, whose file is written to `path`. Raises BadRequest, TooLarge, ClientLeft and OSError.

    largest: bytes that the file may have.
    """
    head = Head()
    head["content-type"] = header(scope, b"content-type").decode("latin-1")
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        raise BadRequest("send the file as multipart/form-data, as OpenAI's clients do")
    try:
        form = Form(boundary)
    except FormParserError as error:
        raise BadRequest(f"the body is no form: {error}") from None
    length = header(scope, b"content-length")
    if length.isdigit() and int(length) > largest + BESIDE:
        raise TooLarge(largest, OPTION)
    with path.open("wb") as file:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            form.write(message.get("body", b""))
            if form.size > largest:
                raise TooLarge(largest, OPTION)
            more = message.get("more_body", False)
            if len(form.content) >= WRITTEN or not more:
                await in_thread(file.write, bytes(form.content))
                form.content.clear()
    form.require_whole()
    return form


OPTION = "OPTION_BATCH_FILE_SIZE"
