# SPDX-License-Identifier: Apache-2.0
"""docs/explanation/security.md: every file and test that it names exists."""

import ast
import functools
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.defences import DEFENCES
from tests.without_defences import outcomes

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "explanation" / "security.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## Threats")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| ")
][1:]


@functools.cache
def named_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {it.name for it in ast.walk(tree) if isinstance(it, kinds)}


@pytest.mark.parametrize(("threat", "_", "where", "tests"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_files_and_tests_that_exist(threat, _, where, tests):
    for name in re.findall("`([^`]+)`", where):
        assert (ROOT / name).is_file()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    assert len(named) == tests.count("`") / 2 > 0
    for file, test in named:
        assert test in named_in(ROOT / file), f"{file} has no {test}"


def test_all_of_the_table_was_read():
    assert len(ROWS) > 25
    assert all(len(row) == 4 for row in ROWS)


@pytest.mark.parametrize("option", re.findall(r"`((?:OPTION|SERVING|SAGEMAKER)_[A-Z_]+)", PAGE))
def test_an_option_that_it_names_exists(option):
    from lmi_config.options.declared import OPTIONS, vllm_options

    declared = {name for it in OPTIONS.values() for name in it.all_names}
    assert option in declared | {f"OPTION_{name.upper()}" for name in vllm_options()}


_IMAGE = "it is in the image, and tests/image looks at it"
BEYOND_PATCHING: Mapping[str, str] = {
    "Stack traces in errors": "they are vLLM's own, and tests/e2e has it make some",
    "Requests that the engine's step cannot do": "tests/e2e asks a real engine for all of them",
    "Root user, writable root file system": _IMAGE,
    "Leftovers in the image": _IMAGE,
}
"""Threats whose defence no patch can remove, and why."""


def test_each_defence_names_its_test():
    threats = {row[0]: row[3] for row in ROWS}
    assert threats.keys() == DEFENCES.keys() | BEYOND_PATCHING.keys()
    for threat, removed in DEFENCES.items():
        assert f"`{removed.test.partition('[')[0]}`" in threats[threat], threat


@pytest.mark.nightly
def test_each_defence_has_a_test_that_fails_without_it(tmp_path):
    found = outcomes(tmp_path / "outcomes.json")
    assert [threat for threat, failed in found.items() if not failed] == []
