# SPDX-License-Identifier: Apache-2.0
"""Models of the Hugging Face hub: listed, inspected by their first bytes, fetched to its cache."""

import contextlib
import dataclasses
import functools
import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmi_config.facts.model import CONFIGS, Checkpoint, Folder, ModelError, weight_files
from serving.sources.arriving import Early
from serving.sources.model_files import needed, needed_of_remote
from serving.sources.source import (
    ANSWER_S,
    Progress,
    RemoteCheckpoint,
    SourceError,
    free_space,
    require_space,
    with_timeout,
)

if TYPE_CHECKING:  # huggingface_hub takes long to import
    from huggingface_hub import ModelInfo


class _Listing(NamedTuple):
    """Files of the hub, or of its cache if the hub cannot be reached.

    commit: the revision's commit. sizes: the needed files, in bytes. cached: the cache's complete
    copy, if the hub could not be reached. reason: why it could not.
    """

    commit: str
    sizes: Mapping[str, int]
    cached: Path | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Hub:
    """A model of the Hugging Face hub, or of its cache if the hub cannot be reached.

    huggingface_hub decides about fields that are None.
    """

    repo_id: str
    revision: str | None
    endpoint: str | None
    token: str | None = dataclasses.field(repr=False)
    cache: str | None
    """A folder."""
    offline: bool
    """Only the cache is used."""
    _listing: "_Listing | None" = None

    def listed(self) -> "Hub":
        """See Source."""
        return dataclasses.replace(self, _listing=self._found())

    def _found(self) -> "_Listing":
        if self._listing:
            return self._listing
        try:
            return _Listing(*self._list())
        except SourceError as error:
            if copy := self._cached():
                return _Listing("", {}, copy, error.reason)
            raise

    def checkpoint(self) -> Checkpoint:
        commit, sizes, cached, _ = self._found()
        if cached:
            return Folder(cached)
        copy = self._snapshot(commit)
        if copy and not _absent(copy, sizes):
            return Folder(copy)
        return RemoteCheckpoint(self.repo_id, sizes, functools.partial(self._read, commit))

    def fetch(self, note: Callable[[str], None], early: Early | None = None) -> Path:
        commit, sizes, cached, reason = self._found()
        if cached:
            note(f"using the cached copy of {self.repo_id}: {reason}")
            return cached
        copy = self._snapshot(commit)
        missing = _absent(copy, sizes) if copy else sizes
        if not copy or missing:
            copy = self._download(commit, sizes, sum(missing.values()), note, early)
            if left := _absent(copy, sizes):
                raise SourceError(self.repo_id, f"{min(left)} was not fetched", "start again")
        self._name(copy)
        return copy

    def room(self) -> int:
        return free_space(self._home())

    def _home(self) -> Path:
        from huggingface_hub import constants

        return Path(self.cache or constants.HF_HUB_CACHE)

    def _list(self) -> tuple[str, dict[str, int]]:
        """Return the revision's commit, and the needed files: name → bytes."""
        from huggingface_hub import HfApi

        if self.offline:
            raise SourceError(self.repo_id, "HF_HUB_OFFLINE is set", _CACHE)
        api = HfApi(endpoint=self.endpoint, token=self.token)

        def ask() -> "ModelInfo":
            return api.model_info(
                self.repo_id, revision=self.revision, timeout=ANSWER_S, files_metadata=True
            )

        with self._faults():
            info = with_timeout(ask)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        return info.sha or "", needed_of_remote(self.repo_id, sizes)

    def _read(self, commit: str, name: str, length: int) -> bytes:
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.repo_id, name, revision=commit, endpoint=self.endpoint)
        headers = build_hf_headers(token=self.token)
        headers |= {"Range": f"bytes=0-{length - 1}", "Accept-Encoding": "identity"}

        def ask() -> bytes:
            content = b""
            with get_session().stream("GET", url, headers=headers, timeout=ANSWER_S) as answer:
                hf_raise_for_status(answer)
                for chunk in answer.iter_bytes():
                    content += chunk
                    if len(content) >= length:  # a server without ranges sends the whole file
                        break
            return content[:length]

        with self._faults():
            return with_timeout(ask)

    def _name(self, copy: Path) -> None:
        """Record our revision's commit in the cache, so that the copy is also found offline."""
        revision = self.revision or "main"
        if revision == copy.name:
            return
        name = copy.parent.parent / "refs" / revision
        with contextlib.suppress(OSError):  # a cache that is mounted read-only
            if name.is_file():
                with name.open("rb") as file:
                    if file.read(len(copy.name) + 1) == copy.name.encode():
                        return
            name.parent.mkdir(parents=True, exist_ok=True)
            new = name.with_name(f"{name.name}.{os.getpid()}.new")
            new.write_text(copy.name)
            new.replace(name)

    def _download(
        self,
        commit: str,
        sizes: Mapping[str, int],
        missing: int,
        note: Callable[[str], None],
        early: Early | None,
    ) -> Path:
        from huggingface_hub import snapshot_download

        cache = self._home()
        with self._faults():
            cache.mkdir(parents=True, exist_ok=True)
            require_space(self.repo_id, cache, missing, "HF_HOME")
            progress = Progress(self.repo_id, missing, note)
            download = functools.partial(
                snapshot_download,
                self.repo_id,
                revision=commit or self.revision,
                endpoint=self.endpoint,
                token=self.token,
                cache_dir=cache,
                tqdm_class=_bar(progress),
            )
            if early:
                first = [glob.escape(name) for name in sizes if name not in early.last]
                early.begin(Path(download(allow_patterns=first)))
            folder = download(allow_patterns=[glob.escape(name) for name in sizes])
        progress.end()
        return Path(folder)

    def _snapshot(self, revision: str | None) -> Path | None:
        """Return the cache's folder of a revision, which may lack files, or None."""
        from huggingface_hub import try_to_load_from_cache

        for name in CONFIGS:
            file = try_to_load_from_cache(self.repo_id, name, self.cache, revision)
            if isinstance(file, str):
                return Path(file).parent
        return None

    def _cached(self) -> Path | None:
        """Return the cache's folder of our revision if it has all needed files, or None."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        folder = self._snapshot(self.revision)
        if folder is None:
            return None
        try:
            tree = get_cached_repo_tree(self.repo_id, revision=self.revision, cache_dir=self.cache)
        except CachedRepoTreeNotFoundError:  # huggingface_hub before version 2 stores no tree
            with contextlib.suppress(ModelError):
                weight_files(Folder(folder))
                return folder
            return None
        absent = _absent(folder, needed({file.path: file.size for file in tree}))
        return None if absent else folder

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Raise huggingface_hub's errors as SourceErrors. Their own messages are very long."""
        import httpx2

        try:
            yield
        except (httpx2.HTTPError, OSError, RuntimeError, json.JSONDecodeError) as error:
            raise SourceError(self.repo_id, *self._fault(error)) from error

    def _fault(self, error: Exception) -> tuple[str, str]:
        """Return the fault and the fix."""
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            return "it is gated", "accept its licence on the hub and set HF_TOKEN"
        if isinstance(error, errors.RevisionNotFoundError):
            if self._listing or not self.revision:
                return "the commit that was listed is gone from the hub", "start again"
            return f"it has no revision {self.revision!r}", "give a branch, a tag or a commit"
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
            if status == 401 and self.token:
                return "the hub does not accept HF_TOKEN", "set it to one that is valid"
            if status in (401, 403, 404):
                reason = "there is no such model on the hub, or it is private"
                return reason, "check the id, or set HF_TOKEN to one that may read it"
            return f"the hub answers {status}", _CACHE
        if isinstance(error, RuntimeError):  # hf_xet's
            return "the download broke off", "start again, or set HF_HUB_DISABLE_XET=1"
        if isinstance(error, OSError) and error.errno:
            reason = f"the cache cannot be written ({error.strerror})"
            return reason, "set HF_HOME to a folder that can be written and has room"
        return f"the hub cannot be reached ({type(error.__cause__ or error).__name__})", _CACHE


_CACHE = (
    "the cache has no whole copy either: mount the model as a folder, or set HF_HOME to a cache "
    "that has it"
)


def is_repo_id(model_id: str) -> bool:
    """Whether an id has the form of a hub id."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(model_id)
    except HFValidationError:
        return False
    return True


def repo(repo_id: str, environ: Mapping[str, str], revision: str | None) -> Hub:
    """Return a model of the hub, configured by Hugging Face's environment variables."""
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    if not cache and environ.get("HF_HOME"):
        cache = f"{environ['HF_HOME']}/hub"
    return Hub(
        repo_id=repo_id,
        revision=revision,
        endpoint=environ.get("HF_ENDPOINT", "").rstrip("/") or None,
        token=environ.get("HF_TOKEN", "").strip() or None,
        cache=str(Path(cache).expanduser()) if cache else None,
        offline=offline(environ),
    )


OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def offline(environ: Mapping[str, str]) -> bool:
    """Whether the hub must not be asked."""
    told = next(filter(None, map(environ.get, OFFLINE)), "") or ""
    return told.upper() in ("1", "ON", "TRUE", "YES")


def _absent(folder: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the files that a folder lacks."""
    return {name: size for name, size in sizes.items() if not (folder / name).is_file()}


def _bar(progress: Progress) -> type:
    """Return a class that replaces huggingface_hub's progress bar."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        """A progress bar that shows nothing, and counts the bytes for `progress`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})
            self.bytes = kwargs.get("unit") == "B"  # another bar counts files

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.bytes:  # one bar counts received bytes, another one written bytes
                progress.reach(int(self.n))

    return Bar
