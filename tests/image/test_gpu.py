# SPDX-License-Identifier: Apache-2.0
"""The image for GPUs on a machine without one: NVIDIA's driver is missing, or a stand-in."""

import json

import pytest

from tests.image.conftest import ROOT, engine, once
from tests.rehearsal.test_no_gpu import NO_GPU, OLD, TOO_OLD
from tests.rehearsal.test_parts import PARTS
from tools.rehearsal import stand_ins
from tools.rehearsal.cases import MACHINES

SCRIPTS = f"--volume={ROOT}/tools/rehearsal:/rehearsal:ro"


@pytest.fixture(scope="module", autouse=True)
def _is_for_gpus():
    if engine() == "cpu":
        pytest.skip("this is the image for CPUs")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Flags that mount the stand-ins where some platforms mount NVIDIA's driver."""
    folder = tmp_path_factory.mktemp("driver")
    stand_ins.build(folder)
    folder.chmod(0o755)

    def flags(gpus):
        mounted = f"--volume={folder}:/usr/local/nvidia/lib64:ro"
        return (mounted, f"--env={stand_ins.GPUS}={gpus.variable}")

    return flags


def failed(*flags):
    """The reason in the last line of a server that does not start."""
    ended = once("serve", flags=flags)
    last = json.loads(ended.stderr.splitlines()[-1])
    assert (ended.returncode, last["stage"], last["message"]) == (3, "start", "failed")
    return last["reason"]


def test_a_server_without_a_driver_ends_at_once_and_says_why(model):
    assert failed(model).startswith(NO_GPU)


def test_a_server_with_an_old_driver_does_not_start(model, driver):
    assert failed(model, *driver(OLD)).startswith(TOO_OLD)


def test_plan_works_without_a_driver(model):
    ended = once("plan", flags=(model,))
    assert ended.returncode == 0, ended.stderr
    assert NO_GPU in ended.stdout


def test_plan_shows_the_gpus(model, driver):
    ended = once("plan", flags=(model, *driver(MACHINES["8xH100"])))
    assert ended.returncode == 0, ended.stderr
    assert "8 x NVIDIA H100 80GB HBM3" in ended.stdout
    assert "no GPU is visible" not in ended.stdout


def test_cudas_compatibility_libraries_are_used_where_they_are(tmp_path):
    """Users bring them: mounted, or copied into their own images."""
    (tmp_path / "libcuda.so.580.95.05").touch()
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.580.95.05")
    for name, line in (("nvidia-smi", "echo 535.161.08"), ("show", "echo $LD_LIBRARY_PATH")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    tmp_path.chmod(0o755)
    compat, driver = "/usr/local/cuda/compat", "/usr/local/nvidia"
    mounts = (f"--volume={tmp_path}:{place}:ro" for place in (compat, f"{driver}/bin"))
    ended = once("serve", flags=(*mounts, f"--env=SLIPWAY_PYTHON={driver}/bin/show"))
    assert ended.stdout == f"{compat}:{driver}/lib:{driver}/lib64\n"


@pytest.mark.timeout(1200)
def test_what_vllm_and_lmcache_load_of_ours_can_be_imported(driver):
    """With vLLM's CUDA build in the image, and eight stand-ins for GPUs."""
    question = json.dumps({"imports": PARTS})
    judge = f"echo '{question}' | python3 -P /rehearsal/judge.py"
    flags = (SCRIPTS, "--env=PYTHONPATH=/opt/slipway", *driver(MACHINES["8xH100"]))
    ended = once("bash", "-c", judge, flags=flags, timeout=900)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert json.loads(ended.stdout) == {"platform": "NvmlCudaPlatform", "failed": {}}


@pytest.mark.timeout(1800)
def test_kernels_are_compiled():
    """Triton and FlashInfer compile them, with the image's own compilers and CUDA, on a read-only
    root.
    """
    flags = (SCRIPTS, "--read-only", "--tmpfs=/tmp:exec")
    ended = once("python3", "/rehearsal/kernels.py", flags=flags, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    made = json.loads(ended.stdout.splitlines()[-1])
    assert made["found"]
    assert made["triton"] > 1000
    assert made["flashinfer"] > 10_000
