"""Where a model comes from: a local folder, S3 or the Hugging Face hub; how it gets onto disk."""

import contextlib
import dataclasses
import fcntl
import functools
import glob
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lmi_config.model import CONFIGS, Checkpoint, Folder, ModelError, weight_files

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from types_boto3_s3.client import S3Client

T = TypeVar("T")

DOWNLOADS = "/tmp/slipway/models"
"""Where models from S3 are kept when nothing else is said."""

ANSWER_S = 4.0  # for one address of a host to connect, and for the next bytes to come
UNREACHABLE_S = 8.0  # after this a host counts as unreachable, however many addresses it has
TRANSFER_S = 60.0  # for the next bytes of a file that is being fetched
PERIOD_S = 10.0  # between two notes of progress; each is a line in the log
CONNECTIONS = 16
PART = 16 * 1024**2  # bytes that one request fetches from S3
HEAD = 128 * 1024  # bytes that hold the header of nearly every safetensors file

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # the first that a folder has is taken
_FOREIGN = (".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite")
_ASIDE = re.compile(r"original|onnx|openvino|coreml|runs|checkpoint-\d+|global_step\d+")
_TRAINING = re.compile(r"(optimizer|scheduler|scaler|rng_state.*|training_args)\.(bin|pt|pth)")
_WANTED = "give a folder with a model, s3://bucket/prefix, or a hub id like Qwen/Qwen3-0.6B"


class SourceError(ValueError):
    """A model that cannot be had. `reason` says why; the message also names the model and a fix."""

    def __init__(self, model_id: str, reason: str, fix: str) -> None:
        self.reason = reason
        super().__init__(f"{model_id!r}: {reason}; {fix}")


class Source(Protocol):
    """A model that was located. Both methods block, and raise SourceError."""

    def checkpoint(self) -> Checkpoint:
        """What can be known of the model without its weights; takes seconds at most."""

    def fetch(self, note: Callable[[str], None]) -> Path:
        """A local folder with all that serving needs; tells `note` how far the download is."""

    def room(self) -> int:
        """Bytes that are free where fetch() writes."""


def locate(
    model_id: str,
    environ: Mapping[str, str],
    *,
    revision: str | None = None,
    downloads: str | None = None,
) -> Source:
    """Find out what `model_id` is. Asks no network yet.

    environ: for Hugging Face's HF_*; boto3 reads AWS_* itself. revision: branch, tag or commit of a
    hub model. downloads: where models from S3 are kept.

    Raises SourceError when it is neither a folder, nor S3, nor written like a hub id.
    """
    if model_id.startswith("s3://"):
        bucket, _, prefix = model_id.removeprefix("s3://").rstrip("/").partition("/")
        if not bucket:
            raise SourceError(model_id, "it names no bucket", _WANTED)
        return S3(model_id, bucket, prefix and f"{prefix}/", Path(downloads or DOWNLOADS))
    try:
        folder = Path(model_id).expanduser()
        if folder.is_dir():
            return Local(folder)
    except RuntimeError:  # "~somebody", and there is no such user
        pass
    except OSError as error:
        raise SourceError(model_id, f"it cannot be read ({error.strerror})", _WANTED) from error
    if model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1:
        raise SourceError(model_id, "there is no such folder", _WANTED)
    return _hub(model_id, environ, revision)


def needed(sizes: Mapping[str, int]) -> dict[str, int]:
    """Leave out the files that serving does not read, by name.

    These are hidden files, what training left, formats vLLM has no loader for, and weights that a
    folder has in a better format too. sizes: file name → bytes.
    """
    left = {
        name: size
        for name, size in sizes.items()
        if not any(part.startswith(".") for part in name.split("/"))
        and not _ASIDE.fullmatch(name.split("/")[0])
        and not _TRAINING.fullmatch(PurePosixPath(name).name)
        and not name.endswith(_FOREIGN)
    }
    best: dict[PurePosixPath, int] = {}
    for path in map(PurePosixPath, left):
        if path.suffix in _WEIGHTS:
            rank = _WEIGHTS.index(path.suffix)
            best[path.parent] = min(rank, best.get(path.parent, rank))
    return {
        name: size
        for name, size in left.items()
        if (path := PurePosixPath(name)).suffix not in _WEIGHTS
        or path.suffix == _WEIGHTS[best[path.parent]]
    }


@dataclasses.dataclass(frozen=True)
class Local:
    """A folder that is here. It may be mounted read-only: nothing is written to it."""

    folder: Path

    def checkpoint(self) -> Checkpoint:
        return Folder(self.folder)

    def fetch(self, note: Callable[[str], None]) -> Path:
        return self.folder

    def room(self) -> int:
        return _room(self.folder)


@dataclasses.dataclass(frozen=True)
class _Object:
    """An object as S3 lists it. etag: with its quotes; modified: seconds since the epoch."""

    key: str
    size: int
    etag: str
    modified: int

    def whole(self, file: Path) -> bool:
        """Whether the file is this object: it has its size, and its time as we set it at the end.

        A file that was cut short or written by others has another time, down to the nanosecond.
        """
        try:
            found = file.stat()
        except FileNotFoundError:
            return False
        return (found.st_size, found.st_mtime_ns) == (self.size, self.modified * 10**9)


@dataclasses.dataclass(frozen=True)
class S3:
    """Objects below `s3://bucket/prefix`. prefix: empty, or with a slash at its end.

    only: the name of the one object below it that is wanted, or empty for all of them.
    """

    uri: str
    bucket: str
    prefix: str
    downloads: Path
    only: str = ""

    @property
    def folder(self) -> Path:
        """Where the files are fetched to."""
        where = f"{self.bucket}/{self.prefix}"
        digest = hashlib.sha256(where.encode()).hexdigest()[:12]
        return self.downloads / f"{PurePosixPath(where).name}-{digest}"

    def room(self) -> int:
        return _room(self.folder)

    def checkpoint(self) -> Checkpoint:
        client = self._client(ANSWER_S, attempts=2)
        objects = self._list(client)
        if all(item.whole(self.folder / name) for name, item in objects.items()):
            return Folder(self.folder)

        def read(name: str, length: int) -> bytes:
            def ask() -> bytes:
                answer = client.get_object(
                    Bucket=self.bucket, Key=objects[name].key, Range=f"bytes=0-{length - 1}"
                )
                return answer["Body"].read()

            with _s3_faults(self.uri):
                return _within(UNREACHABLE_S, ask)

        return _Remote(self.uri, {name: item.size for name, item in objects.items()}, read)

    def contents(self) -> tuple[str, int]:
        """A digest that another content has not, and the bytes of all that fetch() would fetch."""
        objects = self._list(self._client(ANSWER_S, attempts=2))
        return _version(objects), sum(item.size for item in objects.values())

    def fetch(self, note: Callable[[str], None], version: str | None = None) -> Path:
        """As Source has it. version: what contents() said; another content is a SourceError."""
        objects = self._list(self._client(ANSWER_S, attempts=2))
        if version and version != _version(objects):
            raise SourceError(self.uri, *CHANGED)
        folder = self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with alone(self.downloads / f"{folder.name}.lock", note):
                missing = _tidy(folder, objects)
                if missing:
                    size = sum(item.size for item in missing.values())
                    _check_room(self.uri, folder, size, "SERVING_DOWNLOAD_DIR")
                    self._download(folder, missing, note)
        except OSError as error:
            reason = f"{folder} cannot be written ({error.strerror})"
            fix = "set SERVING_DOWNLOAD_DIR to a folder that can be written and has room"
            raise SourceError(self.uri, reason, fix) from error
        return folder

    def _client(self, answer_s: float, attempts: int) -> "S3Client":
        from boto3.session import Session
        from botocore.config import Config

        config = Config(
            connect_timeout=ANSWER_S,
            read_timeout=answer_s,
            retries={"total_max_attempts": attempts, "mode": "standard"},
            max_pool_connections=CONNECTIONS,
        )
        with _s3_faults(self.uri):
            try:
                return Session().client("s3", config=config)
            except ValueError as error:
                fix = "set it to one like http://minio:9000"
                raise SourceError(self.uri, "AWS_ENDPOINT_URL is no URL", fix) from error

    def _list(self, client: "S3Client") -> dict[str, _Object]:
        """The objects that are needed: name below the prefix → object."""

        def ask() -> dict[str, _Object]:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + self.only
            )
            return {
                item["Key"].removeprefix(self.prefix): _Object(
                    item["Key"],
                    item["Size"],
                    item["ETag"],
                    int(item["LastModified"].timestamp()),
                )
                for page in pages
                for item in page.get("Contents", ())
                if not item["Key"].endswith("/")  # consoles make such objects to show a folder
                and (not self.only or item["Key"] == self.prefix + self.only)
            }

        with _s3_faults(self.uri):
            objects = _within(UNREACHABLE_S, ask)
        if not objects:
            if self.only:
                raise SourceError(self.uri, "there is no such object", "check its name")
            fix = "check the prefix, below which the configuration and the weights should be"
            raise SourceError(self.uri, "there are no objects below it", fix)
        files = _model_files(self.uri, {name: item.size for name, item in objects.items()})
        return {name: objects[name] for name in files}

    def _download(
        self, folder: Path, objects: Mapping[str, _Object], note: Callable[[str], None]
    ) -> None:
        from s3transfer.futures import TransferFuture
        from s3transfer.manager import TransferConfig, TransferManager
        from s3transfer.subscribers import BaseSubscriber

        progress = _Progress(self.uri, sum(item.size for item in objects.values()), note)

        class Watch(BaseSubscriber):
            def __init__(self, item: _Object, file: Path) -> None:
                self.item, self.file = item, file

            def on_queued(self, future: TransferFuture, **_: Any) -> None:
                future.meta.provide_transfer_size(self.item.size)
                future.meta.provide_object_etag(self.item.etag)

            def on_progress(self, future: TransferFuture, bytes_transferred: int, **_: Any) -> None:
                progress.add(bytes_transferred)  # below zero where a part begins again

            def on_done(self, future: TransferFuture, **_: Any) -> None:
                with contextlib.suppress(FileNotFoundError):  # there is none when it failed
                    os.utime(self.file, (self.item.modified, self.item.modified))

        # Each file is written under a random name and gets its own when all its parts are there. A
        # part comes only while the object is the one that was listed, which files shorter than the
        # threshold are not asked for.
        config = TransferConfig(
            multipart_threshold=1, multipart_chunksize=PART, max_request_concurrency=CONNECTIONS
        )
        with (
            _s3_faults(self.uri),
            TransferManager(self._client(TRANSFER_S, attempts=8), config) as manager,
        ):
            transfers = []
            for name, item in objects.items():
                file = folder / name
                file.parent.mkdir(parents=True, exist_ok=True)
                watch = Watch(item, file)
                transfers.append(
                    manager.download(self.bucket, item.key, str(file), subscribers=[watch])
                )
            for transfer in transfers:
                transfer.result()
        for name, item in objects.items():
            if not item.whole(folder / name):
                raise SourceError(self.uri, f"{name} came incomplete", "start again")
        progress.end()


CHANGED = ("it has changed since it was registered", "delete it and register it again")
"""Of an adapter, whose content is fixed when it is registered."""
_CREDENTIALS = (
    "give the container a role, or AWS_* variables; on SageMaker with network isolation let the "
    "platform fetch the model (ModelDataSource) instead"
)
_REGION = ("the bucket is in another region", "set AWS_REGION to the bucket's region")
_DENIED = ("access is denied", "allow s3:ListBucket on the bucket and s3:GetObject on its objects")
_S3_FAULTS = {
    "NoSuchBucket": ("there is no such bucket", "check its name"),
    "AccessDenied": _DENIED,
    "403": _DENIED,
    "ExpiredToken": ("the AWS credentials have expired", _CREDENTIALS),
    "InvalidAccessKeyId": ("AWS does not know the credentials", _CREDENTIALS),
    "SignatureDoesNotMatch": ("AWS does not accept the credentials", _CREDENTIALS),
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "NoSuchKey": ("an object was removed while it was fetched", "start again"),
}
"""Error code of S3 → what it means and what to do."""


@contextlib.contextmanager
def _s3_faults(uri: str) -> Iterator[None]:
    """Raise boto3's errors as SourceErrors. Their own messages hold names of users and requests."""
    from botocore import exceptions
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError

    try:
        yield
    except exceptions.ClientError as error:
        code = error.response["Error"]["Code"]
        answered = (f"S3 answers {code}", "check the bucket, or start again later")
        raise SourceError(uri, *_S3_FAULTS.get(code, answered)) from error
    except (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
    ) as error:
        raise SourceError(uri, "there are no AWS credentials", _CREDENTIALS) from error
    except S3DownloadFailedError as error:
        reason = "an object changed while it was fetched"
        raise SourceError(uri, reason, "start again") from error
    except exceptions.ParamValidationError as error:
        raise SourceError(uri, "no bucket can have this name", "check it") from error
    except (TimeoutError, RetriesExceededError, exceptions.BotoCoreError) as error:
        reason = f"S3 cannot be reached ({type(error).__name__})"
        fix = (
            "check network and AWS_ENDPOINT_URL, or let the platform fetch the model "
            "(ModelDataSource on SageMaker)"
        )
        raise SourceError(uri, reason, fix) from error


def _version(objects: Mapping[str, _Object]) -> str:
    told = sorted((name, item.size, item.etag) for name, item in objects.items())
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _tidy(folder: Path, objects: Mapping[str, _Object]) -> dict[str, _Object]:
    """Remove what is not, or not any more, one of the objects. Returns those that are missing."""
    missing = {name: item for name, item in objects.items() if not item.whole(folder / name)}
    for file in folder.rglob("*"):
        name = file.relative_to(folder).as_posix()
        if not file.is_dir() and (name not in objects or name in missing):
            file.unlink()
    return missing


@contextlib.contextmanager
def alone(lock: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Keep other threads and processes out of the block, until its end or that of the process."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("waiting for another process that fetches the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclasses.dataclass(frozen=True)
class Hub:
    """A model of the Hugging Face hub, or in its cache where the hub cannot be had.

    None leaves revision, endpoint, token and cache (a folder) to huggingface_hub. offline: ask the
    cache only.
    """

    repo_id: str
    revision: str | None
    endpoint: str | None
    token: str | None = dataclasses.field(repr=False)
    cache: str | None
    offline: bool

    def checkpoint(self) -> Checkpoint:
        try:
            commit, sizes = self._list()
        except SourceError:
            if copy := self._cached():
                return Folder(copy)
            raise
        copy = self._snapshot(commit)
        if copy and not _absent(copy, sizes):
            return Folder(copy)
        return _Remote(self.repo_id, sizes, functools.partial(self._read, commit))

    def fetch(self, note: Callable[[str], None]) -> Path:
        try:
            commit, sizes = self._list()
        except SourceError as error:
            if copy := self._cached():
                note(f"using the cached copy of {self.repo_id}: {error.reason}")
                return copy
            raise
        copy = self._snapshot(commit)
        missing = _absent(copy, sizes) if copy else sizes
        if copy and not missing:
            return copy
        folder = self._download(sizes, sum(missing.values()), note)
        if left := _absent(folder, sizes):
            raise SourceError(self.repo_id, f"{min(left)} was not fetched", "start again")
        return folder

    def room(self) -> int:
        return _room(self._home())

    def _home(self) -> Path:
        from huggingface_hub import constants

        return Path(self.cache or constants.HF_HUB_CACHE)

    def _list(self) -> tuple[str, dict[str, int]]:
        """The commit that the revision stands for, and the needed files: name → bytes."""
        from huggingface_hub import HfApi

        if self.offline:
            raise SourceError(self.repo_id, "HF_HUB_OFFLINE is set", _CACHE)
        api = HfApi(endpoint=self.endpoint, token=self.token)

        def ask() -> "ModelInfo":
            return api.model_info(
                self.repo_id, revision=self.revision, timeout=ANSWER_S, files_metadata=True
            )

        with self._faults():
            info = _within(UNREACHABLE_S, ask)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        return info.sha or "", _model_files(self.repo_id, sizes)

    def _read(self, commit: str, name: str, length: int) -> bytes:
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.repo_id, name, revision=commit, endpoint=self.endpoint)
        headers = build_hf_headers(token=self.token)
        headers |= {"Range": f"bytes=0-{length - 1}", "Accept-Encoding": "identity"}

        def ask() -> bytes:
            found = b""
            with get_session().stream("GET", url, headers=headers, timeout=ANSWER_S) as answer:
                hf_raise_for_status(answer)
                for chunk in answer.iter_bytes():
                    found += chunk
                    if len(found) >= length:  # a server may not know ranges, and send it all
                        break
            return found[:length]

        with self._faults():
            return _within(UNREACHABLE_S, ask)

    def _download(
        self, sizes: Mapping[str, int], missing: int, note: Callable[[str], None]
    ) -> Path:
        from huggingface_hub import snapshot_download

        cache = self._home()
        with self._faults():
            cache.mkdir(parents=True, exist_ok=True)
            _check_room(self.repo_id, cache, missing, "HF_HOME")
            progress = _Progress(self.repo_id, missing, note)
            folder = snapshot_download(
                self.repo_id,
                revision=self.revision,
                endpoint=self.endpoint,
                token=self.token,
                cache_dir=cache,
                allow_patterns=[glob.escape(name) for name in sizes],
                tqdm_class=_bar(progress),
            )
        progress.end()
        return Path(folder)

    def _snapshot(self, revision: str | None) -> Path | None:
        """The cache's folder of a revision, which may lack files."""
        from huggingface_hub import try_to_load_from_cache

        for name in CONFIGS:
            found = try_to_load_from_cache(self.repo_id, name, self.cache, revision)
            if isinstance(found, str):
                return Path(found).parent
        return None

    def _cached(self) -> Path | None:
        """The cache's folder of our revision, if it has all that is needed."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        folder = self._snapshot(self.revision)
        if folder is None:
            return None
        try:
            tree = get_cached_repo_tree(self.repo_id, revision=self.revision, cache_dir=self.cache)
        except CachedRepoTreeNotFoundError:  # huggingface_hub before version 2 keeps none
            with contextlib.suppress(ModelError):
                weight_files(Folder(folder))
                return folder
            return None
        whole = not _absent(folder, needed({file.path: file.size for file in tree}))
        return folder if whole else None

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Raise huggingface_hub's errors as SourceErrors. Their own messages fill pages."""
        import httpx2

        try:
            yield
        except (httpx2.HTTPError, OSError, RuntimeError, json.JSONDecodeError) as error:
            raise SourceError(self.repo_id, *self._fault(error)) from error

    def _fault(self, error: Exception) -> tuple[str, str]:
        """What went wrong and what to do."""
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            return "it is gated", "accept its licence on the hub and set HF_TOKEN"
        if isinstance(error, errors.RevisionNotFoundError):
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


def _hub(model_id: str, environ: Mapping[str, str], revision: str | None) -> Hub:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(model_id)
    except HFValidationError as error:
        raise SourceError(model_id, "it is neither a folder nor a hub id", _WANTED) from error
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    if not cache and environ.get("HF_HOME"):
        cache = f"{environ['HF_HOME']}/hub"
    offline = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
    return Hub(
        repo_id=model_id,
        revision=revision,
        endpoint=environ.get("HF_ENDPOINT", "").rstrip("/") or None,
        token=environ.get("HF_TOKEN", "").strip() or None,
        cache=str(Path(cache).expanduser()) if cache else None,
        offline=offline.upper() in ("1", "ON", "TRUE", "YES"),
    )


def _absent(folder: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if not (folder / name).is_file()}


def _bar(progress: "_Progress") -> type:
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        """Shows nothing, and passes on what it is told."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})
            self.bytes = kwargs.get("unit") == "B"  # another bar counts files

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.bytes:  # one bar counts what came, one what was written
                progress.reach(int(self.n))

    return Bar


class _Remote:
    """A Checkpoint that is elsewhere. read: a file's name and a length → its first bytes."""

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
            # Who reads the header of one part of the weights reads those of all, and there may be
            # a hundred.
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


class _Progress:
    """Tells `note` how far a download is, now and then. Threads may call it."""

    def __init__(self, what: str, total: int, note: Callable[[str], None]) -> None:
        self._what = what
        self._total = total
        self._note = note
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._told = time.monotonic()
        note(f"fetching {what}: {_shown(total)}")

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._tell()

    def reach(self, done: int) -> None:
        with self._lock:
            self._done = max(self._done, done)
            self._tell()

    def end(self) -> None:
        took = time.monotonic() - self._began
        self._note(f"fetched {self._what}: {_shown(self._total)} in {took:.0f} s")

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told >= PERIOD_S:
            self._told = now
            self._note(f"fetching {self._what}: {_shown(self._done)} of {_shown(self._total)}")


def _shown(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _model_files(model_id: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """The needed ones of a remote model's files. Raises SourceError for names that lead astray."""
    for name in sizes:
        if any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
            raise SourceError(model_id, f"the name {name!r} leads out of its folder", "rename it")
    return needed(sizes)


def _room(folder: Path) -> int:
    """Bytes that are free in a folder, which need not be there yet."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(there).free


def _check_room(model_id: str, folder: Path, size: int, variable: str) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        reason = f"it needs {_shown(size)}, and {folder} has {_shown(free)} left"
        fix = f"set {variable} to a larger disk (VolumeSizeInGB on SageMaker)"
        raise SourceError(model_id, reason, fix)


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """Call a function, or raise TimeoutError when it takes longer.

    Time-outs of sockets are not enough: they count for each address that a host has, and looking
    its name up knows none.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(seconds)
