# SPDX-License-Identifier: Apache-2.0
"""Generated files: written, or checked to be fresh."""

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def written(files: Mapping[Path, bytes], *, check: bool) -> int:
    """Write these, file → content, or print which are stale. Returns the exit code."""
    stale = False
    for file, content in files.items():
        if file.exists() and file.read_bytes() == content:
            continue
        if check:
            print(f"{file.relative_to(ROOT)} is stale; run scripts/check --fix")
            stale = True
        else:
            file.write_bytes(content)
    return int(stale)
