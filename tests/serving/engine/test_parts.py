# SPDX-License-Identifier: Apache-2.0
"""The classes that vLLM and LMCache load by their paths."""

import ast
import dataclasses
import importlib.util
from pathlib import Path
from typing import get_args

import pytest

from lmi_config.facts.draft import SEEING_WITH_EAGLE3, SEEING_WITHOUT_EAGLE
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


def test_what_entrypoint_sh_sets_keeps_vllm_and_lmcache_from_counting(monkeypatch):
    from lmcache.usage_telemetry.identity import is_usage_tracking_enabled
    from vllm.usage import usage_lib

    for value in ("0", "1"):
        monkeypatch.setenv("DO_NOT_TRACK", value)
        monkeypatch.setattr(usage_lib, "_USAGE_STATS_ENABLED", None)
        counts = value == "0"
        assert (usage_lib.is_usage_stats_enabled(), is_usage_tracking_enabled()) == (counts, counts)


def test_the_load_formats_are_vllms():
    from vllm.model_executor.model_loader import LoadFormats

    assert {*LOAD_FORMATS} == {*get_args(LoadFormats)}


def test_the_vision_models_that_vllm_runs_with_eagle3():
    # By its sources: the import of each model takes long, and needs packages that are missing here.
    spec = importlib.util.find_spec("vllm.model_executor.models")
    assert spec
    assert spec.origin
    models = Path(spec.origin).parent
    bases: dict[str, set[str]] = {}
    registered: dict[str, str] = {}
    for file in models.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(it).split("[")[0].split(".")[-1] for it in node.bases}
                bases.setdefault(node.name, set()).update(names)
    for node in ast.walk(ast.parse((models / "registry.py").read_text())):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    registered[str(key.value)] = ast.literal_eval(value.elts[-1])

    def has(name: str, base: str) -> bool:
        return base in bases.get(name, ()) or any(has(it, base) for it in bases.get(name, ()))

    seeing = {it: cls for it, cls in registered.items() if has(cls, "SupportsMultiModal")}
    ending = "ForConditionalGeneration"
    assert {it for it in seeing if it.endswith(ending) and has(seeing[it], "SupportsEagle3")} == {
        f"{it}{ending}" for it in SEEING_WITH_EAGLE3
    }


def test_the_vision_models_that_vllm_does_not_run_with_eagle():
    import transformers

    spec = importlib.util.find_spec("vllm.v1.spec_decode.llm_base_proposer")
    assert spec
    assert spec.origin
    loads = Path(spec.origin).read_text()
    assert "target_model.config.image_token_index" in loads
    for it in SEEING_WITHOUT_EAGLE:
        assert f'"{it}ForConditionalGeneration"' not in loads
        assert not hasattr(getattr(transformers, f"{it}Config")(), "image_token_index")
