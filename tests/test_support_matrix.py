# SPDX-License-Identifier: Apache-2.0
"""docs/reference/support_matrix.md: each cell equals the plan's verdict, and its tests exist."""

import re
from pathlib import Path

import pytest

from lmi_config.facts.machine import Machine
from lmi_config.options import settings
from lmi_config.options.settings import SettingsError
from lmi_config.plan import plan
from tests.lmi_config.examples import PARTS, machine, model
from tests.test_security import named_in

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/reference/support_matrix.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.partition("## Clients")[0].splitlines()
    if line.startswith("|") and line.count("|") == 8
][2:]
CPU, ONE, SEVERAL = machine(), machine(gpus=1), machine(gpus=4)
COLUMNS: tuple[tuple[Machine, dict[str, str]], ...] = (
    (CPU, {}),
    (ONE, {}),
    (SEVERAL, {}),
    (SEVERAL, {"OPTION_NNODES": "2"}),
)


def refused(here, environ):
    try:
        plan.make(settings.read(environ), here, model(), None, environ, PARTS)
    except SettingsError:
        return True
    return False


@pytest.mark.parametrize(
    ("feature", "options", "cells"), [(row[0], row[1], row[2:6]) for row in ROWS]
)
def test_a_cell_is_refused_where_the_plan_fails(feature, options, cells):
    given = dict(re.findall(r"`([A-Z_0-9]+)=([^`]+)`", options))
    assert bool(given) == bool(options)
    for (here, more), cell in zip(COLUMNS, cells, strict=True):
        environ = {"OPTION_MODEL_ID": "some/model", **given, **more}
        assert refused(here, environ) == (cell == "refused"), (feature, environ)
        assert cell in ("tested", "passed on", "refused")


@pytest.mark.parametrize(("cells", "tests"), [(row[2:6], row[6]) for row in ROWS])
def test_what_is_tested_names_tests_that_exist(cells, tests):
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    assert bool(named) == ("tested" in cells)
    for file, test in named:
        assert test in named_in(ROOT / file), f"{file} has no {test}"
