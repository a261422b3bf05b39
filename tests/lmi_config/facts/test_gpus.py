# SPDX-License-Identifier: Apache-2.0
"""GPUs as a stand-in for NVIDIA's driver describes them, and the results of `plan` and `serve`."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_config.facts.gpus import Gpu, look
from tools.rehearsal import shapes, stand_ins
from tools.rehearsal.cases import MACHINES

ROOT = Path(__file__).parents[3]
PLANS = Path(__file__).parent / "plans.txt"
SHOW = """
import dataclasses, json, os
from lmi_config.facts.gpus import look
print(json.dumps(dataclasses.asdict(look(os.environ))))
"""
ID = "00000000-0000-0000-0000-00000000000"
TWO = "2,NVIDIA H100,81559,9.0,580.65.06,13000,0,0"
SLICED = "1,NVIDIA H100,81559,9.0,580.65.06,13000,2,40448"
OLD = "1,NVIDIA A10G,23028,8.6,535.161.08,12020,0,0"
COMPATIBLE = "1,NVIDIA A10G,23028,8.6,535.161.08,13000,0,0"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler to make the stand-in for NVIDIA's driver with")
    folder = tmp_path_factory.mktemp("libraries")
    stand_ins.build(folder)
    return folder


@pytest.fixture(scope="module")
def cuda_build(tmp_path_factory):
    """A folder at the front of the path. It makes the installed vLLM a CUDA build."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "vllm-0.32.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n"
    (folder / "vllm-0.32.0.dist-info" / "METADATA").write_text(metadata)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    shapes.make(folder)
    return folder / "llama_70b"


def run(libraries, gpus, *words, site="", **environ):
    kept = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "OPTION_LOAD_FORMAT": "dummy"}
    driver = {"LD_LIBRARY_PATH": str(libraries), stand_ins.GPUS: gpus} if gpus else {}
    return subprocess.run(
        [sys.executable, "-P", *words],
        env={**kept, "PYTHONPATH": f"{site}:{ROOT}", **driver, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_each_gpu_is_known_by_its_identifier_and_node(libraries, tmp_path):
    for bus, node in ((0, 1), (1, -1)):
        folder = tmp_path / f"sys/bus/pci/devices/0000:0{bus}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    show = SHOW.replace("look(os.environ)", f"look(os.environ, Path({str(tmp_path)!r}))")
    told = run(libraries, TWO, "-c", "from pathlib import Path\n" + show).stdout
    found = [(gpu["uuid"], gpu["node"]) for gpu in json.loads(told)["shown"]]
    assert found == [(f"GPU-{ID}0", 1), (f"GPU-{ID}1", None)]


@pytest.mark.parametrize(
    ("visible", "others"),
    [
        (None, [f"MIG-{ID}1"]),
        (f"MIG-{ID}1,MIG-{ID}0", [f"MIG-{ID}0"]),
        (f"MIG-{ID}1", []),
        ("0", []),
    ],
)
def test_slices_that_another_process_could_have_are_known(libraries, visible, others):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    told = run(libraries, SLICED, "-c", SHOW, **environ).stdout
    assert [it["uuid"] for it in json.loads(told)["slices"]] == others


def shown(libraries, gpus, **environ):
    found = json.loads(run(libraries, gpus, "-c", SHOW, **environ).stdout)
    known = [gpu | {"capability": tuple(gpu["capability"])} for gpu in found["shown"]]
    return [Gpu(**gpu) for gpu in known], found["missing"]


H100 = Gpu(
    name="NVIDIA H100", memory=81559 << 20, driver="580.65.06", cuda=13000, capability=(9, 0)
)
SLICE = dataclasses.replace(H100, name="a slice of NVIDIA H100", memory=40448 << 20, slice=True)


@pytest.mark.parametrize(
    ("gpus", "visible", "found"),
    [
        (TWO, None, [H100, H100]),
        (TWO, "1", [H100]),
        (TWO, "1,0", [H100, H100]),
        (TWO, "0,7,1", [H100]),
        (TWO, f"GPU-{ID}1", [H100]),
        (TWO, "GPU-0", [H100]),
        (SLICED, None, [SLICE]),
        (SLICED, "0", [SLICE]),
        (SLICED, f"MIG-{ID}1", [SLICE]),
        (SLICED, f"MIG-{ID}0,MIG-{ID}1", [SLICE]),
    ],
)
def test_gpus_are_those_that_cuda_would_show(libraries, gpus, visible, found):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert shown(libraries, gpus, **environ) == (found, "")


@pytest.mark.parametrize(
    ("gpus", "visible", "missing"),
    [
        (TWO, "", "CUDA_VISIBLE_DEVICES='' shows none of this machine's (GPUs 0 to 1)"),
        (TWO, "-1", "CUDA_VISIBLE_DEVICES='-1' shows none of this machine's (GPUs 0 to 1)"),
        (TWO, "2", "CUDA_VISIBLE_DEVICES='2' shows none of this machine's (GPUs 0 to 1)"),
        (OLD, "GPU-f", "CUDA_VISIBLE_DEVICES='GPU-f' shows none of this machine's (GPU 0)"),
        ("0,none,0,9.0,580.65.06,13000,0,0", "0", "the NVIDIA driver shows no GPU"),
        ("not a machine", "0", "the NVIDIA driver does not answer: Driver Not Loaded"),
    ],
)
def test_why_there_is_none(libraries, gpus, visible, missing):
    assert shown(libraries, gpus, CUDA_VISIBLE_DEVICES=visible) == ([], missing)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a driver here")
def test_without_a_driver_devices_are_told_from_none(tmp_path):
    assert look({}, tmp_path).missing == "there is no NVIDIA driver here"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert look({}, tmp_path).missing == (
        "/dev/nvidia0 is there, but not the driver's libnvidia-ml.so.1; set "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    )


NO_GPU = "no GPU is visible: there is no NVIDIA driver here"
TOO_OLD = "driver 535.161.08 (CUDA 12.2) is older than CUDA 13.0 wants (580)"


@pytest.mark.parametrize(
    ("gpus", "why"), [("", NO_GPU), (OLD, TOO_OLD)], ids=["no driver", "an old driver"]
)
def test_the_cuda_build_does_not_start_without_what_it_needs(
    libraries, cuda_build, model, gpus, why
):
    words = ("-m", "serving", "serve", str(model), "--port=8123")
    ended = run(libraries, gpus, *words, site=cuda_build)
    last = json.loads(ended.stderr.splitlines()[-1])
    assert (ended.returncode, last["stage"], last["message"]) == (3, "start", "failed")
    assert last["reason"].startswith(why)
    assert "docker run --gpus all" in last["fix"]


@pytest.mark.parametrize("gpus", ["", OLD, MACHINES["8xH100"].variable])
def test_plan_works_without_them_and_says_so(libraries, cuda_build, model, gpus):
    ended = run(libraries, gpus, "-m", "serving", "plan", str(model), site=cuda_build)
    assert ended.returncode == 0, ended.stderr
    told = {"": NO_GPU, OLD: TOO_OLD}.get(gpus, "8 x NVIDIA H100 80GB HBM3")
    assert told in ended.stdout


@pytest.mark.parametrize("machine", MACHINES)
def test_what_plan_shows_of_a_machines_gpus(libraries, model, machine):
    ended = run(libraries, MACHINES[machine].variable, "-m", "serving", "plan", str(model))
    rows = ended.stdout.partition("\ndevices")[2].partition("\nmemory")[0].splitlines()
    parts = (part.partition("\n") for part in PLANS.read_text().split("\n\n"))
    recorded = {name: shown.splitlines() for name, _, shown in parts}
    assert [" ".join(row.split()) for row in rows] == recorded[machine]


EIGHT = "8,NVIDIA H100,81559,9.0,580.65.06,13000,0,0"


@pytest.mark.parametrize(
    ("gpus", "visible", "degree", "copies"),
    [
        (EIGHT, None, "2", ["0 1", "2 3", "4 5", "6 7"]),
        (EIGHT, "4,5,6,7", "2", ["4 5", "6 7"]),
        (EIGHT, f"GPU-{ID}6,GPU-{ID}1", "1", ["6", "1"]),
        (EIGHT, "0,1,2", "2", []),
        (SLICED, None, "1", ["0", "1"]),
        (SLICED, f"MIG-{ID}1", "1", []),
    ],
)
def test_copies_divide_the_gpus_that_a_mask_shows(libraries, model, gpus, visible, degree, copies):
    environ = {"OPTION_TENSOR_PARALLEL_DEGREE": degree}
    if visible:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    words = ("-m", "serving", "plan", str(model), "--json")
    ended = run(libraries, gpus, *words, **environ)
    found = json.loads(ended.stdout).get("copies", [])
    assert [" ".join(gpu[-1] for gpu in copy["gpus"]) for copy in found] == copies


def test_forward_compatibility_makes_an_old_driver_do(libraries, cuda_build, model):
    ended = run(libraries, COMPATIBLE, "-m", "serving", "plan", str(model), site=cuda_build)
    assert "older than" not in ended.stdout


def test_the_cpu_build_needs_no_gpu(libraries, model):
    ended = run(libraries, "", "-m", "serving", "plan", str(model))
    assert "GPU" not in ended.stdout
