# SPDX-License-Identifier: Apache-2.0
"""The GPU engine on a machine that cannot run it."""

import json
import subprocess
from dataclasses import replace

import pytest

from tests.rehearsal.conftest import PYTHON, ROOT, environment
from tools.rehearsal.cases import MACHINES

HERE = MACHINES["1xA10G"]
OLD = replace(HERE, driver="535.161.08", cuda=12020)
NO_GPU = "no GPU is visible: there is no NVIDIA driver here"
TOO_OLD = "driver 535.161.08 (CUDA 12.2) is older than CUDA 13.0 wants (580)"


def run(libraries, gpus, *words, **more):
    assert PYTHON
    environ = environment(libraries, gpus) | {"OPTION_LOAD_FORMAT": "dummy", **more}
    return subprocess.run(
        [PYTHON, "-P", "-m", "serving", *words],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("gpus", "environ", "reason"),
    [
        (None, {}, NO_GPU),
        (OLD, {}, TOO_OLD),
        (HERE, {"CUDA_VISIBLE_DEVICES": "3"}, "no GPU is visible: CUDA_VISIBLE_DEVICES='3' shows"),
    ],
    ids=["no driver", "an old driver", "none visible"],
)
def test_serve_ends_at_once_and_says_why(libraries, models, gpus, environ, reason):
    ended = run(libraries, gpus, "serve", str(models / "fp8"), "--port=8123", **environ)
    last = json.loads(ended.stderr.splitlines()[-1])
    assert (ended.returncode, last["stage"]) == (3, "start"), ended.stderr
    assert last["reason"].startswith(reason)
    assert "vllm" not in {
        json.loads(it)["logger"].split(".")[0] for it in ended.stderr.splitlines()
    }


def test_plan_works_there(libraries, models):
    ended = run(libraries, None, "plan", str(models / "fp8"))
    assert ended.returncode == 0, ended.stderr
    assert NO_GPU in ended.stdout
