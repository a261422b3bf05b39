# SPDX-License-Identifier: Apache-2.0
"""The compile cache on disk: opened and checked before vLLM is imported, listed once it is whole.

Compiled files are code. The server uses them only if this user and root alone can have written
them, and if they have not changed since they were listed. Otherwise it starts without the cache,
and the log gives the reason.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lmi_config.plan.compile_cache import MANIFEST, CompileCache, manifest
from serving.server.compile_cache_source import fill
from serving.sources.digests import Digests

log = logging.getLogger(__name__)

VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "CUDA_CACHE_PATH": "cuda",
}
"""The folders of vLLM 0.32 and of the compilers that it calls, each by its variable."""
PREPARED = Path(sys.prefix) / "share/slipway/modelinfos"
"""Answers about each architecture, from the image's build (serving.engine.model_infos)."""
LEAST_FREE = 2**30
"""Bytes that a compilation may need. vLLM does not start if its cache cannot be written."""
WAIT_S = 60.0
"""The longest check by another server that is waited for."""

_LOCK = ".lock"
_OF_MACHINE = "vllm/gpu_p2p_access_cache_for_*.json"
"""Facts about one machine's GPUs, which another machine must not read."""


class Untrusted(OSError):
    """Another user could have written this code."""


class Kept:
    """A server's part of the compile cache.

    environment: the variables that have vLLM use it; empty if it is not used.
    """

    def __init__(
        self,
        cache: CompileCache | None,
        limit: int,
        source: str | None = None,
        note: Callable[[str], None] = lambda _: None,
        least_free: int = LEAST_FREE,
    ) -> None:
        """Open the cache. limit: bytes that the folder may keep. source: of OPTION_CACHE_SOURCE.
        note: takes the progress of its download. least_free: bytes.
        """
        self._cache = cache
        self._limit = limit
        self._lock: int | None = None
        self._digests = Digests()  # an unchanged file is read once, and not for each list
        self.environment: dict[str, str] = {}
        if cache is None:
            return
        try:
            self._open(cache, source, note, least_free)
        except OSError as error:
            self.close()
            log.warning(
                "%s: compiled files are not kept in %s: %s", cache.origin, cache.folder, error
            )
            return
        self.environment = {name: str(cache.part / at) for name, at in VARIABLES.items()}

    def save(self) -> None:
        """List the files, so that the next start uses them."""
        if self._cache is None or self._lock is None:
            return
        part = self._cache.part
        try:
            listed = {
                str(file.relative_to(part)): (file.stat().st_size, self._digests.of(file))
                for file in _files(part)
            }
            if (size := sum(size for size, _ in listed.values())) > self._limit:
                (part / MANIFEST).unlink(missing_ok=True)
                log.warning(
                    "compiled files are not kept: %s has %d bytes; OPTION_CACHE_SIZE allows %d",
                    *(part, size, self._limit),
                )
                return
            new = part / f"{MANIFEST}.{os.getpid()}"
            new.write_text(json.dumps(listed))
            new.replace(part / MANIFEST)
        except OSError as error:
            log.warning("compiled files are not kept in %s: %s", part, error)

    def _open(
        self,
        cache: CompileCache,
        source: str | None,
        note: Callable[[str], None],
        least_free: int,
    ) -> None:
        """Raises OSError if the cache cannot or must not be used."""
        os.umask(os.umask(0o022) | 0o022)  # files made from here on are private
        cache.part.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (cache.folder.resolve(), cache.part):
            _require_private(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._lock = os.open(cache.part / _LOCK, flags, 0o600)
        if _locked(self._lock):
            _evict(cache, self._limit)
            if source and not (cache.part / MANIFEST).exists():
                _empty(cache.part)  # a start that was killed has left what it fetched
                try:
                    fill(source, cache, self._limit, note)
                except OSError as error:
                    log.warning("OPTION_CACHE_SOURCE: all is compiled here: %s", error)
            _require_unchanged(cache.part, self._digests)
            for file in cache.part.glob(_OF_MACHINE):
                file.unlink()
        else:
            for _ in _files(cache.part):
                pass
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        free = shutil.disk_usage(cache.part).free
        if free < least_free:
            raise OSError(f"{free} bytes are free, and compiling may need {least_free}")
        with contextlib.suppress(FileNotFoundError):
            os.utime(cache.part / MANIFEST)  # for _evict

    def close(self) -> None:
        """Let other servers check and remove the files."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def prepare_model_infos(environ: Mapping[str, str], prepared: Path = PREPARED) -> None:
    """Copy the image's model infos to vLLM's folder, except those that are already there.

    Without a model's info, vLLM imports its class in another process, for about 10 s of CPU time.
    """
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/tmp")) / ".cache"
    folder = Path(environ.get("VLLM_CACHE_ROOT") or Path(home) / "vllm") / "modelinfos"
    try:
        for file in prepared.glob("*.json"):
            if not (folder / file.name).exists():
                folder.mkdir(parents=True, exist_ok=True)
                new = folder / f"{file.name}.{os.getpid()}"
                shutil.copyfile(file, new)
                new.replace(folder / file.name)
    except OSError as error:
        log.warning("vLLM inspects the model's class again: %s", error)


def _locked(lock: int) -> bool:
    """Whether this server alone has the lock; else others share it with this one.

    Raises TimeoutError if another server keeps it for too long.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
                return kind == fcntl.LOCK_EX
        if time.monotonic() > deadline:
            raise TimeoutError(f"another server has locked it for {WAIT_S:g} s")
        time.sleep(0.1)


def _require_private(path: Path) -> None:
    """Raise Untrusted if a user other than this one and root has made a path or can write to it."""
    status = path.lstat()
    if status.st_uid not in (0, os.geteuid()):
        raise Untrusted(f"{path} belongs to user {status.st_uid}, and compiled files are code")
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if shared and not stat.S_ISLNK(status.st_mode):
        raise Untrusted(
            f"other users can write to {path}, and compiled files are code; `chmod -R go-w` it"
        )


def _files(part: Path) -> Iterator[Path]:
    """The generated files. Raises Untrusted for one that others could write, or that leads out."""
    for at, folders, names in os.walk(part):
        for path in (Path(at, name) for name in (*folders, *names)):
            with contextlib.suppress(FileNotFoundError):  # another server has just replaced it
                _require_private(path)
                if path.is_symlink() and not path.resolve().is_relative_to(part.resolve()):
                    raise Untrusted(f"{path} leads to {path.resolve()}")
                if stat.S_ISREG(path.stat().st_mode):
                    if path.parent != part or not path.name.startswith((MANIFEST, _LOCK)):
                        yield path
                elif not path.is_dir():
                    raise Untrusted(f"{path} is neither a file nor a folder")


def _require_unchanged(part: Path, digests: Digests) -> None:
    """Remove what the manifest does not list, and everything if a listed file has changed: the
    last server may have ended while it wrote. Raises Untrusted as _files() does.
    """
    there = [*_files(part)]
    listed = manifest(part) or {}
    for file in there:
        known = listed.get(str(file.relative_to(part)))
        if known is None:
            file.unlink(missing_ok=True)
        elif known != (file.stat().st_size, digests.of(file)):
            log.warning("%s has changed since it was listed: all is compiled again", file)
            _empty(part)
            return


def _empty(part: Path) -> None:
    for path in part.iterdir():
        if path.name == _LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _evict(cache: CompileCache, limit: int) -> None:
    """Remove other keys' parts that no server uses, the least recently used first, until the folder
    keeps at most `limit` bytes. Folders of other users stay.
    """
    parts = {}
    for part in cache.folder.iterdir():
        if part.is_dir() and not part.is_symlink() and part.lstat().st_uid == os.geteuid():
            used = part / MANIFEST if (part / MANIFEST).exists() else part
            parts[part] = (used.stat().st_mtime, _bytes(part))
    size = sum(each for _, each in parts.values())
    for part, (_, each) in sorted(parts.items(), key=lambda it: it[1][0]):
        if size <= limit:
            return
        if part != cache.part and (part / _LOCK).exists():
            lock = os.open(part / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(part)
                    size -= each
            finally:
                os.close(lock)


def _bytes(folder: Path) -> int:
    size = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += Path(at, name).lstat().st_size
    return size
