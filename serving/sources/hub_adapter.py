# SPDX-License-Identifier: Apache-2.0
"""Adapters on the Hugging Face hub: listed, inspected by their first bytes, and fetched.

This uses the hub's HTTP API (https://huggingface.co/docs/hub/api), and not huggingface_hub. That
library decides once per process whether it is offline, and in the server's process it must be, so
that vLLM makes no requests. The files go to the folder of all adapters, under its limit, and not to
the hub's own cache.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from handlers.custom import FILE
from lmi_config.facts.adapter import CONFIG, WEIGHTS
from lmi_config.facts.model import Checkpoint
from lmi_config.options.parsers import HubId
from serving.sources.model_files import needed_of_remote
from serving.sources.source import (
    ANSWER_S,
    Progress,
    RemoteCheckpoint,
    SourceError,
    require_space,
    with_timeout,
)

if TYPE_CHECKING:
    import httpx

ENDPOINT = "https://huggingface.co"
LONGEST_LIST = 8 * 1024**2  # bytes of the hub's list of a repository's files
FILES = 10_000  # of an adapter with code
TRANSFER_S = 60.0  # until the next bytes of a download
_PART = 1024**2  # bytes that are read at once
_CHANGED = ("a file is not as the hub listed it", "register it again")


@dataclasses.dataclass(frozen=True)
class HubAdapter:
    """A source on the hub: an adapter's repository, in one of its revisions."""

    id: HubId
    endpoint: str
    token: str | None = dataclasses.field(repr=False)
    offline: bool = False
    """The operator has set HF_HUB_OFFLINE: the hub is never asked."""
    only: str = ""

    @property
    def name(self) -> str:
        return f"{self.id.repo}@{self.id.revision or 'main'}"

    def list(self) -> "HubListing":
        """Return the hub's list of files. Blocks; raises SourceError."""
        if self.offline:
            fix = "unset it, or mount the adapter as a folder"
            raise SourceError(self.name, "HF_HUB_OFFLINE is set", fix)
        revision = quote(self.id.revision or "main", safe="")
        path = f"/api/models/{self.id.repo}/revision/{revision}?blobs=true"
        with self.faults():
            answer = with_timeout(lambda: self.read(path, LONGEST_LIST))
            try:
                commit, files = _files(json.loads(answer))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                reason = "the hub's answer is no list of files"
                raise SourceError(self.name, reason, "check HF_ENDPOINT") from None
        sizes = needed_of_remote(self.name, {name: it.size for name, it in files.items()})
        if FILE not in sizes:  # without code, no other files are read
            sizes = {name: size for name, size in sizes.items() if name in (CONFIG, WEIGHTS)}
        if not sizes:
            raise SourceError(self.name, f"it has no {CONFIG}", "give the id of an adapter")
        if len(sizes) > FILES:
            raise SourceError(self.name, f"it has more than {FILES} files", "leave some out")
        return HubListing(self, commit, {name: files[name] for name in sizes})

    def read(self, path: str, limit: int, first: int | None = None) -> bytes:
        """Return an answer of at most `limit` bytes. first: the wanted first bytes of a file."""
        with self.stream(path, ANSWER_S, first) as answer:
            content = b""
            for chunk in answer.iter_bytes(_PART):
                content += chunk
                if first is not None and len(content) >= first:
                    return content[:first]  # a server without ranges sends the whole file
                if len(content) > limit:
                    raise SourceError(self.name, f"an answer is longer than {limit} bytes", _LESS)
            return content

    @contextlib.contextmanager
    def stream(
        self, path: str, answer_s: float, first: int | None = None
    ) -> Iterator["httpx.Response"]:
        import httpx

        headers = {"Accept-Encoding": "identity"}
        if self.token:  # httpx does not send it to another host after a redirect
            headers["Authorization"] = f"Bearer {self.token}"
        if first is not None:
            headers["Range"] = f"bytes=0-{first - 1}"
        with (
            httpx.Client(follow_redirects=True, timeout=answer_s) as client,
            client.stream("GET", f"{self.endpoint}{path}", headers=headers) as answer,
        ):
            answer.raise_for_status()
            yield answer

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """Raise the hub's errors as SourceErrors. Their own messages have signed URLs."""
        import httpx

        try:
            yield
        except httpx.HTTPStatusError as error:
            code = error.response.headers.get("X-Error-Code", "")
            raise SourceError(self.name, *_fault(error.response.status_code, code)) from None
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            reason = f"the hub cannot be reached ({type(error).__name__})"
            fix = "check network and HF_ENDPOINT, or mount the adapter as a folder"
            raise SourceError(self.name, reason, fix) from None


@dataclasses.dataclass(frozen=True)
class _File:
    """version: changes with the content; for large files it is the content's SHA-256."""

    size: int
    version: str
    sha256: str | None


def _files(answer: Any) -> tuple[str, dict[str, _File]]:
    """Return a revision's commit, and the hub's facts about its files, by name."""
    commit = str(answer["sha"])
    found = {}
    for file in answer["siblings"]:
        sha256 = (file.get("lfs") or {}).get("sha256")
        size = file.get("size")
        if not isinstance(size, int) or size < 0:
            raise ValueError(size)
        version = str(sha256 or file.get("blobId") or commit)
        found[str(file["rfilename"])] = _File(size, version, sha256 and str(sha256))
    return commit, found


def _fault(status: int, code: str) -> tuple[str, str]:
    """Return the meaning of the hub's refusal, and the fix."""
    if code == "GatedRepo":
        return "it is gated", "accept its licence on the hub and set HF_TOKEN"
    if code == "RevisionNotFound":
        return "it has no such revision", "give a branch, a tag or a commit after @"
    if status in (401, 403, 404):
        reason = "there is no such adapter on the hub, or it is private"
        return reason, "check the id, or set HF_TOKEN to one that may read it"
    return f"the hub answers {status}", "register it again later"


_LESS = "give the id of an adapter"


@dataclasses.dataclass(frozen=True)
class HubListing:
    """An adapter's files in one commit, as the hub listed them.

    Only these versions are read and fetched. A file with another size, or with another SHA-256 if
    the hub gave one, raises a SourceError. folder: the parent of the folder that fetch() makes.
    """

    source: HubAdapter
    commit: str
    files: Mapping[str, _File]
    folder: Path | None = None

    @property
    def digest(self) -> str:
        """Return 16 hex digits that differ if the content of a file does."""
        versions = sorted((name, file.size, file.version) for name, file in self.files.items())
        return hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:16]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def to(self, folder: Path) -> "HubListing":
        """Return the same listing, with a place for fetch()."""
        return dataclasses.replace(self, folder=folder)

    def checkpoint(self) -> Checkpoint:
        sizes = {name: file.size for name, file in self.files.items()}
        return RemoteCheckpoint(self.source.name, sizes, self._head)

    def fetch(self, note: Callable[[str], None]) -> Path:
        """Fetch the files. Returns their folder. Blocks; raises SourceError."""
        assert self.folder
        folder = self.folder / "hub"
        progress = Progress(self.source.name, self.size, note)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            require_space(self.source.name, folder, self.size, "SERVING_DOWNLOAD_DIR")
            for name, file in self.files.items():
                if not (folder / name).is_file():  # an existing file is always complete
                    self._download(name, file, folder, progress)
        except OSError as error:
            reason = f"{folder} cannot be written ({error.strerror})"
            fix = "set SERVING_DOWNLOAD_DIR to a folder that can be written and has room"
            raise SourceError(self.source.name, reason, fix) from error
        progress.end()
        return folder

    def _path(self, name: str) -> str:
        return f"/{self.source.id.repo}/resolve/{quote(self.commit, safe='')}/{quote(name)}"

    def _head(self, name: str, length: int) -> bytes:
        with self.source.faults():
            return with_timeout(lambda: self.source.read(self._path(name), length, length))

    def _download(self, name: str, file: _File, folder: Path, progress: Progress) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        digest, came = hashlib.sha256(), 0
        with (
            self.source.faults(),
            part.open("wb") as out,
            self.source.stream(self._path(name), TRANSFER_S) as answer,
        ):
            for chunk in answer.iter_bytes(_PART):
                came += len(chunk)
                if came > file.size:
                    break
                digest.update(chunk)
                out.write(chunk)
                progress.add(len(chunk))
        if not _as_listed(file, came, digest.hexdigest()):
            part.unlink()
            raise SourceError(self.source.name, f"{name}: {_CHANGED[0]}", _CHANGED[1])
        part.rename(target)


def _as_listed(file: _File, came: int, sha256: str) -> bool:
    """Whether this size and hash match the hub's list."""
    return came == file.size and file.sha256 in (None, sha256)


def adapter(found: HubId, environ: Mapping[str, str], offline: bool) -> HubAdapter:
    """Return an adapter's source, configured by Hugging Face's environment variables. offline: the
    operator's setting.
    """
    return HubAdapter(
        id=found,
        endpoint=environ.get("HF_ENDPOINT", "").strip().rstrip("/") or ENDPOINT,
        token=environ.get("HF_TOKEN", "").strip() or None,
        offline=offline,
    )
