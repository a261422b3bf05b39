# SPDX-License-Identifier: Apache-2.0
"""Files and batches as they are on disk, and as clients see them: OpenAI's objects
(platform.openai.com/docs/api-reference/files, /batch).
"""

import re
import secrets
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from serving.access.caller import Caller

FILE, BATCH = "file-", "batch_"
"""Prefixes of ids."""
ID = re.compile("(file-|batch_)[0-9a-f]{32}")
INPUT, OUTPUT = "batch", "batch_output"
"""Purposes of files: input of clients, and output of batches."""


def new_id(kind: str) -> str:
    """An id that cannot be guessed."""
    return kind + secrets.token_hex(16)


class Status(StrEnum):
    """The status of a batch, in OpenAI's words. CANCELLING is recorded in a separate file beside
    the batch.
    """

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def open(self) -> bool:
        """Whether there is still something to be done."""
        return self in (
            Status.VALIDATING,
            Status.IN_PROGRESS,
            Status.FINALIZING,
            Status.CANCELLING,
        )


class OtherCopies(NamedTuple):
    """The other copies of this container, which share its batches. urls: theirs. turn: a file,
    which the copy that runs batches has locked.
    """

    urls: tuple[str, ...]
    turn: Path


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file as OpenAI describes it. bytes: its size. Times are in seconds since 1970."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"


class Fault(msgspec.Struct, frozen=True):
    """Why a batch failed. line: of its input, the first is 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Faults(msgspec.Struct, frozen=True):
    data: list[Fault]
    object: str = "list"


class Counts(msgspec.Struct):
    """Numbers of lines of a batch: all, answered without an error, and answered with one."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch as OpenAI describes it."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: Faults | None = None
    input_file_id: str
    completion_window: str
    status: Status = Status.VALIDATING
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None


class OwnedFile(msgspec.Struct, frozen=True):
    """A file, and whose it is. owner: a digest of the tenant, None without tenants."""

    file: File
    owner: str | None


class OwnedBatch(msgspec.Struct, kw_only=True):
    """A batch, and the rights that its lines run with.

    caller: who made it. tenant: its tenant's header, where a header has it. output, errors: ids of
    the files that are being written, and lives: seconds that they live, None for as long as all do.
    starts: how often it was begun since a line was last answered;
    answered: how many were then.
    """

    batch: Batch
    owner: str | None
    caller: Caller
    tenant: tuple[str, str] | None = None
    output: str
    errors: str
    lives: int | None = None
    starts: int = 0
    answered: int = 0
