# SPDX-License-Identifier: Apache-2.0
"""The reports in docs/upstream still hold for the installed versions. If one no longer holds, its
defence in serving/engine/patches may be superfluous. Each reproduction imports vLLM, which takes
seconds, so these tests run nightly.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "upstream"


@pytest.mark.nightly
@pytest.mark.parametrize("report", sorted(FOLDER.glob("*.md")), ids=lambda it: it.stem)
def test_a_reports_reproduction_prints_what_it_says(report):
    (expected,) = re.findall(r"```text\n(.*?)```", report.read_text(), re.DOTALL)
    script = [sys.executable, str(report.with_suffix(".py"))]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, check=True)
    assert expected in done.stdout
