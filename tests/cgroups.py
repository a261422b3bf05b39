# SPDX-License-Identifier: Apache-2.0
"""Real memory limits, on machines that let the tests make them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def limited(memory: int) -> Iterator[Path]:
    """A separate memory cgroup with a limit in bytes; a process enters it by cgroup.procs."""
    first = Path("/sys/fs/cgroup/memory")
    version_1 = first.is_dir()
    group = (first if version_1 else first.parent) / f"slipway-{os.getpid()}-{memory}"
    try:
        group.mkdir()
        limit = "memory.limit_in_bytes" if version_1 else "memory.max"
        (group / limit).write_text(str(memory))
    except OSError as error:
        pytest.skip(f"memory cgroups cannot be made here: {error}")
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def killed(group: Path) -> int:
    """How many processes the kernel has killed in a group because its memory was full."""
    files = [group / name for name in ("memory.events", "memory.oom_control")]
    table = next(file for file in files if file.exists()).read_text()
    return int(dict(line.split() for line in table.splitlines()).get("oom_kill", 0))
