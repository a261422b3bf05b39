# SPDX-License-Identifier: Apache-2.0
"""The classes that vLLM and LMCache load by their paths."""

import ast
import dataclasses
import importlib.util
from pathlib import Path
from typing import get_args

import pytest

from lmi_config.options.declared import LOAD_FORMATS
from serving.server.prepare import PARTS


@pytest.mark.parametrize("path", dataclasses.astuple(PARTS))
def test_every_part_is_where_the_plan_says(path):
    module, _, name = path.rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec
    assert spec.origin
    statements = ast.parse(Path(spec.origin).read_text()).body
    assert name in {each.name for each in statements if isinstance(each, ast.ClassDef)}


def test_the_load_formats_are_vllms():
    from vllm.model_executor.model_loader import LoadFormats

    assert {*LOAD_FORMATS} == {*get_args(LoadFormats)}
