# SPDX-License-Identifier: Apache-2.0
"""A sweep with the real engine and vLLM's own benchmark, interrupted once."""

import json
import os
import re
import signal
import subprocess

import yaml

from tests.e2e.conftest import warm_python
from tests.support.harness.process import AS_ENTRYPOINT_SH, ROOT
from tests.support.harness.wait import until
from tests.support.models import tiny

WORKLOAD = {"isl": 32, "osl": 8, "concurrency": [2], "request_count": 8}


def test_a_sweep_goes_on_where_it_was_interrupted_and_writes_what_it_measured(tmp_path):
    file, results = tmp_path / "workload.yaml", tmp_path / "results"
    file.write_text(yaml.safe_dump(WORKLOAD))
    words = ["tune", str(tiny.make()), "--workload", str(file), "--results", str(results)]
    words += ["--max-model-len=512", "--slo-ttft-ms=60000", "--api-key=key-of-no-one"]
    python = ["-P", "-m", "serving"]
    command = [warm_python().executable(python), *python, *words]
    environ = {**os.environ, **AS_ENTRYPOINT_SH}
    sweep = results / "sweep.jsonl"

    with subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE) as first:
        until(lambda: sweep.exists() and len(sweep.read_text().splitlines()) == 2, 400)
        # Python ignores an interruption while it forks a process (PyOS_AfterFork_Parent).
        until(lambda: (results / "2.log").exists() and (results / "2.log").read_bytes())
        first.send_signal(signal.SIGINT)
        told = first.communicate(timeout=60)[0].decode()
    assert first.returncode == 130
    assert "goes on after 1 configuration\n" in told

    ended = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    points = [json.loads(line) for line in sweep.read_text().splitlines()[1:]]
    assert [it["options"] for it in points[:2]] == [{}, {"max_num_seqs": 1}]
    assert all(it["again"] for it in points[2:])  # if the other one was better
    for it in points:
        (level,) = it["levels"]
        assert level["requests"] == 8
        assert 0 < level["ttft_p50"] <= level["ttft_p99"]
        assert level["itl_p50"] > 0
        assert level["goodput"] > 0
    (number,) = re.findall(r"slipway\.yaml: (\d+), ", ended.stdout)
    written = yaml.safe_load((results / "slipway.yaml").read_text())
    assert written == yaml.safe_load((results / f"{number}.yaml").read_text())  # unchanged
    assert written["max_model_len"] == 512
    assert "key-of-no-one" not in "".join(it.read_text() for it in results.iterdir())
