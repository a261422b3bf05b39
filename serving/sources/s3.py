# SPDX-License-Identifier: Apache-2.0
"""Models on S3: listed, inspected by their first bytes, and fetched into a folder."""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from lmi_config.facts.model import Checkpoint, Folder
from serving import folders
from serving.sources.arriving import Early
from serving.sources.model_files import needed_of_remote
from serving.sources.source import (
    ANSWER_S,
    CONNECTIONS,
    UNREACHABLE_S,
    Progress,
    RemoteCheckpoint,
    SourceError,
    exclusive,
    free_space,
    require_space,
    with_timeout,
)

if TYPE_CHECKING:  # boto3 takes long to import; its stubs are not installed where it serves
    from boto3.session import Session
    from types_boto3_s3.client import S3Client

TRANSFER_S = 60.0  # until the next bytes of a download
LIST_S = UNREACHABLE_S - 1.0
"""Seconds after which no further page of a list is requested."""
OBJECTS = 10_000
"""Most objects of a model; the whole bucket may have any number."""
PART = 16 * 1024**2  # bytes that one request fetches


@dataclasses.dataclass(frozen=True)
class _Object:
    """An object as S3 lists it."""

    key: str
    size: int
    etag: str
    """With its quotes."""
    modified: int
    """Seconds since the epoch."""

    def is_in(self, file: Path) -> bool:
        """Whether the file has the object's size, and its time as we set it at the end.

        A file that was cut short or written by others has another time, down to the nanosecond.
        ETags distinguish objects that replace each other within a second.
        """
        try:
            status = file.stat()
        except FileNotFoundError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.modified * 10**9)


@dataclasses.dataclass(frozen=True)
class S3:
    """A source on S3: the objects below `s3://bucket/prefix`, or one of them."""

    uri: str
    bucket: str
    prefix: str
    """Empty, or with a slash at its end."""
    downloads: Path
    """The parent of the folder that fetch() makes."""
    only: str = ""
    """The name of the one object that is wanted, or empty for all of them."""

    @property
    def folder(self) -> Path:
        """The folder of the fetched files."""
        where = f"{self.bucket}/{self.prefix}"
        digest = hashlib.sha256(where.encode()).hexdigest()[:12]
        return self.downloads / f"{PurePosixPath(where).name}-{digest}"

    def room(self) -> int:
        return free_space(self.folder)

    def listed(self) -> "Listing":
        """See Source."""
        return self.list()

    def checkpoint(self) -> Checkpoint:
        return self.list().checkpoint()

    def fetch(self, note: Callable[[str], None], early: Early | None = None) -> Path:
        return self.list().fetch(note, early)

    def list(self) -> "Listing":
        """Return S3's list of objects. Blocks; raises SourceError."""
        from boto3.session import Session

        with faults(self.uri):
            session = Session()
        client = open_client(self.uri, session, ANSWER_S, attempts=2)
        ends = time.monotonic() + LIST_S
        with faults(self.uri):
            objects = with_timeout(lambda: self._objects(client, ends))
        if not objects:
            if self.only:
                raise SourceError(self.uri, "there is no such object", "check its name")
            fix = "check the prefix, below which the configuration and the weights should be"
            raise SourceError(self.uri, "there are no objects below it", fix)
        names = needed_of_remote(self.uri, {name: item.size for name, item in objects.items()})
        return Listing(self, {name: objects[name] for name in names}, session, client)

    def _objects(self, client: "S3Client", ends: float) -> dict[str, _Object]:
        """Return all objects: name below the prefix → object. ends: when no further page is
        requested, by time.monotonic(). Raises SourceError if there are more pages then, or more
        than OBJECTS.
        """
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.prefix + self.only
        )
        found: dict[str, _Object] = {}
        seen = 0
        for page in pages:
            for item in page.get("Contents", ()):
                # Consoles make objects whose names end with a slash, to display a folder.
                if not item["Key"].endswith("/") and (
                    not self.only or item["Key"] == self.prefix + self.only
                ):
                    modified = int(item["LastModified"].timestamp())
                    found[item["Key"].removeprefix(self.prefix)] = _Object(
                        item["Key"], item["Size"], item["ETag"], modified
                    )
            if self.only and found:  # names that begin with this one come after it
                break
            seen += len(page.get("Contents", ()))
            more = page.get("IsTruncated", False)
            if seen > OBJECTS or (more and seen == OBJECTS):
                raise SourceError(self.uri, f"it has more than {OBJECTS:,} objects below it", _LESS)
            if more and time.monotonic() > ends:
                reason = f"it has more objects below it than the {seen:,} listed in {LIST_S:g} s"
                raise SourceError(self.uri, reason, _LESS)
        return found


@dataclasses.dataclass(frozen=True)
class Listing:
    """A source's needed objects, as S3 listed them.

    The checkpoint, the digest and fetch() use exactly these objects: each request has the object's
    ETag, and an object that has been replaced raises a SourceError.
    """

    source: S3
    objects: Mapping[str, _Object]
    """Name below the prefix → object."""
    _session: "Session" = dataclasses.field(repr=False)
    _client: "S3Client" = dataclasses.field(repr=False)

    @property
    def digest(self) -> str:
        """Return 16 hex digits that differ if names, sizes or ETags do."""
        versions = sorted((name, item.size, item.etag) for name, item in self.objects.items())
        return hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:16]

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(item.size for item in self.objects.values())

    def to(self, downloads: Path) -> "Listing":
        """Return the same listing, with another place for fetch()."""
        return dataclasses.replace(
            self, source=dataclasses.replace(self.source, downloads=downloads)
        )

    def listed(self) -> "Listing":
        """See Source."""
        return self

    def room(self) -> int:
        """See Source."""
        return self.source.room()

    def checkpoint(self) -> Checkpoint:
        """See Source."""
        if not self._missing():
            return Folder(self.source.folder)
        sizes = {name: item.size for name, item in self.objects.items()}
        return RemoteCheckpoint(self.source.uri, sizes, self._head)

    def fetch(self, note: Callable[[str], None], early: Early | None = None) -> Path:
        """See Source."""
        folder, downloads = self.source.folder, self.source.downloads
        try:
            folders.make(downloads)
            folder.mkdir(exist_ok=True)
            with exclusive(downloads / f"{folder.name}.lock", note):
                missing = self._missing()
                _remove_others(folder, self.objects.keys() - missing.keys())
                if missing:
                    size = sum(item.size for item in missing.values())
                    require_space(self.source.uri, folder, size, "SERVING_DOWNLOAD_DIR")
                    self._record_etags()
                    self._download(missing, note, early)
        except OSError as error:
            reason = f"{folder} cannot be written ({error.strerror})"
            fix = "set SERVING_DOWNLOAD_DIR to a folder that can be written and has room"
            raise SourceError(self.source.uri, reason, fix) from error
        return folder

    def _head(self, name: str, length: int) -> bytes:
        item = self.objects[name]

        def read() -> bytes:
            answer = self._client.get_object(
                Bucket=self.source.bucket,
                Key=item.key,
                Range=f"bytes=0-{length - 1}",
                IfMatch=item.etag,
            )
            body: bytes = answer["Body"].read(length)  # a store without ranges sends the whole
            return body

        with faults(self.source.uri):
            return with_timeout(read)

    def _missing(self) -> dict[str, _Object]:
        """Return the objects whose listed version is not on the disk."""
        try:
            etags = dict(json.loads(self._etags.read_bytes()))
        except (OSError, ValueError, TypeError):
            etags = {}
        return {
            name: item
            for name, item in self.objects.items()
            if etags.get(name) != item.etag or not item.is_in(self.source.folder / name)
        }

    @property
    def _etags(self) -> Path:
        """The file with the objects' versions: name → ETag."""
        return self.source.downloads / f"{self.source.folder.name}.etags"

    def _record_etags(self) -> None:
        """Write the objects' versions before the missing files are fetched. No file appears before
        it is complete.
        """
        new = self._etags.with_suffix(".new")
        new.write_text(json.dumps({name: item.etag for name, item in self.objects.items()}))
        new.replace(self._etags)

    def _download(
        self, objects: Mapping[str, _Object], note: Callable[[str], None], early: Early | None
    ) -> None:
        from s3transfer.futures import TransferFuture
        from s3transfer.manager import TransferConfig, TransferManager
        from s3transfer.subscribers import BaseSubscriber

        uri, folder = self.source.uri, self.source.folder
        progress = Progress(uri, sum(item.size for item in objects.values()), note)

        class Transfer(BaseSubscriber):
            """The facts that one transfer needs about its object, and its final step."""

            def __init__(self, item: _Object, file: Path) -> None:
                self.item, self.file = item, file

            def on_queued(self, future: TransferFuture, **_: Any) -> None:
                future.meta.provide_transfer_size(self.item.size)
                future.meta.provide_object_etag(self.item.etag)

            def on_progress(self, future: TransferFuture, bytes_transferred: int, **_: Any) -> None:
                progress.add(bytes_transferred)

            def on_done(self, future: TransferFuture, **_: Any) -> None:
                with contextlib.suppress(FileNotFoundError):  # after a failure there is no file
                    os.utime(self.file, (self.item.modified, self.item.modified))

        # Each file is written under a random name, and renamed when all its parts are there. S3
        # only sends a part if the object still has its listed ETag. Below the threshold there would
        # be no such check, so the threshold is 1 byte.
        # One thread submits the parts, so that files arrive one after the other.
        config = TransferConfig(
            multipart_threshold=1,
            multipart_chunksize=PART,
            max_request_concurrency=CONNECTIONS,
            max_submission_concurrency=1,
        )
        last = [name for name in early.last if name in objects] if early else []
        client = open_client(uri, self._session, TRANSFER_S, attempts=8)
        with faults(uri), TransferManager(client, config) as manager:

            def arrive(names: Iterable[str]) -> None:
                transfers = []
                for name in names:
                    item, file = objects[name], folder / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    told = [Transfer(item, file)]
                    transfers.append(
                        manager.download(self.source.bucket, item.key, str(file), subscribers=told)
                    )
                for transfer in transfers:
                    transfer.result()

            arrive(name for name in objects if name not in last)
            if early:
                early.begin(folder)
            arrive(last)
        for name, item in objects.items():
            if not item.is_in(folder / name):
                raise SourceError(uri, f"{name} came incomplete", "start again")
        progress.end()


def open_client(uri: str, session: "Session", answer_s: float, attempts: int) -> "S3Client":
    """Return a client. answer_s: the timeout until the next bytes of an answer. A session makes its
    second client quickly.
    """
    from botocore.config import Config

    config = Config(
        connect_timeout=ANSWER_S,
        read_timeout=answer_s,
        retries={"total_max_attempts": attempts, "mode": "standard"},
        max_pool_connections=CONNECTIONS,
    )
    with faults(uri):
        try:
            return session.client("s3", config=config)
        except ValueError as error:
            fix = "set it to one like http://minio:9000"
            raise SourceError(uri, "AWS_ENDPOINT_URL is no URL", fix) from error


_LESS = "give the prefix of one model, below which its files are"
_CREDENTIALS = (
    "give the container a role, or AWS_* variables; on SageMaker with network isolation let the "
    "platform fetch the model (ModelDataSource) instead"
)
_REGION = ("the bucket is in another region", "set AWS_REGION to the bucket's region")
_DENIED = ("access is denied", "allow s3:ListBucket on the bucket and s3:GetObject on its objects")
_CHANGED = ("an object changed while it was fetched", "start again")
_FAULTS = {
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
    "PreconditionFailed": _CHANGED,
}
"""Error code of S3 → its meaning and the fix."""


@contextlib.contextmanager
def faults(uri: str) -> Iterator[None]:
    """Raise boto3's errors as SourceErrors. Their own messages have names of users and requests."""
    from botocore import exceptions
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError

    try:
        yield
    except exceptions.ClientError as error:
        code = error.response["Error"]["Code"]
        unknown = (f"S3 answers {code}", "check the bucket, or start again later")
        raise SourceError(uri, *_FAULTS.get(code, unknown)) from error
    except (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
    ) as error:
        raise SourceError(uri, "there are no AWS credentials", _CREDENTIALS) from error
    except S3DownloadFailedError as error:
        raise SourceError(uri, *_CHANGED) from error
    except exceptions.ParamValidationError as error:
        raise SourceError(uri, "no bucket can have this name", "check it") from error
    except (TimeoutError, RetriesExceededError, exceptions.BotoCoreError) as error:
        reason = f"S3 cannot be reached ({type(error).__name__})"
        fix = (
            "check network and AWS_ENDPOINT_URL, or let the platform fetch the model "
            "(ModelDataSource on SageMaker)"
        )
        raise SourceError(uri, reason, fix) from error


def _remove_others(folder: Path, kept: Set[str]) -> None:
    """Remove all files except those with these names."""
    for file in folder.rglob("*"):
        if not file.is_dir() and file.relative_to(folder).as_posix() not in kept:
            file.unlink()
