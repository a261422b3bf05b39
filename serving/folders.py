# SPDX-License-Identifier: Apache-2.0
"""Folders under /tmp for data without an option for a folder, safe from the machine's other users.

Every user may make folders and links in /tmp, so a folder of another user is never used.
"""

import contextlib
import errno
import os
from pathlib import Path

HOME = Path("/tmp/slipway")


def place(name: str) -> Path:
    """Return the path for a folder of this name: in /tmp/slipway, or in /tmp/slipway-UID if the
    first is another user's or cannot be written. Makes no folder.
    """
    first, second = (home / name for home in _homes())
    return first if _usable(first) else second


def make(folder: Path) -> Path:
    """Make a folder. Folders of place() are only for this user. Raises OSError, also if another
    user has made such a folder.
    """
    if folder.parent not in _homes():
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for path in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        require_ours(path)
    return folder


def require_ours(path: Path) -> None:
    """Raise PermissionError if the path belongs to another user than this one and root, unless it
    is a mounted disk.
    """
    if not _ours(path):
        owner = path.lstat().st_uid
        raise PermissionError(errno.EPERM, f"belongs to user {owner}", str(path))


def _homes() -> tuple[Path, Path]:
    return HOME, HOME.with_name(f"{HOME.name}-{os.geteuid()}")


def _ours(path: Path) -> bool:
    return path.lstat().st_uid in (0, os.geteuid()) or path.is_mount()


def _usable(path: Path) -> bool:
    existing = [folder for folder in (path, path.parent) if os.path.lexists(folder)]
    nearest = existing[0] if existing else path.parent.parent
    return all(map(_ours, existing)) and os.access(nearest, os.W_OK, effective_ids=True)
