# SPDX-License-Identifier: Apache-2.0
"""The folder of generated models in the user's cache; each is made once."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


def cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "slipway" / "models"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def kept(folder: Path, write: Callable[[Path], None]) -> Path:
    """The folder that `write` fills, made once.

    It is made beside its final path and moved there when complete, so that an interrupted run
    leaves no partial folder.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        write(Path(scratch, folder.name))
        try:
            Path(scratch, folder.name).rename(folder)
        except OSError:  # another process was quicker
            if not folder.exists():
                raise
    say(f"{folder.name}: made in {time.monotonic() - began:.0f} s")
    return folder
