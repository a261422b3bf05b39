"""Digests of large files in milliseconds: of samples, which another training changes nearly all."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

SAMPLE = 4096  # bytes
SAMPLES = 256  # of each file


def sampled(files: Iterable[Path], *more: bytes) -> str:
    """16 hex digits that differ when the names, sizes or contents of files do, or `more` does."""
    digest = hashlib.sha256()
    for part in more:
        digest.update(part)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(size // SAMPLES, SAMPLE)):
                digest.update(os.pread(file.fileno(), SAMPLE, place))
    return digest.hexdigest()[:16]
