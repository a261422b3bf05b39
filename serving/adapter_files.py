"""Where adapters' files come from: folders, archives and S3. It blocks."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import shutil
import tarfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from lmi_config import secure
from lmi_config.adapter import CONFIG, WEIGHTS
from lmi_config.model import Checkpoint, Folder
from serving.digests import sampled
from serving.errors import BadRequest, Conflict, NoSlot
from serving.sources import CHANGED, S3, SourceError, alone

log = logging.getLogger(__name__)

MEMBERS = 1000  # files and folders that an archive may have
_PACKED = (".tar.gz", ".tgz")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class AdapterFiles:
    """Finds adapters' files, and brings those that are elsewhere or packed onto disk.

    roots: folders under which adapters on this machine may be. buckets: those of S3 whose adapters
    may be had. store: where files from elsewhere are kept, at most `limit` bytes of them; those
    used longest ago make room. controls: those of secure mode, where it is on.

    Its methods raise BadRequest and Conflict for places that are not allowed, SourceError,
    ModelError or OSError for what cannot be read, and NoSlot where the limit is too low.
    """

    def __init__(
        self,
        roots: tuple[Path, ...],
        buckets: tuple[str, ...],
        store: Path,
        limit: int,
        controls: tuple[str, ...] = (),
    ) -> None:
        self._roots = roots
        self._buckets = buckets
        self._store = store
        self._limit = limit
        self._controls = controls
        self._lock = threading.Lock()
        self._held: Counter[Path] = Counter()
        places = [it for it in store.iterdir() if it.is_dir()] if store.is_dir() else []
        places.sort(key=lambda place: place.stat().st_mtime)
        self._sizes = {place: _size(place) for place in places}  # the one used last at the end

    @contextlib.contextmanager
    def look(self, src: str) -> Iterator[tuple[Checkpoint, str]]:
        """The files as far as they are known without their weights, and a digest of their content.

        An archive has to be fetched and unpacked for that.
        """
        source = self._locate(src)
        if src.endswith(_PACKED):
            digest = _digest(source)
            with self.fetched(src, digest) as folder:
                self._require_secure(src, lambda: secure.look(folder))
                yield Folder(folder), digest
        elif isinstance(source, S3):
            digest = _digest(source)
            found = source.checkpoint()
            self._require_secure(src, lambda: secure.listed(found))
            yield found, digest
        else:
            self._require_secure(src, lambda: secure.look(source))
            checkpoint = Folder(source)
            digest = _digest(source)
            for name in checkpoint.sizes:
                if not self._allowed((source / name).resolve()):
                    raise BadRequest(f"src={src!r:.500}: {name} is a link to elsewhere")
            yield checkpoint, digest

    def _require_secure(self, src: str, look: Callable[[], list[secure.File]]) -> None:
        """Raise BadRequest for files that secure mode forbids."""
        if self._controls and (faults := secure.file_faults(self._controls, src, look())):
            raise BadRequest("; ".join(faults))

    @contextlib.contextmanager
    def fetched(self, src: str, digest: str) -> Iterator[Path]:
        """A folder with the content to which look() gave this digest, which stays for so long."""
        source = self._locate(src)
        if isinstance(source, Path) and _digest(source) != digest:
            raise SourceError(src, *CHANGED)
        if isinstance(source, Path) and not src.endswith(_PACKED):
            yield source
            return
        place = self._store / hashlib.sha256(f"{src} {digest}".encode()).hexdigest()[:24]
        with self._lock:
            self._held[place] += 1
        try:
            place.mkdir(parents=True, exist_ok=True)
            os.utime(place)
            with alone(place / "lock", log.info):
                folder = self._bring(src, source, digest, place)
            yield folder
        finally:
            with self._lock:
                self._held[place] -= 1

    def _bring(self, src: str, source: Path | S3, digest: str, place: Path) -> Path:
        unpacked = place / "files"
        if unpacked.is_dir():
            self._grow(place, self._sizes[place])
            return unpacked
        if isinstance(source, Path):
            self._unpack(src, source, unpacked, 0)
            return unpacked
        source = dataclasses.replace(source, downloads=place)
        size = source.contents()[1]
        self._grow(place, size)
        folder = source.fetch(log.info, digest)
        if not source.only:
            return folder
        archive = folder / source.only
        try:
            self._unpack(src, archive, unpacked, size)
        finally:
            archive.unlink()
        return unpacked

    def _unpack(self, src: str, archive: Path, folder: Path, size: int) -> None:
        """size: bytes that the folder's place has already."""
        part = folder.with_name("part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            with tarfile.open(archive, "r:gz") as members:
                for count, member in enumerate(members):
                    if count == MEMBERS or not (member.isfile() or member.isdir()):
                        raise tarfile.TarError(f"{member.name!r:.200} is a link, or one too many")
                    size += member.size
                    self._grow(folder.parent, size)
                    members.extract(member, part, filter="data")
        except (tarfile.TarError, EOFError, zlib.error) as error:
            reason = f"it is not a whole and safe tar.gz archive ({error})"
            raise SourceError(src, reason, "pack it again") from error
        part.rename(folder)

    def _grow(self, place: Path, size: int) -> None:
        """Count so many bytes for a place, and make room for them."""
        with self._lock:
            self._sizes.pop(place, None)
            self._sizes[place] = size
            for other in [*self._sizes]:
                if sum(self._sizes.values()) > self._limit and not self._held[other]:
                    shutil.rmtree(other, ignore_errors=True)
                    del self._sizes[other]
            if sum(self._sizes.values()) > self._limit:
                raise NoSlot(
                    f"there is no room for {size} bytes more of adapters' files; "
                    "OPTION_ADAPTER_DISK sets how much they may take"
                )

    def _locate(self, src: str) -> Path | S3:
        scheme = _SCHEME.match(src)
        if scheme and scheme[1] == "s3":
            bucket, _, key = src.removeprefix("s3://").rstrip("/").partition("/")
            if bucket not in self._buckets:
                raise Conflict(f"src={src!r:.500}: OPTION_ADAPTER_BUCKETS does not name {bucket!r}")
            folder, _, name = key.rpartition("/") if key.endswith(_PACKED) else (key, "", "")
            return S3(src, bucket, folder and f"{folder}/", self._store, name)
        if scheme and scheme[1] != "file":
            raise Conflict(f"src={src!r:.500}: adapters come from folders and s3:// only")
        try:
            path = Path(src.removeprefix("file://")).resolve()
        except (ValueError, OSError, RuntimeError):  # a zero byte, a ring of links
            raise BadRequest(f"src={src!r:.500} is no path") from None
        if not self._allowed(path):
            allowed = ", ".join(map(str, self._roots))
            raise BadRequest(f"src={src!r:.500}: adapters may be under {allowed}")
        return path

    def _allowed(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self._roots)


def _digest(source: Path | S3) -> str:
    """16 hex digits that another content has not."""
    if isinstance(source, S3):
        return source.contents()[0]
    if source.is_dir():
        files = (source / CONFIG, source / WEIGHTS, *sorted(source.glob("*.py")))
        return sampled(file for file in files if file.is_file())
    return sampled([source])


def _size(place: Path) -> int:
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
