# SPDX-License-Identifier: Apache-2.0
"""The kind of source that a model's id names: a local folder, S3 or the Hugging Face hub."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from lmi_config.facts.model import Checkpoint, Folder
from serving import folders
from serving.sources import hub
from serving.sources.arriving import Early
from serving.sources.s3 import S3
from serving.sources.source import Source, SourceError, free_space

_EXPECTED = "give a folder with a model, s3://bucket/prefix, or a hub id like Qwen/Qwen3-0.6B"


def locate(
    model_id: str,
    environ: Mapping[str, str],
    *,
    revision: str | None = None,
    downloads: str | None = None,
) -> Source:
    """Return the source that `model_id` names. Makes no network requests.

    environ: for Hugging Face's HF_*; boto3 reads AWS_* itself. revision: branch, tag or commit of a
    hub model. downloads: the folder of models from S3.

    Raises SourceError if it is neither a folder, nor S3, nor of the form of a hub id.
    """
    if model_id.startswith("s3://"):
        bucket, _, prefix = model_id.removeprefix("s3://").rstrip("/").partition("/")
        if not bucket:
            raise SourceError(model_id, "it names no bucket", _EXPECTED)
        return S3(model_id, bucket, prefix and f"{prefix}/", downloads_folder(downloads))
    try:
        folder = Path(model_id).expanduser()
        if folder.is_dir():
            return Local(folder)
    except RuntimeError:  # "~name" without such a user
        pass
    except OSError as error:
        raise SourceError(model_id, f"it cannot be read ({error.strerror})", _EXPECTED) from error
    if model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1:
        raise SourceError(model_id, "there is no such folder", _EXPECTED)
    if not hub.is_repo_id(model_id):
        raise SourceError(model_id, "it is neither a folder nor a hub id", _EXPECTED)
    return hub.repo(model_id, environ, revision)


def downloads_folder(configured: str | None) -> Path:
    """Return the folder of models from S3."""
    return Path(configured) if configured else folders.place("models")


@dataclasses.dataclass(frozen=True)
class Local:
    """A folder of this machine. It may be mounted read-only, because Slipway never writes to it."""

    folder: Path

    def listed(self) -> "Local":
        return self

    def checkpoint(self) -> Checkpoint:
        return Folder(self.folder)

    def fetch(self, note: Callable[[str], None], early: Early | None = None) -> Path:
        return self.folder

    def room(self) -> int:
        return free_space(self.folder)
