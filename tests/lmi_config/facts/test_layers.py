# SPDX-License-Identifier: Apache-2.0
"""The layers of current models: what vLLM keeps for them, and the plan for them.

Each row of models.json has a configuration, its source, and the layers that vLLM's own class builds
from it (tests/serving/engine/test_kv_groups_of_models.py runs vLLM to check that). Configurations
are cut to about 12 layers, and keep the pattern of the layers.
"""

import json
from pathlib import Path

import pytest

from lmi_config.facts.model import configuration, facts
from lmi_config.options.settings import read
from lmi_config.plan import plan
from lmi_config.plan.attention.verdict import HYBRID
from lmi_config.plan.kv_tiers import Tiers
from tests.lmi_config.examples import PARTS, machine
from tests.lmi_config.facts.test_model import Memory, encoded

MODELS = json.loads((Path(__file__).parent.parent / "models.json").read_text())
BUILT = [row for row in MODELS if isinstance(row["vllm"]["as it is"], dict)]
ONE = {"FullAttentionSpec": "full", "MLAAttentionSpec": "full", "SlidingWindowSpec": "windowed"}
ONE |= {"ChunkedLocalAttentionSpec": "chunked"}
LONGEST = 8192


def look(config):
    return facts(configuration(Memory({"config.json": encoded(config)})), {"a": 1 << 30})


def planned(config, gpus):
    model = look(config)
    environ = {"OPTION_LMCACHE_AUTO_CONFIG": "true"}
    if (model.max_length or 0) > LONGEST:
        environ["OPTION_MAX_MODEL_LEN"] = str(LONGEST)
    return plan.make(read(environ), machine(gpus), model, None, environ, PARTS)


def test_there_are_forty_and_most_can_be_built():
    assert len(MODELS) > 50
    assert len(BUILT) > 40


@pytest.mark.parametrize("row", BUILT, ids=[row["model"] for row in BUILT])
def test_layers_are_those_of_vllm(row):
    kept, layers = look(row["config"]).kept, row["vllm"]["as it is"]["layers"]
    names = {name for name, *_ in layers}
    assert kept.pooled is (row["vllm"]["as it is"]["runner"] == "pooling")
    assert kept.state is ("MambaSpec" in names)
    assert kept.cross is ("CrossAttentionSpec" in names)
    assert kept.latent is ("MLAAttentionSpec" in names)
    if kept.pooled or kept.state or kept.cross:
        return  # no tier is right for them, whatever else they keep
    assert not kept.unknown
    assert not kept.foreign
    count = dict.fromkeys(ONE.values(), 0)
    for name, *_, each in layers:
        count[ONE[name]] += each
    assert {name: getattr(kept, name) for name in count} == count
    assert kept.shapes == {(heads, size) for _, heads, size, *_ in layers}
    # vLLM gives Cohere's windows one token more.
    windows = {window - (row["model"] == "cohere2") for *_, window, _ in layers if window}
    assert kept.windows == windows


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("row", BUILT, ids=[row["model"] for row in BUILT])
def test_tiers_are_planned_where_vllms_groups_allow_them(row, gpus):
    """One group of pages for every token; without a GPU, all layers must also be of one kind."""
    found = planned(row["config"], gpus)
    whole = found.options.get(HYBRID, False)
    vllms = row["vllm"]["whole" if whole or found.verdict.whole else "as it is"]
    layers = {name for name, *_ in vllms["layers"]} if isinstance(vllms, dict) else set()
    keeps_all = (
        layers
        and layers <= ONE.keys()
        and (whole or layers <= {"FullAttentionSpec", "MLAAttentionSpec"})
    )
    right = bool(keeps_all) and len(vllms["groups"]) == 1 and (gpus > 0 or vllms["groups"] == [1])
    if found.verdict.kind == "windows_only":
        longest = min(look(row["config"]).max_length, LONGEST)
        # The connector leaves out KV that has left the window, if anything ever does.
        right = not gpus or longest <= max(found.model.kept.windows)
    if found.model.kept.latent and not gpus:
        right = False  # vLLM does not look at KV that is there already
    assert isinstance(found.tiers, Tiers) is right, found.verdict


@pytest.mark.parametrize("row", BUILT, ids=[row["model"] for row in BUILT])
def test_layers_are_the_same_where_only_the_family_tells_them(row):
    """Models are published without layer_types if their class in transformers fills them in."""
    config = {name: value for name, value in row["config"].items() if name != "layer_types"}
    if row["model"] in ("granitemoehybrid", "laguna", "lfm2"):
        return  # no rule: each model has its own list
    was, now = look(row["config"]).kept, look(config).kept
    assert (now.windowed, now.chunked, now.windows) == (was.windowed, was.chunked, was.windows)
    assert now.state is was.state
