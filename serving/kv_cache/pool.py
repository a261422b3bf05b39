# SPDX-License-Identifier: Apache-2.0
"""The file of LMCache's memory in /dev/shm, and the lock by which a later server knows it unused.

The file outlives a server that is killed, and /dev/shm may outlive the container: what is left
takes memory from all that start later. So each such file has a lock beside it, which its server
holds until it ends, however it ends. Files whose lock nobody holds are removed at the next start,
before the machine's memory is looked at.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")

_LOCK = re.compile(r"(lmcache_l1_pool_slipway-\d+)\.lock")
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
_locks: list[int] = []


@contextlib.contextmanager
def cleanup() -> Iterator[None]:
    """Remove what killed servers left; at the end of the block, what this one leaves."""
    _clear()
    try:
        yield
    finally:
        while _locks:
            os.close(_locks.pop())
        _clear()


def hold(pool: Path) -> None:
    """Hold the lock of a file that will be made, until the end of cleanup().

    Raises BlockingIOError where another server holds it. A lock that cannot be made is a warning.
    """
    try:
        with _exclusive(pool.parent):
            lock = os.open(pool.with_name(f"{pool.name}.lock"), _FLAGS, 0o600)
            _locks.append(lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        log.warning("%s will stay where this server is killed: %s", pool, error)


def _clear() -> None:
    with contextlib.suppress(OSError), _exclusive(SHARED_MEMORY):
        for lock in SHARED_MEMORY.iterdir():
            if match := _LOCK.fullmatch(lock.name):
                with contextlib.suppress(OSError):  # another user's, or held
                    _remove(lock, lock.with_name(match[1]))


def _remove(lock: Path, pool: Path) -> None:
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if pool.exists():
            log.warning("removing the KV cache that a killed server left in memory: %s", pool)
        pool.unlink(missing_ok=True)
        lock.unlink()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Keep this user's other servers from taking and removing locks."""
    everyone = os.open(folder / f"slipway-{os.geteuid()}.lock", _FLAGS, 0o600)
    try:
        if os.fstat(everyone).st_uid != os.geteuid():  # who made it could hold it for ever
            raise PermissionError(errno.EPERM, "a lock in /dev/shm is another user's")
        fcntl.flock(everyone, fcntl.LOCK_EX)
        yield
    finally:
        os.close(everyone)
