# SPDX-License-Identifier: Apache-2.0
"""Forms with a file, on both paths that take them: invalid ones, too large ones, and truncated
ones.
"""

import asyncio
from pathlib import Path

import pytest

from handlers.multipart import FormReader
from serving.protocol import FILES, TRANSCRIPTIONS
from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

KIND = "multipart/form-data; boundary=a"
FILE = b'--a\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nRIFF\r\n'


def field(name, value=b"a"):
    return b'--a\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name, value)


@pytest.fixture(scope="module")
async def served(anyio_backend, tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    async with running(batch_folder=str(folder), max_request_size=3_000_000) as it:
        it.engine.hears = True
        yield it


def kept(served):
    return [*Path(served.settings.batch_folder, "files").iterdir()]


@pytest.mark.parametrize("path", [FILES, TRANSCRIPTIONS])
@pytest.mark.parametrize(
    ("body", "kind", "told"),
    [
        (b"{}", "application/json", "multipart/form-data with a `file`"),
        (FILE + b"--a--", "multipart/form-data", "multipart/form-data with a `file`"),
        (FILE + b"--a--", f"{KIND}{'a' * 300}", "exceeds maximum of 256"),
        (b"", KIND, "ends in the middle"),
        (b"--a--", KIND, "a file named `file`"),
        (field(b"purpose") + b"--a--", KIND, "a file named `file`"),
        (b"--b\r\n", KIND, "is not multipart/form-data"),
        (FILE, KIND, "ends in the middle"),
        (FILE + FILE + b"--a--", KIND, "file is repeated"),
        (FILE + field(b"b") * 2 + b"--a--", KIND, "b is repeated"),
        (FILE + field(b"b").replace(b'"b"', b'"b"; filename="b"'), KIND, "nothing else should"),
        (field(b"file") + b"--a--", KIND, "`file` should be a file"),
        (b"--a\r\nx: y\r\n\r\nRIFF\r\n--a--", KIND, "and a name"),
        (field(b"") + b"--a--", KIND, "and a name"),
        (FILE + field(b"b\xff") + b"--a--", KIND, "the name of a field should be UTF-8"),
        (FILE + field(b"b", b"\xff") + b"--a--", KIND, "b should be UTF-8"),
        (b"".join(field(b"%d" % n) for n in range(10_000)), KIND, "at most 64 fields"),
        (FILE + field(b"b", b"a" * 200_000), KIND, "at most 65536 bytes beside its file"),
        (FILE + b"--a--" + b"\r\n" * 100_000, KIND, "at most 65536 bytes beside its file"),
        (FILE + b"--a" + b" " * 1_000_000, KIND, "at most 65536 bytes beside its file"),
        (b"--a\r\nb: " + b"c" * 1_000_000, KIND, "Maximum header size exceeded"),
        (b"--a\r\n" + b"b: c\r\n" * 1_000, KIND, "Maximum header count exceeded"),
    ],
)
async def test_what_is_no_form_or_too_much(served, path, body, kind, told):
    answer = await served.client.post(path, content=body, headers={"content-type": kind})
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]
    assert kept(served) == []


@pytest.mark.parametrize("path", [FILES, TRANSCRIPTIONS])
@pytest.mark.parametrize(("length", "sent"), [(10_000, FILE), (10_000, b""), (20, FILE)])
async def test_bodies_that_are_not_as_long_as_they_say(served, path, length, sent):
    """The client leaves before the end, or the rest is read as another request, which is
    invalid.
    """
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: {KIND}\r\n"
    writer.write(f"{head}Content-Length: {length}\r\n\r\n".encode() + sent)
    await writer.drain()
    if length < len(sent):
        assert await reader.readexactly(12) == b"HTTP/1.1 400"
    writer.close()
    while (
        kept(served) or served.server.backend.files._uploads.total() or served.pipeline.bodies.held
    ):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_form_may_come_in_any_pieces(size):
    file = b"\r\n--\r\n--b\r" * 100  # nearly a boundary
    body = field(b"purpose", b"batch") + FILE.replace(b"RIFF", file) + b"--a--\r\n"
    found = bytearray()
    form = FormReader(KIND, found.extend)
    for place in range(0, len(body), size):
        form.read(body[place : place + size])
    form.require_whole()
    assert found == file
    assert (form.fields, form.filename, form.size) == ([("purpose", "batch")], "a", len(file))
