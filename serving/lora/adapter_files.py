# SPDX-License-Identifier: Apache-2.0
"""The sources of adapters' files: folders, archives and S3. All of it blocks."""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import logging
import os
import re
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from handlers.custom import FILE
from lmi_config.facts.adapter import CONFIG, WEIGHTS
from lmi_config.facts.model import Checkpoint, Folder, ModelError
from lmi_config.options import parsers, secure
from serving.errors import BadRequest, Conflict, NoSlot
from serving.lora import archives
from serving.sources import hub_adapter
from serving.sources.digests import Digests, combined
from serving.sources.hub_adapter import HubAdapter, HubListing
from serving.sources.s3 import S3, Listing
from serving.sources.source import SourceError, Unusable, exclusive

log = logging.getLogger(__name__)

FILES = 10_000  # in the folder of an adapter that has code
LARGE = 64 * 1024 * 1024
"""A larger file beside the weights, in bytes, counts by its time instead of its content."""
_PACKED = (".tar.gz", ".tgz")
_HELD = "held"
"""The lock file of a place. A server that uses the place holds it."""
_PLACE = re.compile(r"[0-9a-f]{24}")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CHANGED = ("it has changed since it was registered", "delete it and register it again")


@dataclasses.dataclass(frozen=True)
class Located:
    """A version of an adapter: where its files are, and a digest of their content."""

    src: str
    digest: str
    listing: Listing | HubListing | None = None
    """The listing of S3 or the hub that the digest covers; None to list again."""

    @property
    def packed(self) -> bool:
        return self.src.endswith(_PACKED)


@dataclasses.dataclass(frozen=True)
class LocalCopy:
    """A folder with an adapter's files. It exists until it is released."""

    folder: Path
    release: Callable[[], None] = lambda: None


class AdapterFiles:
    """The adapters' files: finds them, and fetches remote or packed ones onto the disk.

    roots: allowed folders of local adapters. buckets: allowed buckets of S3. repos: allowed
    repositories of the hub, as `org/name` or `org/*`. offline: whether the hub is never asked.
    store: the folder of fetched files, at most `limit` bytes; the least recently used are removed.
    Servers may share it: each locks (flock) the files that it uses, and the others respect the
    lock, which ends with its process. controls: those of secure mode, if it is on.

    Its methods raise BadRequest and Conflict for places that are not allowed, SourceError,
    ModelError or OSError for files that cannot be read, and NoSlot if the limit is too low.
    """

    def __init__(
        self,
        roots: tuple[Path, ...],
        buckets: tuple[str, ...],
        store: Path,
        limit: int,
        controls: tuple[str, ...] = (),
        repos: tuple[str, ...] = (),
        offline: bool = False,
    ) -> None:
        self._roots = roots
        self._buckets = buckets
        self._repos = repos
        self._offline = offline
        self._store = store
        self._limit = limit
        self._controls = controls
        self._digests = Digests()
        self._lock = threading.Lock()
        self._holders: Counter[Path] = Counter()  # place → copies that are not released
        self._locks: dict[Path, BinaryIO] = {}  # place → its lock
        self._sizes: dict[Path, int] = {}  # place → its bytes, if known

    def locate(self, src: str) -> Located:
        """Find the current version of an adapter, without fetching it."""
        source = self._source(src)
        if not isinstance(source, Path):
            listing = source.list()
            return Located(src, listing.digest, listing)
        if not src.endswith(_PACKED):
            self._require_secure(src, lambda: secure.look(source))
            for name in Folder(source).sizes:
                if not self._allowed((source / name).resolve()):
                    raise BadRequest(
                        f"src={src!r:.500}: {name} is a link to elsewhere; put the file there"
                    )
        return Located(src, self._digest(source))

    @contextlib.contextmanager
    def look(self, located: Located) -> Iterator[Checkpoint]:
        """Yield an adapter's facts, without its weights.

        An archive must be fetched and unpacked for that; its files exist until the block ends.
        """
        src = located.src
        if located.packed:
            copy = self.fetch(located)
            try:
                self._require_secure(src, lambda: secure.look(copy.folder))
                yield Folder(copy.folder)
            finally:
                copy.release()
        elif located.listing:
            checkpoint = located.listing.checkpoint()
            self._require_secure(src, lambda: secure.listed(checkpoint))
            yield checkpoint
        else:
            source = self._source(src)
            assert isinstance(source, Path)
            yield Folder(source)

    def _require_secure(self, src: str, look: Callable[[], list[secure.File]]) -> None:
        """Raise BadRequest for files that secure mode forbids."""
        if self._controls and (faults := secure.file_faults(self._controls, src, look())):
            raise BadRequest("; ".join(faults))

    def fetch(self, located: Located) -> LocalCopy:
        """Fetch a version's files onto the disk, unless they are there already.

        Raises SourceError if the source now has another version.
        """
        source = self._source(located.src)
        if isinstance(source, Path):
            if self._digest(source) != located.digest:
                raise SourceError(located.src, *_CHANGED)
            if not located.packed:
                return LocalCopy(source)
        name = hashlib.sha256(f"{located.src} {located.digest}".encode()).hexdigest()[:24]
        place = self._store / name
        self._hold(place)
        release = functools.partial(self._release, place)
        try:
            os.utime(place)
            with exclusive(place / "lock", log.info):
                return LocalCopy(self._bring(located, source, place), release)
        except BaseException:
            release()
            raise

    def _hold(self, place: Path) -> None:
        """Make a place, and keep it from being removed, here and by other servers."""
        with self._lock:
            if place not in self._locks:
                self._locks[place] = _held(place)
            self._holders[place] += 1

    def _release(self, place: Path) -> None:
        with self._lock:
            self._holders[place] -= 1
            if not self._holders[place]:
                del self._holders[place]
                self._locks.pop(place).close()

    def _bring(self, located: Located, source: Path | S3 | HubAdapter, place: Path) -> Path:
        """Fetch or unpack the files into a place. Returns the folder that has them."""
        unpacked = place / "files"
        try:
            if unpacked.is_dir():
                return unpacked
            if isinstance(source, Path):
                self._unpack(located.src, source, unpacked, 0)
                return unpacked
            listing = located.listing or source.list()
            if listing.digest != located.digest:
                raise SourceError(located.src, *_CHANGED)
            self._make_room(place, listing.size)
            folder = listing.to(place).fetch(log.info)
            if not source.only:
                return folder
            archive = folder / source.only
            try:
                self._unpack(located.src, archive, unpacked, listing.size)
            finally:
                archive.unlink()
            return unpacked
        finally:
            with self._lock:  # also after a failure
                self._sizes[place] = _size(place)

    def _unpack(self, src: str, archive: Path, folder: Path, beside: int) -> None:
        """Unpack an archive. beside: bytes that the folder's place already has.

        The archive is read twice, so that an invalid archive does not take others' room.
        """
        part = folder.with_name("part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            size = archives.size(archive, self._limit - beside)
            self._make_room(folder.parent, beside + size)
            archives.unpack(archive, part, size)
            part.rename(folder)
        except archives.ArchiveError as error:
            reason = f"it is not a whole and safe tar.gz archive ({error})"
            raise Unusable(src, reason, "pack it again") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _make_room(self, place: Path, size: int) -> None:
        """Reserve bytes for a held place. The least recently used files are removed if needed.

        Raises NoSlot, and removes nothing, if that is not enough.
        """
        with self._lock, contextlib.ExitStack() as free:
            others = [it for it in self._places() if it != place]
            sizes = {it: self._sizes.get(it) or _size(it) for it in others}  # other servers' grow
            unused: list[Path] = []
            for other in sorted(others, key=_used_at):
                if size + sum(sizes.values()) - sum(sizes[it] for it in unused) <= self._limit:
                    break
                if other not in self._locks and (lock := _free(other)):
                    free.enter_context(lock)
                    unused.append(other)
            if size + sum(sizes[it] for it in others if it not in unused) > self._limit:
                raise NoSlot(
                    f"there is no room for {size} bytes more of adapters' files; "
                    "OPTION_ADAPTER_DISK sets how much they may take"
                )
            for other in unused:
                shutil.rmtree(other, ignore_errors=True)
                del sizes[other]
            self._sizes = {**sizes, place: size}

    def _places(self) -> list[Path]:
        """Return the places of fetched files, of all servers."""
        entries = [*self._store.iterdir()] if self._store.is_dir() else []
        return [path for path in entries if _PLACE.fullmatch(path.name) and path.is_dir()]

    def _source(self, src: str) -> Path | S3 | HubAdapter:
        """Return the source of an adapter. A name that can be a folder or a hub id means the folder
        if adapters are allowed there. Raises BadRequest and Conflict for places that are not
        allowed.
        """
        scheme = _SCHEME.match(src)
        if scheme and scheme[1] == "s3":
            bucket, _, key = src.removeprefix("s3://").rstrip("/").partition("/")
            if bucket not in self._buckets:
                raise Conflict(f"src={src!r:.500}: OPTION_ADAPTER_BUCKETS does not name {bucket!r}")
            folder, _, name = key.rpartition("/") if key.endswith(_PACKED) else (key, "", "")
            return S3(src, bucket, folder and f"{folder}/", self._store, name)
        found = parsers.hub_id(src)
        if src.endswith(_PACKED):
            found = None  # the hub has no archives
        if found and (scheme or not self._allowed(Path(src).resolve())):
            if not parsers.names_repo(found.repo, self._repos):
                raise Conflict(
                    f"src={src!r:.500}: OPTION_ADAPTER_REPOS does not name {found.repo!r}"
                )
            return hub_adapter.adapter(found, os.environ, self._offline)
        if scheme and scheme[1] != "file":
            raise Conflict(
                f"src={src!r:.500}: adapters come from folders, s3://bucket/prefix and "
                "hf://org/name only"
            )
        try:
            path = Path(src.removeprefix("file://")).resolve()
        except (ValueError, OSError, RuntimeError):  # a NUL, a loop of links
            raise BadRequest(f"src={src!r:.500} should be a path") from None
        if not self._allowed(path):
            allowed = ", ".join(map(str, self._roots))
            raise BadRequest(f"src={src!r:.500}: adapters may be under {allowed}")
        return path

    def _digest(self, source: Path) -> str:
        """Return 16 hex digits that differ if the content of a file or folder does."""
        if source.is_file():
            return combined({"": self._digests.of(source)})
        if not source.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", str(source))
        return combined({name: self._content(name, path) for name, path in _files(source)})

    def _content(self, name: str, path: Path) -> str:
        try:
            status = path.stat()
        except FileNotFoundError:
            return "none"
        if not stat.S_ISREG(status.st_mode):
            return f"{stat.S_IFMT(status.st_mode)} {path.is_symlink() and path.readlink()}"
        if status.st_size > LARGE and name != WEIGHTS:
            return f"{status.st_size} {status.st_mtime_ns}"
        return self._digests.of(path)

    def _allowed(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self._roots)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that may change an adapter's answers: its two files. An adapter with code may
    read any file, so then all files count, except hidden ones and Python's caches.
    """
    if not (folder / FILE).is_file():
        yield from ((name, folder / name) for name in (CONFIG, WEIGHTS))
        return
    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != "." and name != "__pycache__")
        count += len(folders) + len(names)
        if count > FILES:
            raise ModelError(f"{folder} has more than {FILES} files; an adapter's code is few")
        for name in sorted((*names, *folders)):
            if name[0] != ".":
                path = Path(place, name)
                yield path.relative_to(folder).as_posix(), path


def _size(place: Path) -> int:
    found = 0
    for file in place.rglob("*"):
        with contextlib.suppress(OSError):  # another server has just removed it
            found += file.stat().st_size if file.is_file() else 0
    return found


def _used_at(place: Path) -> float:
    """Return when a place was last fetched to or used, in seconds since 1970."""
    with contextlib.suppress(OSError):
        return place.stat().st_mtime
    return 0.0


def _held(place: Path) -> BinaryIO:
    """Make a place if it is missing. Returns its lock; no server removes it while that is open."""
    while True:
        place.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            lock = (place / _HELD).open("a+b")
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(lock.fileno()), (place / _HELD).stat()):
                    return lock
            except BaseException:
                lock.close()
                raise
            lock.close()  # the lock belongs to a place that was just removed


def _free(place: Path) -> BinaryIO | None:
    """Take the lock to remove a place. Returns it, or None if a server uses the place."""
    try:
        lock = (place / _HELD).open("a+b")
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock
