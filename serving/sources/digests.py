# SPDX-License-Identifier: Apache-2.0
"""Digests of files: of all their bytes, or of samples of a very large model."""

import hashlib
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from lmi_config.facts.model import LONGEST_HEADER

WHOLE = 64 * 2**30
"""Most bytes of a model that is read as a whole: SHA-256 takes about 1 s for 1.5 GB on each core,
while vLLM is imported. Only a sixteenth of a larger model is read.
"""
SAMPLE = 2**20  # bytes
EVERY = 16 * SAMPLE  # bytes from one sample to the next
_THREADS = 8
_REMEMBERED = 10_000  # files whose digests are kept
_SETTLED_NS = 2 * 10**9  # file systems keep times in steps of up to 2 s


def of_model(files: Mapping[str, Path], *more: bytes, whole: bool = True) -> str:
    """Return 16 hex digits that differ if names or contents of files do, or `more` does.

    files: name → path. whole: whether to read all bytes, if the files have at most WHOLE bytes
    together. Otherwise the headers of safetensors and SAMPLE of every EVERY bytes are read, so a
    smaller change may be missed.
    """
    whole = whole and sum(path.stat().st_size for path in files.values()) <= WHOLE
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(_digest if whole else _sampled_digest, files.values())
    return combined(dict(zip(files, digests, strict=True)), *more)


def combined(digests: Mapping[str, str], *more: bytes) -> str:
    """Return 16 hex digits for names and the digests of their files."""
    digest = hashlib.sha256()
    files = (f"{name}\0{of}".encode("utf-8", "surrogateescape") for name, of in digests.items())
    for part in (*more, *files):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


class Digests:
    """A cache of digests of whole files. An unchanged file is not read again."""

    def __init__(self) -> None:
        self._remembered: dict[tuple[object, ...], str] = {}

    def of(self, path: Path) -> str:
        """Return 64 hex digits. Raises OSError if the file cannot be read."""
        with path.open("rb") as file:
            now, state = time.time_ns(), _state(path, file)
            digest = (
                self._remembered.pop(state, None) or hashlib.file_digest(file, "sha256").hexdigest()
            )
            # Two writes within one step of the file system's clock have the same time.
            if max(state[-2:]) < now - _SETTLED_NS and state == _state(path, file):
                self._remembered[state] = digest
        while len(self._remembered) > _REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)), None)
        return digest


State = tuple[int, int, int, int, int]
"""A file's device, inode and size, and its times of modification and of the inode's change in
nanoseconds."""


def state_of(status: os.stat_result) -> State:
    """Return the facts of a file that change with its content. Users cannot set the last one."""
    times = status.st_mtime_ns, status.st_ctime_ns
    return (status.st_dev, status.st_ino, status.st_size, *times)


def _state(path: Path, file: BinaryIO) -> tuple[Path, int, int, int, int, int]:
    return (path, *state_of(os.fstat(file.fileno())))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled_digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header, LONGEST_HEADER)))
        for place in range(0, size, EVERY):
            digest.update(os.pread(file.fileno(), SAMPLE, place))
    return digest.hexdigest()
