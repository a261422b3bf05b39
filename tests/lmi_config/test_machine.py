import pytest

from lmi_config.machine import look

GIB = 1024**3


def tree(root, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "sys/fs/cgroup/memory"
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
    ],
)
def test_memory_is_the_containers(tmp_path, files, memory):
    assert look({}, tree(tmp_path, files)).memory == memory


@pytest.mark.parametrize(("visible", "gpus"), [(None, 2), ("0", 1), ("0,1", 2), ("", 0)])
def test_gpus_are_the_visible_ones(tmp_path, monkeypatch, visible, gpus):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H100 (UUID: a)'\necho 'GPU 1: H100 (UUID: b)'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert look(environ).gpus == gpus


def test_without_nvidia_smi_there_are_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look({}).gpus == 0
