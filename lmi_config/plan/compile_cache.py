# SPDX-License-Identifier: Apache-2.0
"""The compile cache: the folder of graphs, kernels and profiles that a start generates."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from lmi_config.facts.gpus import Gpu
from lmi_config.facts.machine import is_volume

MANIFEST = "manifest.json"
"""Lists the files of a finished start, in the part of the folder that belongs to a key."""
LARGEST_MANIFEST = 64 * 2**20
"""Bytes: far more than the lines of a hundred thousand files."""

_PACKAGES = ("torch", "vllm", "triton", "flashinfer-python")
"""Packages whose versions are part of the key: they generate files, or are in them."""
_BESIDE = "slipway-compile-cache"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileCache:
    """The folder that keeps generated files between starts.

    folder: the folder, shared by all keys. key: names this server's part of it. origin: the option
    that decides. seen: whether a start with this key has finished before. size: bytes that it left.
    """

    folder: Path
    key: str
    origin: str
    seen: bool = False
    size: int = 0

    @property
    def part(self) -> Path:
        """The part of the folder that belongs to this key."""
        return self.folder / self.key


def look(
    folder: str | None,
    downloads: Mapping[str, str],
    gpus: tuple[Gpu, ...],
    origin: str = "",
    root: Path = Path("/"),
) -> CompileCache | None:
    """Return the compile cache; None if generated files end with the container.

    folder: of OPTION_CACHE_FOLDER, with `origin` as the name that set it. Without it, the files go
    beside downloaded models, if those are on a volume. downloads: the folders of downloads that the
    operator has named, by the options' names. root: a prefix of /proc, for tests.
    """
    found = {origin: folder} if folder else {}
    if not folder:
        volumes = {name: path for name, path in downloads.items() if is_volume(Path(path), root)}
        found = {name: f"{path}/{_BESIDE}" for name, path in list(volumes.items())[:1]}
    for name, path in found.items():
        cache = CompileCache(folder=Path(path), key=key(gpus), origin=name)
        listed = manifest(cache.part)
        if listed is None:
            return cache
        size = sum(size for size, _ in listed.values())
        return dataclasses.replace(cache, seen=True, size=size)
    return None


def key(gpus: tuple[Gpu, ...]) -> str:
    """16 hex digits that differ between users, kinds of GPUs, drivers' major versions, and versions
    of the packages that generate files.
    """
    kinds = sorted({(gpu.name, gpu.driver.partition(".")[0]) for gpu in gpus})
    facts = [os.geteuid(), kinds, {name: _version(name) for name in _PACKAGES}]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def manifest(part: Path) -> dict[str, tuple[int, str]] | None:
    """The files of a finished start: size in bytes and SHA-256 by path; None if unreadable."""
    try:
        with (part / MANIFEST).open("rb") as file:
            return msgspec.json.decode(file.read(LARGEST_MANIFEST), type=dict[str, tuple[int, str]])
    except (OSError, msgspec.DecodeError):
        return None
