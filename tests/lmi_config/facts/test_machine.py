# SPDX-License-Identifier: Apache-2.0
import shutil
import socket
from pathlib import Path

import pytest

from lmi_config.facts.machine import HELPERS, look

GIB = 1024**3


def tree(root, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:       16777216 kB\nMemAvailable:   12582912 kB\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"
GROUPS = "proc/self/cgroup"


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({}, 16 * GIB),
        ({GROUPS: "0::/\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ({GROUPS: "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 16 * GIB),
        ({GROUPS: "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        # A limit above the host's memory, as version 1 writes "none".
        ({GROUPS: "5:memory:/\n", f"{V1}/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, 16 * GIB),
        ({GROUPS: "5:memory:/d/1\n", f"{V1}/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ({GROUPS: "5:memory:/d/1\n", f"{V1}/d/1/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        (
            {
                GROUPS: "5:memory:/d\n4:cpu:/d\n0::/\n",
                f"{V1}/d/memory.limit_in_bytes": f"{3 * GIB}\n",
                f"{V1}/memory.limit_in_bytes": f"{8 * GIB}\n",
            },
            3 * GIB,
        ),
        # Limits on cgroups above: a systemd slice, or Docker's --cgroup-parent.
        (
            {
                GROUPS: "0::/a.slice/b.slice/c.scope\n",
                f"{V2}/a.slice/b.slice/c.scope/memory.max": "max\n",
                f"{V2}/a.slice/b.slice/memory.max": "max\n",
                f"{V2}/a.slice/memory.max": f"{4 * GIB}\n",
            },
            4 * GIB,
        ),
        (
            {
                GROUPS: "5:memory:/a/b/c\n",
                f"{V1}/a/b/c/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                f"{V1}/a/memory.limit_in_bytes": f"{5 * GIB}\n",
            },
            5 * GIB,
        ),
        # ... and a container that does not see the limit's cgroup.
        (
            {
                GROUPS: "5:memory:/not/mounted\n",
                f"{V1}/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                f"{V1}/memory.stat": f"cache 0\nhierarchical_memory_limit {6 * GIB}\n",
            },
            6 * GIB,
        ),
        (
            {
                GROUPS: "0::/a\n",
                f"{V2}/a/memory.max": f"{8 * GIB}\n",
                f"{V2}/a/memory.high": f"{7 * GIB}\n",
            },
            7 * GIB,
        ),
        ({GROUPS: "0::/\n", f"{V2}/memory.max": "max\n", f"{V2}/memory.high": "max\n"}, 16 * GIB),
    ],
)
def test_memory_is_the_containers(tmp_path, files, memory):
    assert look({}, root=tree(tmp_path, files)).memory == memory


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 12 * GIB),
        ({GROUPS: "0::/\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        (
            {
                GROUPS: "0::/\n",
                "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
            },
            GIB + GIB // 2,
        ),
        (
            {
                GROUPS: "5:memory:/\n",
                f"{V1}/memory.limit_in_bytes": f"{2 * GIB}\n",
                f"{V1}/memory.usage_in_bytes": f"{3 * GIB}\n",
            },
            0,
        ),
        (  # the cgroup above us also has others
            {
                GROUPS: "0::/a/b\n",
                f"{V2}/a/b/memory.max": f"{2 * GIB}\n",
                f"{V2}/a/b/memory.current": "0\n",
                f"{V2}/a/memory.max": f"{4 * GIB}\n",
                f"{V2}/a/memory.current": f"{3 * GIB}\n",
            },
            GIB,
        ),
    ],
)
def test_free_memory_is_what_may_still_be_used(tmp_path, files, free):
    assert look({}, root=tree(tmp_path, files)).memory_free == free


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({GROUPS: "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({GROUPS: "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                GROUPS: "4:cpu,cpuacct:/d\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                GROUPS: "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        (
            {
                GROUPS: "0::/a/b/c\n",
                f"{V2}/a/b/c/cpu.max": "max 100000\n",
                f"{V2}/a/b/cpu.max": "400000 100000\n",
                f"{V2}/a/cpu.max": "200000 100000\n",
            },
            2,
        ),
        (
            {
                GROUPS: "4:cpu:/a/b\n",
                "sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_the_cpu_quota(tmp_path, files, quota):
    assert look({}, root=tree(tmp_path, files)).cpu_quota == quota


def test_the_disk_is_the_one_that_the_folder_will_be_on(tmp_path):
    disk = look({}, str(tmp_path / "not" / "yet")).disk
    free = shutil.disk_usage(tmp_path)
    assert (disk.path, disk.total) == (str(tmp_path / "not" / "yet"), free.total)
    assert 0 < disk.free <= free.free + GIB
    assert not list(tmp_path.iterdir())


def test_a_file_system_in_memory_is_known_by_its_mount(tmp_path):
    mounts = f"1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {tmp_path} rw - tmpfs tmpfs rw\n"
    found = look({}, str(tmp_path), tree(tmp_path / "root", {"proc/self/mountinfo": mounts})).disk
    assert (found.kind, found.in_memory) == ("tmpfs", True)


def test_o_direct_is_tried():
    # Kernels refuse it at different steps; if it can be opened, it works.
    refuses = look({}, "/proc").disk
    assert not refuses.direct


def test_ports_are_none_that_an_outgoing_connection_may_take():
    """A cache server once found its port taken, and the server ran without tiers."""
    range_ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    found = look({}).ports
    assert len(found) == len(set(found)) == HELPERS
    assert max(found) < int(range_.split()[0])


@pytest.mark.parametrize(
    ("range_", "ports"), [("11001-11009", (11001, 11002, 11003)), ("11001-11002", (11001, 11002))]
)
def test_ports_are_in_sagemakers_range(range_, ports):
    assert look({"SAGEMAKER_SAFE_PORT_RANGE": range_}).ports == ports


def test_a_port_that_is_taken_is_left_out():
    with socket.create_server(("127.0.0.1", 11012)):
        assert look({"SAGEMAKER_SAFE_PORT_RANGE": "11011-11019"}).ports == (11011, 11013, 11014)


def test_ports_are_found_without_a_range():
    assert len(set(look({}).ports)) == 3
