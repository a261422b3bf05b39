# SPDX-License-Identifier: Apache-2.0
"""The list of adapters that servers share: a folder on a volume that all of them mount, a prefix in
S3, or a hash in a Valkey or Redis, with a file for each. Each server writes its registrations, and
registers those of others.
"""

import contextlib
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import msgspec

from serving.sources.s3 import faults, open_client
from serving.sources.source import ANSWER_S, UNREACHABLE_S, SourceError, with_timeout

SUFFIX = ".json"
FILES = 10_000
"""Most files in a list. More raise an OSError."""
LARGEST = 64 * 1024
"""Maximum bytes of a file in it; a longer one is ignored."""
RIGHTS = "s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject"


class Entry(msgspec.Struct, frozen=True):
    """An adapter as it was registered."""

    src: str
    digest: str
    """Digest of its files at that time."""
    preload: bool = False
    pin: bool = False


class Place(Protocol):
    """The place of the list's files. The methods block, and raise OSError if it cannot be used."""

    pause_s: float
    """Seconds between two polls."""

    def put(self, name: str, content: bytes) -> None:
        """Write a file atomically."""

    def drop(self, name: str) -> None:
        """Remove a file, if it exists."""

    def read(self) -> Mapping[str, bytes]:
        """Return all files: name → content. Unchanged files are not read again."""


def _require_few(count: int) -> None:
    if count > FILES:
        raise OSError(f"it has more than {FILES} files, and a list has one file per adapter")


class _ListFile(NamedTuple):
    version: object
    content: bytes


class ListFolder:
    """A list in a folder."""

    pause_s = 1.0

    def __init__(self, folder: Path) -> None:
        """Raises OSError if it cannot be made."""
        self._folder = folder
        self._known: dict[str, _ListFile] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        path = self._folder / name
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if file.read(len(content) + 1) == content:
                return
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as part:
            part.write(content)
            part.flush()
            os.fsync(part.fileno())
        Path(part.name).chmod(0o644)  # servers may run as different users
        Path(part.name).replace(path)

    def drop(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def read(self) -> Mapping[str, bytes]:
        found: dict[str, _ListFile] = {}
        with os.scandir(self._folder) as files:
            for file in files:
                if not file.name.endswith(SUFFIX) or file.name.startswith("."):
                    continue
                with contextlib.suppress(FileNotFoundError):  # it was just removed
                    stat = file.stat()
                    version = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                    known = self._known.get(file.name)
                    if not known or known.version != version:
                        with Path(file.path).open("rb") as content:
                            known = _ListFile(version, content.read(LARGEST + 1))
                    found[file.name] = known
                    _require_few(len(found))
        self._known = found
        return {name: it.content for name, it in found.items()}


class ListBucket:
    """A list in S3: `s3://bucket/prefix`."""

    pause_s = 10.0  # each poll is a call that costs money

    def __init__(self, uri: str) -> None:
        """Raises OSError if the URI is invalid."""
        from boto3.session import Session  # slow to import

        parts = urlsplit(uri)
        self._uri = uri
        self._bucket = parts.netloc
        self._prefix = f"{parts.path.strip('/')}/".lstrip("/")
        self._known: dict[str, _ListFile] = {}
        with self._faults():
            self._client = open_client(uri, Session(), ANSWER_S, attempts=2)

    def put(self, name: str, content: bytes) -> None:
        with self._faults():
            with_timeout(
                lambda: self._client.put_object(
                    Bucket=self._bucket, Key=self._prefix + name, Body=content
                )
            )

    def drop(self, name: str) -> None:
        with self._faults():
            with_timeout(
                lambda: self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)
            )

    def read(self) -> Mapping[str, bytes]:
        with self._faults():
            ends = time.monotonic() + UNREACHABLE_S
            self._known = with_timeout(lambda: self._look(ends))
        return {name: it.content for name, it in self._known.items()}

    def _look(self, ends: float) -> dict[str, _ListFile]:
        """Read all files. ends: the time when the caller stops waiting, by time.monotonic()."""
        found: dict[str, _ListFile] = {}
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        for seen, item in enumerate(it for page in pages for it in page.get("Contents", ())):
            _require_few(seen)
            if time.monotonic() > ends:
                raise TimeoutError
            name = item["Key"].removeprefix(self._prefix)
            if not name.endswith(SUFFIX) or "/" in name:
                continue
            known = self._known.get(name)
            if not known or known.version != item["ETag"]:
                known = None
                with contextlib.suppress(self._client.exceptions.NoSuchKey):  # it was just removed
                    answer = self._client.get_object(Bucket=self._bucket, Key=item["Key"])
                    known = _ListFile(answer["ETag"], answer["Body"].read(LARGEST + 1))
            if known:
                found[name] = known
        return found

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Raise errors of S3 or its client as OSError."""
        try:
            with faults(self._uri):
                yield
        except SourceError as error:
            raise OSError(f"{self._uri}: {error.reason}; a list needs {RIGHTS}") from None


class ListStore:
    """A list in a Valkey or Redis: a hash of the files.

    A deletion is also an entry. If a file is missing without a deletion, the store has lost it, for
    example in a restart without its data. A server that has read the file writes it again.
    """

    pause_s = 1.0
    KEY = "slipway-adapters"
    KEPT_S = 24 * 3600
    """Deletions are kept for this many seconds."""
    _VERSION = b"version"
    """A further field of the hash: a new value after each change."""
    _FORGET = """
    if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
    """

    _READ = """
    local found = redis.call('HGET', KEYS[1], ARGV[1])
    return found and string.sub(found, 1, ARGV[2])
    """
    _ALL = """
    local found = redis.call('HGETALL', KEYS[1])
    for n, text in ipairs(found) do found[n] = string.sub(text, 1, ARGV[1]) end
    return found
    """

    def __init__(self, url: str) -> None:
        """url: the value of OPTION_ADAPTER_LIST."""
        from redis import Redis  # whose import takes a seventh of a server's start

        parts = urlsplit(url)
        self._where = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}"  # no password
        self._client = Redis.from_url(
            "redis" + url.removeprefix("valkey").removeprefix("redis"),
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
        )
        self._lock = threading.Lock()
        self._version: bytes | None = None
        self._known: dict[bytes, bytes] = {}  # files and deletions, as they were read or written

    def put(self, name: str, content: bytes) -> None:
        with self._lock, self._faults():
            self._write({name.encode(): content})
            self._known[name.encode()] = content

    def drop(self, name: str) -> None:
        self.put(name, b"deleted %d" % time.time())

    def read(self) -> Mapping[str, bytes]:
        with self._lock, self._faults():
            version = self._client.eval(self._READ, 1, self.KEY, self._VERSION, LARGEST + 1)
            if version is None or version != self._version:
                self._look()
            return {
                name.decode(errors="backslashreplace"): content
                for name, content in self._known.items()
                if name.endswith(SUFFIX.encode()) and not _DELETED.fullmatch(content)
            }

    def _write(self, files: Mapping[bytes, bytes]) -> None:
        fields: dict[Any, Any] = {**files, self._VERSION: uuid.uuid4().bytes}
        self._client.hset(self.KEY, mapping=fields)

    def _look(self) -> None:
        """Read all files, and restore those that the store has lost."""
        _require_few(self._client.hlen(self.KEY))
        told = cast("list[bytes]", self._client.eval(self._ALL, 1, self.KEY, LARGEST + 1))
        found = dict(zip(told[::2], told[1::2], strict=True))
        self._version = found.pop(self._VERSION, None)
        for name, content in found.items():
            if _age(content) > self.KEPT_S:
                self._client.eval(self._FORGET, 1, self.KEY, name, content)
        # Without old deletions: other servers may have forgotten them by now.
        lost = {
            name: content
            for name, content in self._known.items()
            if name not in found and _age(content) < self.KEPT_S / 2
        }
        if lost:
            with self._client.pipeline(transaction=False) as calls:
                for name, content in lost.items():
                    calls.hsetnx(self.KEY, name, content)  # another server may have restored it
                calls.execute()
            self._write({})
        self._known = lost | found

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Raise errors of the store or its client as OSError."""
        from redis.exceptions import RedisError

        try:
            yield
        except RedisError as error:
            raise OSError(f"{self._where}: {error}") from None


_DELETED = re.compile(rb"deleted (\d{1,12})")
"""The record of a deletion: its time, in seconds since the epoch."""


def _age(content: bytes) -> float:
    """Return the seconds since a deletion; 0 for other entries."""
    deleted = _DELETED.fullmatch(content)
    return time.time() - int(deleted[1]) if deleted else 0.0


class SharedList:
    """The list. Its methods block, and raise OSError if its place cannot be used."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: dict[str, tuple[bytes, Entry]] = {}
        self.pause_s = place.pause_s
        """Seconds between two polls."""

    def put(self, name: str, entry: Entry) -> None:
        """Add or replace an adapter's entry, atomically."""
        self._place.put(name + SUFFIX, msgspec.json.encode(entry))

    def drop(self, name: str) -> None:
        """Remove an adapter from the list."""
        self._place.drop(name + SUFFIX)

    def read(self) -> tuple[dict[str, Entry], dict[str, str]]:
        """Return the adapters by name, and the faults of invalid files by name."""
        found: dict[str, tuple[bytes, Entry]] = {}
        faults: dict[str, str] = {}
        for file, content in self._place.read().items():
            name = file.removesuffix(SUFFIX)
            known = self._known.get(name)
            if known and known[0] == content:
                found[name] = known
                continue
            try:
                if len(content) > LARGEST:
                    raise ValueError(f"it has more than {LARGEST} bytes")
                found[name] = content, msgspec.json.decode(content, type=Entry)
            except (ValueError, RecursionError) as error:  # msgspec's and UTF-8's are ValueErrors
                faults[name] = f"the shared list: {repr(file)[1:-1]:.200} is no adapter's: {error}"
        self._known = found
        return {name: entry for name, (_, entry) in found.items()}, faults
