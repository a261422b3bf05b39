# SPDX-License-Identifier: Apache-2.0
"""Kernels that are normally compiled at their first use, compiled without a GPU."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.rehearsal.conftest import PYTHON, ROOT, environment


@pytest.mark.timeout(1800)
def test_kernels_are_compiled_with_what_the_wheels_bring(tmp_path):
    """No other CUDA is reachable: neither a toolkit of the machine's nor one on the path."""
    assert PYTHON
    (home,) = Path(PYTHON).parents[1].glob("lib/python3*/site-packages/nvidia/cu13")
    environ = environment(tmp_path, None) | {"HOME": str(tmp_path), "CUDA_HOME": str(home)}
    ended = subprocess.run(
        [PYTHON, "-P", str(ROOT / "tools" / "rehearsal" / "kernels.py")],
        env=environ | {"PATH": f"{Path(PYTHON).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    made = json.loads(ended.stdout.splitlines()[-1])
    assert made["found"]
    assert made["triton"] > 1000
    assert made["flashinfer"] > 10_000
