# SPDX-License-Identifier: Apache-2.0
"""The folder of files and batches. Every function here may block; threads call them.

A file is its content and, beside it, its record, which is written last: without a record there is
no file. Servers may share the folder. Each batch is written by the one that has its lock (flock),
which ends with the process; others only ask for its end, by a file beside it.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from lmi_config.options.declared import Settings
from serving import folders
from serving.batch.objects import BATCH, FILE, ID, INPUT, File, OwnedBatch, OwnedFile, Status
from serving.errors import BadRequest, Conflict, NotFound, StorageFull

T = TypeVar("T")

UPLOAD = ".upload-"
"""The prefix of incomplete uploads."""
SHARE = 0.5
"""The share of all space for one tenant, so that others always find some."""
UPLOAD_S = 24 * 3600
"""Seconds after which an incomplete upload may be removed."""


def owner(tenant: str | None) -> str | None:
    """The stored digest of a tenant, None without tenants."""
    return None if tenant is None else hashlib.sha256(tenant.encode()).hexdigest()


def locked(path: Path) -> BinaryIO | None:
    """The file, locked for this process until it is closed; None if another process has it."""
    file = open(path, "ab", opener=_for_this_user)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


class Store:
    """Files and batches in a folder, each its owner's. Raises OSError if the folder cannot be used.

    clock: seconds since 1970.
    """

    def __init__(
        self, folder: Path, settings: Settings, clock: Callable[[], float] = time.time
    ) -> None:
        self._most_files = settings.batch_files
        self._most_bytes = settings.batch_storage
        self._retention = settings.batch_retention
        self._clock = clock
        self._files = folder / "files"
        self._batches = folder / "batches"
        self._folder = folder
        self._lock = threading.Lock()  # the counted files do not change before it is kept
        self._read: dict[int, str | None] = {}  # descriptors of contents that are read: owners

    def open(self) -> None:
        """Make the folder, for this user alone."""
        folders.make(self._folder)
        for path in (self._files, self._batches):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            folders.require_ours(path)

    def now(self) -> int:
        return int(self._clock())

    # Room

    def used(self) -> int:
        """Bytes of all that is in the folder, and of deleted files that are still read here."""
        found = sum(size for size, _ in self._deleted())
        for folder in (self._files, self._batches):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found += entry.stat(follow_symlinks=False).st_size
        return found

    @contextlib.contextmanager
    def reading(self, name: str, owner: str | None) -> Iterator[Path]:
        """A path that keeps a content readable to its end, even if it is deleted meanwhile; its
        bytes count until then. Raises FileNotFoundError.
        """
        descriptor = os.open(self.content(name), os.O_RDONLY | os.O_NOFOLLOW)
        self._read[descriptor] = owner
        try:
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            del self._read[descriptor]
            os.close(descriptor)

    def _deleted(self) -> Iterator[tuple[int, str | None]]:
        """The sizes of deleted files that are still read here, and whose they were."""
        for descriptor, owner in [*self._read.items()]:
            with contextlib.suppress(OSError):  # closed by now
                status = os.fstat(descriptor)
                if not status.st_nlink:
                    yield status.st_size, owner

    def require_room(self, owner: str | None) -> None:
        """Raise StorageFull if the owner may not add a file."""
        self.require_space(owner)
        files = self._owned(self._files, OwnedFile)
        if self._are_many([it.owner for it in files if it.file.purpose == INPUT], owner):
            raise StorageFull(
                f"there may be {self._most_files} files (OPTION_BATCH_FILES), half of them one "
                "tenant's; delete files that are not needed"
            )

    def begin(self, owned: OwnedBatch) -> None:
        """Keep a new batch. If there are many, it replaces the owner's oldest that has ended.
        Raises NotFound and BadRequest for its input, and StorageFull; then nothing changes.
        """
        with self._lock:
            oldest = self._gives_way(owned.owner)
            file = self.file(owned.batch.input_file_id, owned.owner)
            if file.purpose != INPUT:
                raise BadRequest(
                    f"{file.id} has the purpose {file.purpose!r}; it should be {INPUT!r}",
                    "input_file_id",
                )
            self.save(owned)
            if oldest:
                self._forget(oldest)

    def _gives_way(self, owner: str | None) -> str | None:
        """The batch that a new one of this owner replaces, or None. Raises StorageFull."""
        self.require_space(owner)
        if sum(it.owner == owner for it in self._owned(self._files, OwnedFile)) >= self._most_files:
            raise StorageFull(
                f"there are {self._most_files} files with inputs and answers (OPTION_BATCH_FILES); "
                "delete files that are not needed"
            )
        batches = [*self._owned(self._batches, OwnedBatch)]
        if not self._are_many([it.owner for it in batches], owner):
            return None
        ended = [it.batch for it in batches if it.owner == owner and not it.batch.status.open]
        if not ended:
            raise StorageFull(
                f"there may be {self._most_files} batches (OPTION_BATCH_FILES), half of them one "
                "tenant's; wait until some have ended, or cancel them"
            )
        return min(ended, key=lambda it: it.created_at).id

    def _are_many(self, owners: list[str | None], owner: str | None) -> bool:
        most = self._most_files
        return len(owners) >= most or (owner is not None and owners.count(owner) >= most * SHARE)

    def require_space(self, owner: str | None) -> None:
        """Raise StorageFull if the folder, or the owner's part of it, may not grow."""
        most = self._most_bytes
        if self.used() > most or (owner is not None and self._used_by(owner) > most * SHARE):
            raise StorageFull(
                f"files and batches may have {most} bytes together (OPTION_BATCH_STORAGE), half of "
                "them one tenant's; delete files that are not needed"
            )

    def _used_by(self, owner: str) -> int:
        """Bytes of an owner's files, of those that its batches write, and of deleted ones that are
        still read here.
        """
        found = sum(
            it.file.bytes for it in self._owned(self._files, OwnedFile) if it.owner == owner
        )
        found += sum(size for size, whose in self._deleted() if whose == owner)
        for batch in self.open_batches():
            if batch.owner == owner:
                for name in (batch.output, batch.errors):
                    with contextlib.suppress(FileNotFoundError):
                        found += self.content(name).stat().st_size
        return found

    # Files

    def begin_upload(self) -> Path:
        """An empty file to be written, and then kept or removed."""
        path = self._files / f"{UPLOAD}{secrets.token_hex(16)}"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return path

    def keep(self, upload: Path, owned: OwnedFile) -> None:
        """Publish a written content as a file."""
        _sync(upload)
        upload.rename(self.content(owned.file.id))
        self.add(owned)

    def add(self, owned: OwnedFile) -> None:
        """Make a content that is there a file."""
        _write(self._files / f"{owned.file.id}.json", owned)

    def described(
        self, name: str, filename: str, purpose: str, size: int, lives: int | None = None
    ) -> File:
        """A file that begins now. lives: lifetime in seconds, if shorter than the default."""
        now = self.now()
        seconds = min(lives or self._retention, self._retention)
        return File(
            id=name,
            bytes=size,
            created_at=now,
            expires_at=now + seconds,
            filename=filename,
            purpose=purpose,
        )

    def content(self, name: str) -> Path:
        """The path of a file's content."""
        return self._files / name

    def file(self, name: str, owner: str | None) -> File:
        """The owner's file of this name. Raises NotFound."""
        found = _read(self._files / f"{name}.json", OwnedFile) if _is(name, FILE) else None
        if not found or found.owner != owner or found.file.expires_at <= self._clock():
            raise NotFound(f"No such File object: {name!r:.100}")
        return found.file

    def files(self, owner: str | None) -> list[File]:
        """The owner's files, the newest first."""
        found, now = self._owned(self._files, OwnedFile), self._clock()
        files = [it.file for it in found if it.owner == owner and it.file.expires_at > now]
        return sorted(files, key=lambda it: (it.created_at, it.id), reverse=True)

    def delete(self, name: str, owner: str | None) -> None:
        """Delete one of the owner's files. Raises NotFound, and Conflict if a batch reads it."""
        with self._lock:
            self.file(name, owner)
            for batch in self.open_batches():
                if name == batch.batch.input_file_id:
                    raise Conflict(f"{batch.batch.id} reads this file; cancel the batch first")
            self._remove(name)

    def _remove(self, name: str) -> None:
        (self._files / f"{name}.json").unlink(missing_ok=True)
        self.content(name).unlink(missing_ok=True)

    # Batches

    def save(self, owned: OwnedBatch, *, durable: bool = True) -> None:
        """Write a batch. durable: whether a machine that loses power still has it."""
        _write(self._batches / f"{owned.batch.id}.json", owned, durable=durable)

    def batch(self, name: str, owner: str | None, *, anybodys: bool = False) -> OwnedBatch:
        """The batch of this name, of this owner or of any. Raises NotFound."""
        found = self.any_batch(name)
        if not found or not (anybodys or found.owner == owner):
            raise NotFound(f"No batch found with id {name!r:.100}")
        return found

    def any_batch(self, name: str) -> OwnedBatch | None:
        """A batch, whosever it is."""
        path = self._batches / f"{name}.json"
        found = _read(path, OwnedBatch) if _is(name, BATCH) else None
        if found and found.batch.status.open and (asked := self.cancel_asked(name)):
            found.batch.status = Status.CANCELLING
            found.batch.cancelling_at = asked
        return found

    def batches(self, owner: str | None, *, anybodys: bool = False) -> list[OwnedBatch]:
        """The batches of this owner, or of all owners, the newest first."""
        found = (self.any_batch(path.stem) for path in self._records(self._batches))
        batches = [it for it in found if it and (anybodys or it.owner == owner)]
        return sorted(batches, key=lambda it: (it.batch.created_at, it.batch.id), reverse=True)

    def open_batches(self) -> list[OwnedBatch]:
        """The batches with work left, the oldest first."""
        found = (self.any_batch(path.stem) for path in self._records(self._batches))
        batches = [it for it in found if it and it.batch.status.open]
        return sorted(batches, key=lambda it: (it.batch.created_at, it.batch.id))

    def ask_to_cancel(self, name: str) -> None:
        """Ask the server that runs a batch to end it."""
        with contextlib.suppress(FileExistsError):
            (self._batches / f"{name}.cancel").touch(mode=0o600, exist_ok=False)

    def cancel_asked(self, name: str) -> int | None:
        """When somebody asked for a batch's end."""
        try:
            return int((self._batches / f"{name}.cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def lock(self, name: str) -> BinaryIO | None:
        """The lock that lets only this process run a batch until it is closed; None if another
        process holds it.
        """
        return locked(self._batches / f"{name}.lock")

    def _forget(self, name: str) -> None:
        for suffix in (".json", ".cancel", ".lock"):
            (self._batches / f"{name}{suffix}").unlink(missing_ok=True)

    # Retention

    def sweep(self) -> None:
        """Remove expired files and batches, except those that batches still read or write."""
        now, used = self._clock(), set[str]()
        for path in list(self._records(self._batches)):
            found = _read(path, OwnedBatch)
            if found and found.batch.status.open:
                used |= {found.batch.input_file_id, found.output, found.errors}
            elif _age(path, now) >= self._retention:
                self._forget(path.stem)
        for path in list(self._batches.glob(".*")):  # a process ended while it wrote one
            if _age(path, now) >= UPLOAD_S:
                path.unlink(missing_ok=True)
        for path in list(self._files.iterdir()):
            name = path.name.removesuffix(".json")
            if name not in used and self._outlived(path, name, now):
                self._remove(name)

    def _outlived(self, path: Path, name: str, now: float) -> bool:
        found = _read(self._files / f"{name}.json", OwnedFile)
        if found:
            return found.file.expires_at <= now
        return _age(path, now) >= UPLOAD_S  # without an owner

    def _owned(self, folder: Path, kind: type[T]) -> Iterator[T]:
        return (found for path in self._records(folder) if (found := _read(path, kind)))

    def _records(self, folder: Path) -> Iterator[Path]:
        return (path for path in folder.glob("*.json") if ID.fullmatch(path.stem))


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _age(path: Path, now: float) -> float:
    """Seconds since a file was written; 0 if another server has just removed it."""
    with contextlib.suppress(FileNotFoundError):
        return now - path.stat().st_mtime
    return 0


def _is(name: str, kind: str) -> bool:
    """Whether a name is an id of this kind, and so no path to anywhere."""
    return name.startswith(kind) and bool(ID.fullmatch(name))


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _write(path: Path, value: object, *, durable: bool = True) -> None:
    """Write a file whole, or not at all."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(value))
            file.flush()
            if durable:
                os.fsync(file.fileno())
        beside.rename(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    if durable:
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Make a file or a folder survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
