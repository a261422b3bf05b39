# SPDX-License-Identifier: Apache-2.0
"""The folder of the disk tier: one for each model, so that no model reads another's cache.

LMCache only counts the bytes that it stored since its start. So each model has a folder named by
its fingerprint, and older files are reduced to the tier's size before LMCache starts. Only files
with LMCache's names are removed, in folders with our lock that no server holds, below a folder that
only we use. Links are never followed.
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import stat
from pathlib import Path

from lmi_config.facts import machine
from lmi_config.plan.kv_tiers import DiskTier
from serving import folders

log = logging.getLogger(__name__)


def claim(tier: DiskTier, fingerprint: str) -> DiskTier:
    """Make this model's folder, hold it until the process ends, and make room for it.

    It is in a separate subfolder of the tier's folder, because that may have other users' files.
    Other models' caches that no server holds are removed. This model's newest files are kept, up to
    half of the tier. Returns the tier with this folder, and with the rest of the size for LMCache.

    Raises OSError if the folder cannot be written, or is not ours.
    """
    home = _make_home(Path(tier.path))
    with machine.kv_folder(home.parent) as folder:
        os.close(os.open(machine.LOCK, _NEW_LOCK, 0o600, dir_fd=folder))
        # Servers that start at the same time enter one after another, and see the held caches.
        with machine.locked(folder, fcntl.LOCK_EX):
            kept = _evict(_hold(folder, fingerprint), tier.size // 2)
            for name, other in machine.unused_caches(folder):
                log.info("removing the KV cache of another model or version: %s", home / name)
                _remove(name, other, folder)
    return dataclasses.replace(tier, path=str(home / fingerprint), size=tier.size - kept)


_NEW_LOCK = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW


def _make_home(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if path.parent.stat().st_mode & stat.S_IWOTH:
        folders.require_ours(path)  # any user may have made /tmp/lmcache, for example
    with contextlib.suppress(FileExistsError):
        (path / machine.KV).mkdir(mode=0o700)
    return path / machine.KV


def _hold(home: int, name: str) -> int | None:
    """Make a cache's folder, and lock it until the process ends.

    Returns the folder's descriptor, or None if another server also holds the folder. Neither
    descriptor is ever closed.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=home)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=home)
    lock = os.open(machine.LOCK, _NEW_LOCK, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        alone = False
    else:
        alone = True
    fcntl.flock(lock, fcntl.LOCK_SH)
    return folder if alone else None


def _evict(folder: int | None, limit: int) -> int:
    """Remove the oldest KV files above a limit in bytes. Returns the bytes of the others."""
    if folder is None:  # another server counts its files
        return 0
    files = machine.kv_files(folder)
    kept = 0
    for name in sorted(files, key=lambda name: files[name].st_mtime, reverse=True):
        size = files[name].st_blocks * 512
        if name.endswith(".tmp") or kept + size > limit:
            os.unlink(name, dir_fd=folder)
        else:
            kept += size
    if files:
        log.info("disk tier: kept %.1f GiB of an earlier run", kept / (1 << 30))
    return kept


def _remove(name: str, folder: int, home: int) -> None:
    """Remove a cache, its lock last, so that a partly removed cache is still recognised."""
    try:
        for file in machine.kv_files(folder):
            os.unlink(file, dir_fd=folder)
        if os.listdir(folder) == [machine.LOCK]:
            os.unlink(machine.LOCK, dir_fd=folder)
            os.rmdir(name, dir_fd=home)
    except OSError as error:
        log.warning("cannot remove the KV cache %s: %s", name, error)
