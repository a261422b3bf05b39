# SPDX-License-Identifier: Apache-2.0
"""The isolation of an adapter's code, which is not trusted.

It runs as a separate user, if the server may choose one, and in a Landlock domain, if the kernel
supports it. Its environment has no secrets, and it has no capabilities and no way to gain rights.
This is not a sandbox: it can still access the network, and every file that all users may read.
"""

import contextlib
import ctypes
import importlib
import itertools
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

PROCESSES = 1024
"""Most processes and threads of one of our users."""

# systemd's range for dynamic users of services; no package uses it.
_USERS = range(61184, 65520)

_PASSED_ON = frozenset(
    (
        *("PATH", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "USER"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONUTF8"),
        *("VIRTUAL_ENV", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
        "TOKENIZERS_PARALLELISM",
    )
)
"""The environment variables that a Python process needs."""

_CAP_KILL, _CAP_SETGID, _CAP_SETUID = 5, 6, 7  # capabilities(7)
_CAPABILITY_VERSION_3 = 0x20080522
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # landlock(7)
_PATH_BENEATH = 1
_WRITE_FILE, _READ_DIR, _MAKE_BLOCK = 1 << 1, 1 << 3, 1 << 11
_USE = 0b1111  # to execute, write and read a file, and read a folder
_SIGNALS_AND_SOCKETS = 0b11
_SCOPES = 6  # the version that has them
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38  # prctl(2)

_in_use: set[int] = set()
_next_users = itertools.cycle(_USERS)  # so a user's leftovers are gone long before its reuse


def environment(environ: Mapping[str, str], scratch: str | None = None) -> dict[str, str]:
    """Return the environment of adapters' code, without secrets. scratch: a folder for its
    temporary files.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name in _PASSED_ON or name.startswith("LC_")
    }
    if scratch:
        kept["TMPDIR"] = scratch
    return {**kept, "HOME": kept.get("TMPDIR", "/tmp"), "HF_HUB_OFFLINE": "1"}


def take_user() -> int:
    """Return the number of a user for an adapter's code, or 0 if we may not choose one.

    Adapters only share a user if all users are taken. With 0 the code runs as the server's user,
    and the server protects its own memory and environment.
    """
    if not _may_choose():
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        return 0
    candidates = itertools.islice(_next_users, len(_USERS))
    user = next((user for user in candidates if user not in _in_use), None) or next(_next_users)
    _in_use.add(user)
    return user


def return_user(user: int) -> None:
    _in_use.discard(user)


def _may_choose() -> bool:
    """Whether we may start processes as other users, and end them."""
    if os.geteuid() != 0:
        return False
    with Path("/proc/self/status").open() as status:
        (held,) = (int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return all(held >> bit & 1 for bit in (_CAP_KILL, _CAP_SETGID, _CAP_SETUID))


def give_up(user: int, folders: Iterable[Path]) -> Mapping[Path, Path]:
    """Become another user permanently, without a way to gain rights.

    user: its number, which is also its group's, or 0 to stay the same user, if the server may not
    change users. Returns the new path of each folder. Files under a folder that only root may
    enter, such as /root, are accessed by a descriptor that was opened before. With Landlock, all
    other such files are inaccessible. The same applies to the folders of imported modules. Raises
    OSError if there cannot be such a user.
    """
    needed = [str(folder) for folder in folders]
    places = sorted(filter(os.path.isdir, {*needed, *sys.path}))
    opened = {place: os.open(place, os.O_PATH | os.O_DIRECTORY) for place in places}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if user:
        resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # If root stays root: no effective, permitted or inheritable capabilities for this thread.
    library.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
    moved = {}
    for place, number in [*opened.items()]:
        moved[place] = place
        if user and not os.access(place, os.R_OK | os.X_OK):
            moved[place] = f"/proc/self/fd/{number}"
        else:
            os.close(opened.pop(place))
    _enter_domain([*opened.values()])
    _import_from(moved)
    return {Path(place): Path(moved.get(place, place)) for place in needed}


def end_with_parent() -> None:
    """Make the kernel kill this process with the server. A change of user resets that."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def landlock() -> int:
    """Return the kernel's version of Landlock, or 0."""
    version: int = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, 1)
    return max(version, 0)


def _enter_domain(folders: Sequence[int]) -> None:
    """Enter a Landlock domain: the process can only read the memory of itself and its children and,
    from version 6 on, only signal these.

    This thread must be the only one. folders: descriptors of folders that this user cannot access
    by a path. They must not lead outside by "..". So the domain only allows all paths that any user
    can access, and these folders. Without folders the domain only forbids making block devices,
    because a domain must forbid something.
    """
    version = landlock()
    if not version:
        return
    library = ctypes.CDLL(None, use_errno=True)
    rules = (ctypes.c_uint64 * 3)(_MAKE_BLOCK | (_USE if folders else 0), 0, _SIGNALS_AND_SOCKETS)
    ruleset = library.syscall(_CREATE_RULESET, rules, 24 if version >= _SCOPES else 8, 0)

    def allow(descriptor: int, access: int) -> None:
        rule = struct.pack("=Qi", access, descriptor)
        if library.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0):
            raise OSError(ctypes.get_errno(), "landlock_add_rule")

    for folder in folders:
        allow(folder, _USE & ~_WRITE_FILE)
    for path, access in _within_reach([Path(f"/proc/self/fd/{it}").readlink() for it in folders]):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
            allow(descriptor, access)
            os.close(descriptor)
    library.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _within_reach(folders: Sequence[Path]) -> Iterator[tuple[str, int]]:
    """Yield all allowed paths with their rights: all paths, except those in the closed parents of
    the folders.

    Landlock has no exceptions, so each entry of a folder on the way is named. Entries that are made
    later are inaccessible.
    """
    ways = ((*reversed(folder.parents), folder) for folder in folders)
    firsts = (next((it for it in way if not os.access(it, os.X_OK)), None) for way in ways)
    closed = {first for first in firsts if first}
    waiting = [Path("/")] if folders else []
    while waiting:
        with contextlib.suppress(PermissionError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink() or path in closed:
                    continue
                if any(path in it.parents for it in closed):
                    waiting.append(path)
                else:
                    yield entry.path, _USE if entry.is_dir() else _USE & ~_READ_DIR


def _import_from(moved: Mapping[str, str]) -> None:
    """Make Python find modules, and the rest of already imported packages, at their new paths."""
    sys.path[:] = [moved.get(entry, entry) for entry in sys.path]
    for module in [*sys.modules.values()]:
        if path := getattr(module, "__path__", None):
            module.__path__ = [_moved(entry, moved) for entry in path]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()


def _moved(path: str, moved: Mapping[str, str]) -> str:
    roots = (root for root in moved if Path(path).is_relative_to(root))
    root = max(roots, key=len, default=None)
    return path if root is None else moved[root] + path[len(root) :]
