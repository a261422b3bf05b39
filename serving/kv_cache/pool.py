# SPDX-License-Identifier: Apache-2.0
"""The file of LMCache's memory in /dev/shm, and its lock, which shows a later server whether the
file is in use.

The file outlives a killed server, and /dev/shm may outlive the container. A leftover file takes
memory from later servers. So each file has a lock, which its server holds until it ends, in any
way. The next start removes files without a holder, before it measures the machine's memory.
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
    """Remove the files of killed servers; at the end of the block, remove this server's file."""
    _clear()
    try:
        yield
    finally:
        while _locks:
            os.close(_locks.pop())
        _clear()


def hold(pool: Path) -> None:
    """Hold the lock of a file that LMCache will make, until the end of cleanup().

    Raises BlockingIOError if another server holds it. A failure to make the lock is only logged.
    """
    try:
        with _exclusive(pool.parent):
            lock = os.open(pool.with_name(f"{pool.name}.lock"), _FLAGS, 0o600)
            _locks.append(lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        log.warning("%s will stay if this server is killed: %s", pool, error)


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
    """Keep this user's other servers from taking and removing locks during the block."""
    everyone = os.open(folder / f"slipway-{os.geteuid()}.lock", _FLAGS, 0o600)
    try:
        if os.fstat(everyone).st_uid != os.geteuid():  # another user could hold it without end
            raise PermissionError(errno.EPERM, "a lock in /dev/shm is another user's")
        fcntl.flock(everyone, fcntl.LOCK_EX)
        yield
    finally:
        os.close(everyone)
