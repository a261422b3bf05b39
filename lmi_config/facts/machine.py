# SPDX-License-Identifier: Apache-2.0
"""The resources of the machine, or of the container on it. Only look() reads them."""

import contextlib
import dataclasses
import errno
import fcntl
import mmap
import os
import random
import re
import socket
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath

from lmi_config.facts import gpus
from lmi_config.facts.gpus import Gpu

PAGE = 4096
"""O_DIRECT reads and writes multiples of these bytes; no disk's block is larger."""

KV = "slipway-kv"
"""The disk tier's subfolder of its configured folder. No file outside of it is ever changed."""
LOCK = ".lock"
"""The lock file. That of the subfolder is held while caches in it change owners. That of a cache is
held by the servers that use it. A folder without the file was not made by us."""
_SHARED, _ALONE = fcntl.LOCK_SH | fcntl.LOCK_NB, fcntl.LOCK_EX | fcntl.LOCK_NB
_CACHE = re.compile(r"[0-9a-f]{16}")  # a fingerprint
_KV_FILE = re.compile(r".*@0x.*\.(data|tmp)")  # the file names of LMCache's client

OPTIONAL = (
    *("arctic_inference", "fastsafetensors", "instanttensor", "modelexpress", "nixl", "ray"),
    *("runai_model_streamer", "tensorizer"),
)
"""Modules that vLLM only imports for some options."""

_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 for "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """A folder's file system. free, total: bytes; direct: whether O_DIRECT works there.

    KV caches in the folder that a server would remove count as free.
    """

    path: str
    kind: str
    free: int
    total: int
    direct: bool

    @property
    def in_memory(self) -> bool:
        return self.kind in ("tmpfs", "ramfs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The available resources.

    cpus: ids of the CPUs that we may use; cpu_quota: the limit of CPU time, in CPUs, or None.
    memory: the bytes of memory, the container's limit or the host's memory, whichever is less;
    limited: whether it is a container's limit. memory_free: its unused bytes. shm: free bytes of
    /dev/shm. disk: the disk of the disk tier's folder. slices: further slices of GPUs, for other
    processes. nodes: the number of each NUMA node, and those of its CPUs that this process may use;
    empty if there is only one node, or if unknown. no_gpu: why there is no GPU. built_for_cuda:
    whether the installed vLLM needs GPUs. ports: free ports on the loopback interface, for helper
    processes. missing: modules of OPTIONAL that are not installed although vLLM is. extended:
    whether other packages extend vLLM.
    """

    cpus: tuple[int, ...]
    cpu_quota: float | None
    memory: int
    memory_free: int
    limited: bool
    shm: int
    disk: Disk
    gpus: tuple[Gpu, ...]
    ports: tuple[int, ...]
    slices: tuple[Gpu, ...] = ()
    nodes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    no_gpu: str = ""
    built_for_cuda: bool = False
    missing: tuple[str, ...] = ()
    extended: bool = False


HELPERS = 3
"""Number of the cache server's ports: see kv_tiers.Ports."""


def look(
    environ: Mapping[str, str], disk: str = "/tmp", root: Path = Path("/"), servers: int = 0
) -> Machine:
    """Read the machine's resources.

    disk: the folder of the disk tier, which need not exist yet. root: a prefix of /proc and /sys,
    for tests. servers: the number of further servers that need ports, beside one per GPU.
    """
    memory, free, limited = _memory(root)
    found = gpus.look(environ, root)
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    more = max(servers, len(found.shown) + len(found.slices))
    return Machine(
        cpus=cpus,
        cpu_quota=_cpu_quota(root),
        memory=memory,
        memory_free=free,
        limited=limited,
        shm=_free(Path("/dev/shm"))[0],
        disk=_disk(Path(disk), root),
        gpus=found.shown,
        ports=free_ports(environ, HELPERS + more),
        slices=found.slices,
        nodes=_nodes(root, cpus),
        no_gpu=found.missing,
        built_for_cuda=gpus.vllm_wants_them(),
        missing=_missing(),
        extended=any(
            it.dist and not it.dist.name.startswith("vllm")
            for it in entry_points(group="vllm.general_plugins")
        ),
    )


def _missing() -> tuple[str, ...]:
    """Return the modules of OPTIONAL that are missing; none without vLLM, because such a plan is
    for another machine, whose installation is unknown.
    """
    if not PathFinder.find_spec("vllm"):
        return ()
    return tuple(it for it in OPTIONAL if not PathFinder.find_spec(it))


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield folders that may have a controller's files, with their cgroup version: of our cgroup
    and of all its parents, whose limits also apply.

    If the container has a cgroup namespace, a process sees its own cgroup at the mount's top.
    Otherwise it is under the path in /proc/self/cgroup. Lines of that file are
    `id:controllers:path`, without controllers for version 2 (cgroups(7)).
    """
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, mount = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        own = PurePosixPath(path.strip("/"))
        for part in (own, *own.parents):
            yield version, mount / part


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or it has "max"."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _table(path: Path) -> dict[str, int]:
    """Read a file with a name and a number in each line. Returns name → number."""
    try:
        rows = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _memory(root: Path) -> tuple[int, int, bool]:
    """Return the bytes of memory, its free bytes, and whether a container limits it.

    A cgroup's usage includes file pages. The kernel drops inactive ones before it kills a process,
    so they count as free (memory.stat, `inactive_file`). Above memory.high, processes are throttled
    until they hardly run. In version 1, memory.stat has the lowest limit of all parent cgroups,
    also of those that a container does not see (`hierarchical_memory_limit`).
    """
    host = _table(root / "proc/meminfo")
    total = host["MemTotal"] * 1024
    memory, free = total, host.get("MemAvailable", host["MemTotal"]) * 1024
    for version, group in _groups(root, "memory"):
        statistics = _table(group / "memory.stat")
        if version == 2:
            limits = [_number(group / "memory.max"), _number(group / "memory.high")]
            used, idle = _number(group / "memory.current"), statistics.get("inactive_file", 0)
        else:
            limits = [
                _number(group / "memory.limit_in_bytes"),
                statistics.get("hierarchical_memory_limit"),
            ]
            used = _number(group / "memory.usage_in_bytes")
            idle = statistics.get("total_inactive_file", 0)
        limit = min(limit for limit in (*limits, _NO_LIMIT) if limit is not None)
        if limit >= _NO_LIMIT:
            continue
        memory = min(memory, limit)
        free = min(free, limit - max((used or 0) - idle, 0))
    return memory, max(min(free, memory), 0), memory < total


def out_of_memory_kills(root: Path = Path("/")) -> int | None:
    """Return the number of processes that the kernel has killed because the container was out of
    memory; None if no file has it (`oom_kill` in memory.events, in version 1 memory.oom_control).
    """
    for version, group in _groups(root, "memory"):
        file = group / ("memory.events" if version == 2 else "memory.oom_control")
        if (found := _table(file).get("oom_kill")) is not None:
            return found
    return None


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for version, group in _groups(root, "cpu"):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            words = " ".join((group / file).read_text() for file in files).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:  # -1 is "none" in version 1
            quotas.append(quota / period)
    return min(quotas, default=None)


def _existing(path: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    path = path.absolute()
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


def _free(path: Path) -> tuple[int, int]:
    """Return the bytes that an unprivileged user may still write, and all bytes."""
    try:
        found = os.statvfs(_existing(path))
    except OSError:
        return 0, 0
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _disk(path: Path, root: Path) -> Disk:
    free, total = _free(path)
    free += reclaimable(path)
    existing = _existing(path)
    direct = os.access(existing, os.W_OK) and _direct(existing)
    return Disk(path=str(path), kind=_kind(existing, root), free=free, total=total, direct=direct)


def reclaimable(path: Path) -> int:
    """Return the bytes of earlier servers' KV caches, below the folder of the disk tier.

    It is 0 while a server makes room there.
    """
    found = 0
    with contextlib.suppress(OSError), kv_folder(path) as home, locked(home, _SHARED):
        for _, folder in unused_caches(home):
            found += sum(file.st_blocks * 512 for file in kv_files(folder).values())
    return found


@contextlib.contextmanager
def kv_folder(path: Path) -> Iterator[int]:
    """Yield the disk tier's subfolder of `path`, as a descriptor.

    Raises OSError if it is missing, a link, or belongs to another user.
    """
    with _opened(path / KV, os.O_RDONLY | os.O_DIRECTORY) as home:
        owner = os.fstat(home).st_uid
        if owner != os.geteuid():
            raise PermissionError(errno.EPERM, f"belongs to user {owner}", str(path / KV))
        yield home


@contextlib.contextmanager
def locked(folder: int, how: int) -> Iterator[int]:
    """Hold a folder's lock in the block. how: as for flock(2).

    Raises OSError if it is missing or held by another process.
    """
    with _opened(LOCK, os.O_RDWR, folder) as lock:
        fcntl.flock(lock, how)
        yield lock


def unused_caches(home: int) -> Iterator[tuple[str, int]]:
    """Yield the caches in the disk tier's subfolder that no server holds: name and descriptor. Each
    is locked until the next one. Other entries of the folder are ignored.
    """
    for name in sorted(os.listdir(home)):
        if _CACHE.fullmatch(name):
            with (
                contextlib.suppress(OSError),
                _opened(name, os.O_RDONLY | os.O_DIRECTORY, home) as folder,
                locked(folder, _ALONE),
            ):
                yield name, folder


def kv_files(folder: int) -> dict[str, os.stat_result]:
    """Return the KV files in a cache, by name. Other files do not count."""
    found = {}
    for name in os.listdir(folder):
        if _KV_FILE.fullmatch(name):
            with contextlib.suppress(OSError):
                file = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(file.st_mode):
                    found[name] = file
    return found


@contextlib.contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    """Open a file that is not a link. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_volume(path: Path, root: Path = Path("/")) -> bool:
    """Whether a folder, which need not exist yet, is on a file system that is mounted into the
    container and is not in memory. root: a prefix of /proc, for tests.
    """
    point, kind = _mount(path.absolute(), root)
    return point != "/" and kind not in ("unknown", "tmpfs", "ramfs")


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a file. kind: of the file system. cached: whether most of it is in memory."""

    kind: str
    cached: bool = False


SAMPLES = 16
"""Pages of a file that are looked for in the page cache."""


def place_of(file: Path, root: Path = Path("/")) -> Place:
    """Return the place of a file. Linux may read the SAMPLES from the disk afterwards.

    root: a prefix of /proc, for tests.
    """
    kind = _kind(file.absolute(), root)
    try:
        with file.open("rb") as content:
            size = os.fstat(content.fileno()).st_size
            there = sum(
                _in_memory(content.fileno(), size * number // SAMPLES) for number in range(SAMPLES)
            )
    except OSError:
        return Place(kind)
    return Place(kind, cached=there >= SAMPLES / 2)


def _in_memory(file: int, at: int) -> bool:
    """Whether the page cache has the page of a file with the byte `at`."""
    try:
        return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) > 0
    except OSError:  # it has not, or the file system cannot tell
        return False


def _kind(path: Path, root: Path) -> str:
    """The kind of a folder's file system."""
    return _mount(path, root)[1]


def _mount(path: Path, root: Path) -> tuple[str, str]:
    """The longest mount point above a folder, and its kind of file system (proc(5), mountinfo)."""
    found = ("", "unknown")
    mounts = root / "proc/self/mountinfo"
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, after.split()[0])
    return found


def _direct(folder: Path) -> bool:
    """Whether O_DIRECT works in a folder, by a test write."""
    with mmap.mmap(-1, PAGE) as page:  # O_DIRECT needs page-aligned memory
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".slipway-") as file:
                opened = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
                try:
                    return os.write(opened, page) == PAGE
                finally:
                    os.close(opened)
        except OSError:
            return False


def _nodes(root: Path, cpus: Collection[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """NUMA nodes and those of their CPUs in cpus, if several have any (`cpulist`: 0-15,32-47)."""
    found = []
    for file in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        try:
            ranges = [part.split("-") for part in file.read_text().strip().split(",") if part]
            own = {cpu for part in ranges for cpu in range(int(part[0]), int(part[-1]) + 1)}
        except (OSError, ValueError):
            return ()
        if own := own.intersection(cpus):
            found.append((int(file.parent.name.removeprefix("node")), tuple(sorted(own))))
    return tuple(sorted(found)) if len(found) > 1 else ()


def safe_ports(environ: Mapping[str, str]) -> range | None:
    """SageMaker's range of ports for helpers (`low-high`), or None if unset."""
    low, _, high = environ.get("SAGEMAKER_SAFE_PORT_RANGE", "").partition("-")
    return range(int(low), int(high) + 1) if low.isdigit() and high.isdigit() else None


QUIET_PORTS = range(10_000, 15_000)
"""Ports far below those of outgoing connections (ip_local_port_range in ip(7)): such a connection
could take a port before its program binds it.
"""


def free_ports(environ: Mapping[str, str], count: int) -> tuple[int, ...]:
    """Free ports on the loopback interface, in SageMaker's safe range if it is set."""
    wanted = safe_ports(environ) or random.sample(QUIET_PORTS, 1000)
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in wanted:
            if len(found) == count:
                break
            with contextlib.suppress(OSError):
                taken = held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(taken.getsockname()[1])
    return tuple(found)
