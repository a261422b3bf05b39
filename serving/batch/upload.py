# SPDX-License-Identifier: Apache-2.0
"""A file in a form: its content goes to disk as it comes."""

from pathlib import Path
from typing import NamedTuple

from starlette.types import Receive, Scope

from handlers.multipart import FIELDS_SIZE, FILE, FormReader
from handlers.records import FormatError
from serving.aio import in_thread
from serving.cancellation import ClientLeft
from serving.errors import TooLarge
from serving.http.bodies import header
from serving.inference.content.fields import bad_request

WRITTEN = 2**20
"""Bytes that are written at a time."""
OPTION = "OPTION_BATCH_FILE_SIZE"


class Upload(NamedTuple):
    """The content of a form. filename: the client's. size: the file's, in bytes."""

    fields: dict[str, str]
    filename: str
    size: int


async def received(scope: Scope, receive: Receive, path: Path, largest: int) -> Upload:
    """A form, whose file is written to `path`. Raises BadRequest, TooLarge, ClientLeft and OSError.

    largest: bytes that the file may have.
    """
    try:
        return await _received(scope, receive, path, largest)
    except FormatError as error:
        raise bad_request(error) from None


async def _received(scope: Scope, receive: Receive, path: Path, largest: int) -> Upload:
    content = bytearray()  # bytes that are not written yet
    form = FormReader(header(scope, b"content-type").decode("latin-1"), content.extend)
    length = header(scope, b"content-length")
    if length.isdigit() and int(length) > largest + FIELDS_SIZE:
        raise TooLarge(largest, OPTION)
    with path.open("wb") as file:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            form.read(message.get("body", b""))
            if form.size > largest:
                raise TooLarge(largest, OPTION)
            more = message.get("more_body", False)
            if len(content) >= WRITTEN or not more:
                await in_thread(file.write, bytes(content))
                content.clear()
    form.require_whole()
    return Upload(dict(form.fields), form.filename or FILE, form.size)
