# SPDX-License-Identifier: Apache-2.0
"""Compares tests/lmi_config/models.json with the results of vLLM's own classes for the same
configurations. After a new pin of vLLM or transformers, `UPDATE=1` writes the file again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
FILE = ROOT / "tests" / "lmi_config" / "models.json"


@pytest.mark.nightly
def test_vllms_classes_keep_what_is_written_down():
    rows = json.loads(FILE.read_text())
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.engine.kv_specs"],
        input=json.dumps([row["config"] for row in rows]),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if os.environ.get("UPDATE"):
        for row, vllms in zip(rows, found, strict=True):
            row["vllm"] = vllms
        FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    for row, vllms in zip(rows, found, strict=True):
        for name, was in row["vllm"].items():
            # The test does not compare why a model cannot be built here.
            assert vllms[name] == was or isinstance(was, str), (row["model"], name)


@pytest.mark.nightly
def test_architectures_are_those_of_the_pinned_vllm():
    from tools.generate import vllm_models

    assert vllm_models.PATH.read_text() == vllm_models.text()
