"""What the machine, or the container on it, really has. look() is the only place that asks."""

import dataclasses
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """cpus: ids of the CPUs that we may use; memory: bytes; gpus: how many are visible."""

    cpus: tuple[int, ...]
    memory: int
    gpus: int


def look(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Look at the machine. `root` stands before /proc and /sys, which tests bring along."""
    return Machine(
        cpus=tuple(sorted(os.sched_getaffinity(0))), memory=_memory(root), gpus=_gpus(environ)
    )


def _memory(root: Path) -> int:
    """The container's memory limit in bytes, or the host's memory where that is less.

    A process sees its own cgroup at the mount's top when the container has a cgroup namespace, and
    under the path in /proc/self/cgroup when it has none. Either file may be missing. Lines of that
    file are `id:controllers:path`, with no controllers for version 2 (cgroups(7)).
    """
    total = next(
        int(line.split()[1]) * 1024
        for line in (root / "proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    limits = [total]
    mounts = {"": ("sys/fs/cgroup", "memory.max")}
    mounts["memory"] = ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in mounts:
            continue
        mount, file = mounts[controllers]
        for folder in (root / mount / path.strip("/"), root / mount):
            try:
                limits.append(int((folder / file).read_text()))
            except (OSError, ValueError):  # no such file, or "max"
                continue
    return min(limits)


def _gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs CUDA would show a process with this environment."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    present = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    if visible is None:
        return present
    return min(present, len([device for device in visible.split(",") if device.strip()]))
