# SPDX-License-Identifier: Apache-2.0
"""Archives of adapters (.tar.gz), read as if an attacker had made them.

Python's tarfile keeps bodies of extended headers of any size in memory, seeks backwards for
negative sizes, and follows sparse maps of any length. So only its parser of a single header is used
here. An archive is read in one direction. Bytes outside of files' contents have a separate limit,
and only files and folders are created.
"""

import contextlib
import gzip
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MEMBERS = 1000  # files and folders that an archive may have
DEPTH = 20  # nested folders
HEADER = 64 * 1024  # bytes of one extended header: pax's, or GNU's for long names
RECORDS = 64  # of one pax header: keys and values of the member that follows
HEADERS = 4 * 1024 * 1024  # bytes of all extended headers
OVERHEAD = 16 * 1024 * 1024  # bytes that are not the content of files: headers and padding
_CHUNK = 1024 * 1024

_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENDED = (*_PAX, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_RECORD = re.compile(rb"[1-9][0-9]{0,5} ")  # of a pax header: its length, "key=value", a line end


class ArchiveError(ValueError):
    """An archive that is damaged, or has members of a forbidden kind. The message says what."""


class _Member(NamedTuple):
    """A file or folder in an archive."""

    path: PurePosixPath
    """Relative."""
    size: int
    content: Iterator[bytes] | None
    """The content of a file; read it before the next member."""


def size(archive: Path, limit: int) -> int:
    """Return the bytes of all files in an archive, which is read to its end without writing.

    Reading stops above `limit` bytes. Raises ArchiveError, and OSError if it cannot be read.
    """
    total = 0
    with _members_of(archive) as members:
        for member in members:
            total += member.size
            if total > limit:
                break
            for _ in member.content or ():
                pass
    return total


def unpack(archive: Path, folder: Path, limit: int) -> None:
    """Write an archive's files into an empty folder. limit: bytes, as size() counted them.

    Raises as size() does, and ArchiveError if there are more bytes. Some files may then exist.
    """
    left = limit
    with _members_of(archive) as members:
        for member in members:
            left -= member.size
            if left < 0:
                raise ArchiveError("it changed while it was read")
            path = folder / member.path
            if member.content is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.writelines(member.content)


@contextlib.contextmanager
def _members_of(archive: Path) -> Iterator[Iterator[_Member]]:
    """An open archive's members. Faults of the archive are raised as ArchiveError."""
    try:
        with gzip.open(archive) as file:
            yield _members(_Stream(file))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArchiveError(str(error)) from error


class _Stream:
    """The bytes of the tar file in an archive."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self._overhead = 0
        self._headers = 0

    def extension(self, size: int) -> bytes:
        """The body of an extended header; the padding after it is read as well."""
        if size > HEADER:
            raise ArchiveError(f"a header of {size} bytes is longer than {HEADER}")
        self._headers += size
        if self._headers > HEADERS:
            raise ArchiveError(f"it has more than {HEADERS} bytes of extended headers")
        return self.overhead(size + -size % tarfile.BLOCKSIZE)[:size]

    def overhead(self, size: int) -> bytes:
        """The next bytes, which are no file's content; fewer than `size` at the end."""
        self._overhead += size
        if self._overhead > OVERHEAD:
            raise ArchiveError(f"it has more than {OVERHEAD} bytes beside its files")
        return self._file.read(size)

    def content(self, size: int) -> Iterator[bytes]:
        """The next bytes, which are a file's content; the padding after it is read as well."""
        left = size
        while left:
            chunk = self._file.read(min(left, _CHUNK))
            if not chunk:
                raise EOFError("it ends within a file")
            left -= len(chunk)
            yield chunk
        self.overhead(-size % tarfile.BLOCKSIZE)


def _members(stream: _Stream) -> Iterator[_Member]:
    extended: dict[str, str] = {}  # facts about a member from the extended headers before it
    count = 0
    while block := stream.overhead(tarfile.BLOCKSIZE):
        if not block.strip(b"\0"):  # the end
            break
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if header.size < 0:
            raise ArchiveError(f"the size of {header.name!r:.200} is negative")
        if header.type in _EXTENDED:
            extended |= _extension(header, stream)
            continue
        count += 1
        if count > MEMBERS:
            raise ArchiveError(f"it has more than {MEMBERS} files and folders")
        yield _member(header, extended, stream)
        extended = {}
    while stream.overhead(_CHUNK):  # to the end, so that gzip checks its checksum
        pass


def _extension(header: tarfile.TarInfo, stream: _Stream) -> dict[str, str]:
    """An extended header's facts about the next member, by pax's keys."""
    body = stream.extension(header.size)
    if header.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": body.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    return _records(body) if header.type in _PAX else {}


def _records(body: bytes) -> dict[str, str]:
    """The keys and values of a pax header.

    https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html
    """
    records: dict[str, str] = {}
    at = count = 0
    while at < len(body):
        count += 1
        if count > RECORDS:
            raise ArchiveError(f"a pax header has more than {RECORDS} records")
        length = _RECORD.match(body, at)
        end = at + int(length[0]) if length else 0
        if not length or not length.end() < end <= len(body) or body[end - 1 : end] != b"\n":
            raise ArchiveError("a pax header is damaged")
        record = body[length.end() : end - 1].decode("utf-8", "surrogateescape")
        key, _, value = record.partition("=")
        records[key] = value
        at = end
    return records


def _member(header: tarfile.TarInfo, extended: dict[str, str], stream: _Stream) -> _Member:
    name = extended.get("path", header.name)
    path = PurePosixPath(name)
    size = extended.get("size", str(header.size))
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ArchiveError(f"{name!r:.200} leads out of the archive's folder")
    if len(path.parts) > DEPTH:
        raise ArchiveError(f"{name!r:.200} is more than {DEPTH} folders deep")
    if not re.fullmatch("[0-9]{1,18}", size):
        raise ArchiveError(f"the size of {name!r:.200} is {size!r:.50}")
    if header.isdir():  # a folder has no content, whatever its size says
        return _Member(path, 0, None)
    if header.type not in _FILES or any(key.startswith("GNU.sparse") for key in extended):
        raise ArchiveError(f"{name!r:.200} is a link, a device or a sparse file")
    if not path.parts:
        raise ArchiveError("a file in it has no name")
    return _Member(path, int(size), stream.content(int(size)))
