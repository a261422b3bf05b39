# SPDX-License-Identifier: Apache-2.0
"""The stand-in for S3: a folder with a folder for each bucket, or a server that speaks S3."""

import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import boto3
from botocore.exceptions import BotoCoreError, ClientError


class Failed(Exception):
    """Files that cannot be had, a copy that does not start, or one that answers a call wrongly."""


class Artifact(NamedTuple):
    """Files in S3. packed: one tar.gz, or else everything below a prefix."""

    url: str
    packed: bool


class Store:
    """place: the folder, or the server's URL; None for a stand-in without S3. A server is asked
    with the credentials of boto3's usual sources.
    """

    def __init__(self, place: Path | str | None) -> None:
        self._folder = place if isinstance(place, Path) else None
        self._server: Any = None
        if isinstance(place, str):
            self._server = boto3.client("s3", endpoint_url=place)

    def require(self, artifact: Artifact) -> None:
        """Raise Failed if an artifact is missing."""
        if not self._server:
            self._locate(artifact)
            return
        bucket, key = _parts(artifact)
        try:
            if artifact.packed:
                self._server.head_object(Bucket=bucket, Key=key)
            elif not self._server.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1)["KeyCount"]:
                raise Failed(_missing(artifact, "no object has this prefix"))
        except (BotoCoreError, ClientError) as error:
            raise Failed(_missing(artifact, str(error))) from None

    def bring(self, artifact: Artifact, folder: Path) -> None:
        """Put an artifact's files into a folder that nobody may write to afterwards. Raises
        Failed.
        """
        self.require(artifact)
        try:
            if artifact.packed:
                self._unpack(artifact, folder)
            elif self._server:
                for key, rest in self._keys(artifact):
                    target = folder / rest
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._server.download_file(_parts(artifact)[0], key, str(target))
            else:
                shutil.copytree(self._locate(artifact), folder)
        except (
            *(OSError, EOFError, tarfile.TarError, zlib.error, BotoCoreError, ClientError),
        ) as error:
            raise Failed(f"Failed to extract model data from {artifact.url}: {error}") from None
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)

    def _unpack(self, artifact: Artifact, folder: Path) -> None:
        folder.mkdir(parents=True)
        if self._server:
            bucket, key = _parts(artifact)
            source = self._server.get_object(Bucket=bucket, Key=key)["Body"]
        else:
            source = self._locate(artifact).open("rb")
        with source, tarfile.open(fileobj=source, mode="r|gz") as members:
            # Python has this filter since 3.11.4; Debian 12 has 3.11.2.
            members.extraction_filter = getattr(tarfile, "data_filter", None)
            members.extractall(folder)

    def _keys(self, artifact: Artifact) -> Iterator[tuple[str, str]]:
        """Yield the keys of a prefix, each with the part after the prefix. Raises Failed."""
        bucket, prefix = _parts(artifact)
        pages = self._server.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            for found in page.get("Contents", []):
                rest = found["Key"].removeprefix(prefix)
                if ".." in rest.split("/") or rest.startswith("/"):
                    raise Failed(f"{artifact.url}: the key {found['Key']!r:.200} leaves the folder")
                if rest and not rest.endswith("/"):
                    yield found["Key"], rest

    def _locate(self, artifact: Artifact) -> Path:
        """The path of an artifact on this machine. Raises Failed if it is missing."""
        if self._folder is None:
            raise Failed(f"{artifact.url}: there is no S3 here; --s3 names what stands for it")
        bucket, key = _parts(artifact)
        found = self._folder.joinpath(bucket, *key.split("/"))
        there = found.is_file() if artifact.packed else found.is_dir()
        if not there or ".." in (bucket, *key.split("/")):
            kind = "file" if artifact.packed else "folder"
            raise Failed(_missing(artifact, f"there is no {kind} {found}"))
        return found


def _missing(artifact: Artifact, why: str) -> str:
    return f"Could not find model data at {artifact.url}: {why}"


def _parts(artifact: Artifact) -> tuple[str, str]:
    """The bucket and the key of an artifact. Raises Failed."""
    if not artifact.url.startswith("s3://"):
        raise Failed(f"{artifact.url}: only s3:// is read here")
    bucket, _, key = artifact.url.removeprefix("s3://").partition("/")
    return bucket, key
