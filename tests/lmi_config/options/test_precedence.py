# SPDX-License-Identifier: Apache-2.0
"""Contradictions between command line, environment and files: the documentation's table."""

import itertools
import re
from pathlib import Path

import pytest

from lmi_config.options import arguments
from lmi_config.options.settings import read

ROOT = Path(__file__).parents[3]
PLACES = re.findall(
    r"^\| (.+?) \|",
    (ROOT / "docs/start/configure.md").read_text().partition("| place |")[2].partition("\n\n")[0],
    re.MULTILINE,
)[1:]
"""The first column of the documentation's table, in its order."""
GIVERS: dict[str, dict[str, str]] = {
    "the command line": {"port": "--port", "model_id": "--model", "tensor": "-tp"},
    "`SAGEMAKER_*`": {"port": "SAGEMAKER_BIND_TO_PORT"},
    "`slipway.yaml`": {"port": "port", "model_id": "model_id", "tensor": "tensor_parallel_degree"},
    "`serving.properties`": {
        "port": "option.port",
        "model_id": "option.model_id",
        "tensor": "option.tensor_parallel_degree",
    },
    "`HF_*`": {"model_id": "HF_MODEL_ID"},
    "`OPTION_*`": {
        "port": "OPTION_PORT",
        "model_id": "OPTION_MODEL_ID",
        "tensor": "OPTION_TENSOR_PARALLEL_DEGREE",
    },
    "other names": {"tensor": "TENSOR_PARALLEL_DEGREE"},
}
"""Each place of the table: the options that the test sets there, and their names in that place."""


PAIRS = [
    (first, second, option)
    for first, second in itertools.combinations(PLACES, 2)
    for option in sorted(GIVERS[first].keys() & GIVERS[second].keys())
]


@pytest.mark.parametrize(("first", "second", "option"), PAIRS)
def test_the_first_of_two_places_in_the_table_counts(tmp_path, first, second, option):
    environ = {"SERVING_MODEL_STORE": str(tmp_path)}
    words: list[str] = []
    (tmp_path / "config.json").touch()
    for place, value in ((first, "1"), (second, "2")):
        name = GIVERS[place][option]
        if place == "the command line":
            words += [name, value]
        elif place in ("`slipway.yaml`", "`serving.properties`"):
            line = f"{name}: '{value}'" if place == "`slipway.yaml`" else f"{name}={value}"
            (tmp_path / place.strip("`")).write_text(line)
        else:
            environ[name] = value
    found = read(environ, arguments.read("serve", words))
    values = found.port, found.model_id, found.tensor_parallel_degree
    assert "1" in map(str, values)
    assert "2" not in map(str, values)
    if {first, second} != {"`slipway.yaml`", "`serving.properties`"}:
        assert any("comes first" in note for note in found.notes)
