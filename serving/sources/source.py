# SPDX-License-Identifier: Apache-2.0
"""The common parts of all sources: their interface, errors, downloads and time-outs."""

import contextlib
import fcntl
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

from lmi_config.facts.model import Checkpoint
from serving.observability import logs
from serving.sources.arriving import Early

T = TypeVar("T")

ANSWER_S = 4.0  # to connect to one address of a host, and until the next bytes
UNREACHABLE_S = 8.0  # after this a host counts as unreachable, with any number of addresses
PERIOD_S = 10.0  # between two notes of progress; each is a log line
CONNECTIONS = 16
HEAD = 128 * 1024  # bytes that hold the header of nearly every safetensors file


class SourceError(ValueError):
    """A model cannot be fetched or read. `reason` says why. The message also has the model's id and
    a fix.
    """

    def __init__(self, model_id: str, reason: str, fix: str) -> None:
        self.reason = reason
        super().__init__(f"{model_id!r}: {reason}; {fix}")


class Unusable(SourceError):
    """The same for files with invalid content: a retry cannot help."""


class Source(Protocol):
    """A place that a model comes from. listed(), checkpoint() and fetch() block, and raise
    SourceError.
    """

    def listed(self) -> "Source":
        """List the source's files. Returns the same source, fixed to this version: checkpoint() and
        fetch() use exactly these files, and fetch() refuses files that have changed since.
        """

    def checkpoint(self) -> Checkpoint:
        """Return the facts about the model, without its weights; takes seconds at most."""

    def fetch(self, note: Callable[[str], None], early: Early | None = None) -> Path:
        """Return a local folder with all needed files. note: called with the progress, as texts.
        early: a use that begins before. Without a missing file it does not begin.
        """

    def room(self) -> int:
        """Return the free bytes of the disk that fetch() writes to."""


class RemoteCheckpoint:
    """A remote checkpoint. Only the first bytes of its files are read.

    sizes: file name → bytes. read: a file's name and a length → its first bytes.
    """

    def __init__(
        self, where: str, sizes: Mapping[str, int], read: Callable[[str, int], bytes]
    ) -> None:
        self.where = where
        self.sizes = sizes
        self._read = read
        self._heads: dict[str, bytes] = {}

    def head(self, name: str, length: int) -> bytes:
        length = min(length, self.sizes[name])
        if name not in self._heads:
            # A caller that reads the header of one part of the weights reads those of all parts,
            # and there may be a hundred.
            folder = PurePosixPath(name).parent
            parts = [
                part
                for part in self.sizes
                if part.endswith(".safetensors") and PurePosixPath(part).parent == folder
            ]
            names = parts if name in parts else [name]
            with ThreadPoolExecutor(CONNECTIONS) as threads:
                self._heads |= zip(names, threads.map(self._first, names), strict=True)
        if len(self._heads[name]) < length:
            self._heads[name] = self._read(name, length)
        return self._heads[name][:length]

    def _first(self, name: str) -> bytes:
        length = min(HEAD, self.sizes[name])
        return self._read(name, length) if length else b""


class Progress:
    """A download's progress, noted every PERIOD_S. Threads may share it.

    what: the name of the download. total: its bytes.
    """

    def __init__(self, what: str, total: int, note: Callable[[str], None]) -> None:
        self._what = what
        self._total = total
        self._note = note
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._last_note = time.monotonic()
        note(f"fetching {what}: {human_size(total)}")

    def add(self, count: int) -> None:
        """Count more bytes; a negative number if a part begins again."""
        with self._lock:
            self._done += count
            self._note_if_due()

    def reach(self, done: int) -> None:
        """Count `done` bytes in all."""
        with self._lock:
            self._done = max(self._done, done)
            self._note_if_due()

    def end(self) -> None:
        took = time.monotonic() - self._began
        self._note(f"fetched {self._what}: {human_size(self._total)} in {took:.0f} s")

    def _note_if_due(self) -> None:
        logs.reach(self._done, self._total)
        now = time.monotonic()
        if now - self._last_note >= PERIOD_S:
            self._last_note = now
            done, total = human_size(self._done), human_size(self._total)
            self._note(f"fetching {self._what}: {done} of {total}")


def human_size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def free_space(folder: Path) -> int:
    """Return the free bytes of a folder's disk. The folder need not exist yet."""
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(nearest).free


def require_space(model_id: str, folder: Path, size: int, variable: str) -> None:
    """Raise SourceError if a folder has less free space. variable: the variable of the folder."""
    free = free_space(folder)
    if size > free:
        reason = f"it needs {human_size(size)}, and {folder} has {human_size(free)} left"
        fix = f"set {variable} to a larger disk (VolumeSizeInGB on SageMaker)"
        raise SourceError(model_id, reason, fix)


@contextlib.contextmanager
def exclusive(lock: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Keep other threads and processes out of the block. The end of the process frees the lock."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("waiting for another process that fetches the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def with_timeout(call: Callable[[], T]) -> T:
    """Call a function. Returns its result. Raises TimeoutError after UNREACHABLE_S.

    Timeouts of sockets are not enough: they apply to each of a host's addresses, and resolving its
    name has no timeout.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(UNREACHABLE_S)
