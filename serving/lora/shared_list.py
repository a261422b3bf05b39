# SPDX-License-Identifier: Apache-2.0
"""The list of adapters that servers share: a folder with a file for each, on a volume that all of
them mount. Each server writes what is registered on it, and registers what others have written.
"""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

SUFFIX = ".json"


class Entry(msgspec.Struct, frozen=True):
    """An adapter as it was registered."""

    src: str
    digest: str
    """Of its files as they were then."""
    preload: bool = False
    pin: bool = False


class _Read(NamedTuple):
    stamp: tuple[int, int, int]
    entry: Entry


class SharedList:
    """The list. Its methods block, and raise OSError where the folder cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, _Read] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, entry: Entry) -> None:
        """List an adapter, or list it otherwise. Others see its file whole or not at all."""
        content = msgspec.json.encode(entry)
        path = self._folder / (name + SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes() == content:
                return
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as part:
            part.write(content)
            part.flush()
            os.fsync(part.fileno())
        Path(part.name).chmod(0o644)  # servers may run as different users
        Path(part.name).replace(path)

    def drop(self, name: str) -> None:
        """List an adapter no more."""
        (self._folder / (name + SUFFIX)).unlink(missing_ok=True)

    def read(self) -> tuple[dict[str, Entry], dict[str, str]]:
        """The adapters by name, and by name what is wrong with files that are none. Files that are
        as they were are not read again.
        """
        found: dict[str, _Read] = {}
        faults: dict[str, str] = {}
        with os.scandir(self._folder) as files:
            for file in files:
                name = file.name.removesuffix(SUFFIX)
                if name == file.name or name.startswith("."):
                    continue
                with contextlib.suppress(FileNotFoundError):  # it has gone in the meantime
                    stat = file.stat()
                    stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                    known = self._known.get(name)
                    if known and known.stamp == stamp:
                        found[name] = known
                        continue
                    try:
                        entry = msgspec.json.decode(Path(file.path).read_bytes(), type=Entry)
                        found[name] = _Read(stamp, entry)
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                        faults[name] = f"{file.path} is no adapter's: {error}"
        self._known = found
        return {name: it.entry for name, it in found.items()}, faults
