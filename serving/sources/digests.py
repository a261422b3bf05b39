# SPDX-License-Identifier: Apache-2.0
"""Digests of files: of all their bytes, and of samples where a model is too large for that."""

import hashlib
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from lmi_config.facts.model import LONGEST_HEADER

WHOLE = 64 * 2**30
"""Bytes of a model up to which all of it is read: SHA-256 takes about 1 s for 1.5 GB on each core,
while vLLM is imported. A sixteenth of larger models is read.
"""
SAMPLE = 2**20  # bytes
EVERY = 16 * SAMPLE  # bytes from one sample to the next
_THREADS = 8
_REMEMBERED = 10_000  # files whose digests are kept
_SETTLED_NS = 2 * 10**9  # file systems keep times in steps of up to 2 s


def of_model(files: Mapping[str, Path], *more: bytes, whole: bool = True) -> str:
    """16 hex digits that differ when the names or contents of files do, or `more` does.

    files: name → path. whole: all bytes are read where the files have at most WHOLE together; else
    those of the headers of safetensors and SAMPLE of each EVERY, so that a change of fewer bytes
    may be missed.
    """
    whole = whole and sum(path.stat().st_size for path in files.values()) <= WHOLE
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(_digest if whole else _sampled_digest, files.values())
    return combined(dict(zip(files, digests, strict=True)), *more)


def combined(digests: Mapping[str, str], *more: bytes) -> str:
    """16 hex digits for names and the digests of what they name."""
    digest = hashlib.sha256()
    files = (f"{name}\0{of}".encode("utf-8", "surrogateescape") for name, of in digests.items())
    for part in (*more, *files):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


class Digests:
    """Digests of whole files, remembered: a file that has not changed is not read again."""

    def __init__(self) -> None:
        self._remembered: dict[tuple[object, ...], str] = {}

    def of(self, path: Path) -> str:
        """64 hex digits. Raises OSError where the file cannot be read."""
        with path.open("rb") as file:
            now, state = time.time_ns(), _state(path, file)
            digest = (
                self._remembered.pop(state, None) or hashlib.file_digest(file, "sha256").hexdigest()
            )
            # Two writes within one step of the file system's clock look like one.
            if max(state[-2:]) < now - _SETTLED_NS and state == _state(path, file):
                self._remembered[state] = digest
        while len(self._remembered) > _REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)), None)
        return digest


def _state(path: Path, file: BinaryIO) -> tuple[Path, int, int, int, int, int]:
    """What changes with a file's content; nobody can set the last of it, the time of the change."""
    status = os.fstat(file.fileno())
    times = status.st_mtime_ns, status.st_ctime_ns
    return (path, status.st_dev, status.st_ino, status.st_size, *times)


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
