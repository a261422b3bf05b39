# SPDX-License-Identifier: Apache-2.0
"""The tables of CPU time and the budget: each test runs pytest in a separate process."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.harness.process import ROOT

STARTS = (
    "import subprocess, sys\n\n\ndef test_it():\n    subprocess.run([sys.executable, '-c', ''])\n"
)


@pytest.mark.parametrize(
    ("processes", "budget", "code"), [(2, ["--budget=0"], 1), (0, ["--budget=10000"], 0)]
)
def test_the_cost_of_each_folder_and_the_budget(tmp_path, processes, budget, code):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_it.py").write_text(STARTS)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--import-mode=importlib"]
    command += ["-p", "xdist", "-p", "tests.durations", f"-n{processes}"]
    command += [f"--rootdir={tmp_path}", str(tmp_path), *budget]
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to import
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    tables = ended.stdout.partition("CPU time by folder")[2]
    row = r"^ +[\d.]+ s +[\d.]+ s on the clock +(\d+)  (\S+)$"
    assert sorted(re.findall(row, tables, re.MULTILINE)) == [
        ("0", "collection"),
        ("1", "one"),
        ("1", "one/test_it.py"),
        ("1", "two"),
        ("1", "two/test_it.py"),
    ]
    assert ("Over the budget" in tables) == bool(code)
