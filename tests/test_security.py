"""docs/security.md: that every file and test it names is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## Threats")[2].splitlines()
    if line.startswith("| ")
][1:]


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
    from lmi_config.options import OPTIONS, vllm_options

    declared = {name for it in OPTIONS.values() for name in (*it.names, *it.others)}
    assert option in declared | {f"OPTION_{name.upper()}" for name in vllm_options()}
