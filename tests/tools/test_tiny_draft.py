# SPDX-License-Identifier: Apache-2.0
"""Drafts of the tiny model, in the formats of EAGLE's authors and of the library speculators."""

import json
from pathlib import Path

import pytest

from lmi_config.facts.draft import faults, look
from lmi_config.facts.model import Folder
from lmi_config.facts.model import look as look_at_model
from tests.support.models import tiny, tiny_draft

SAVED = json.loads(Path(__file__).with_name("speculators_head.json").read_text())
"""An EAGLE-3 head for the tiny model as the library speculators 0.9.0 has saved it."""


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle", {}),
        ("eagle3", {}),
        ("eagle3", {"vocabulary": 1024, "speculators": True}),
    ],
    ids=["eagle", "eagle3", "reduced speculators"],
)
def test_the_plan_takes_what_is_written(method, options):
    draft = look(Folder(tiny_draft.make(method, **options)))
    assert draft.method == method
    assert faults(draft, look_at_model(Folder(tiny.make())), 3) == []
    assert draft.tokens == (tiny_draft.DEPTH if options else None)


def test_the_format_of_speculators_is_what_the_library_saves():
    from safetensors import safe_open

    out = tiny_draft.make("eagle3", vocabulary=1024, speculators=True)
    with safe_open(out / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    found = {name: [it.get_dtype(), it.get_shape()] for name, it in slices.items()}
    assert found == SAVED["tensors"]
    config = json.loads((out / "config.json").read_text())
    saved = json.loads(json.dumps(SAVED["config"]))
    layer, saved_layer = (it.pop("transformer_layer_config") for it in (config, saved))
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        assert layer[name] == saved_layer[name]
    del config["speculators_config"]["verifier"]["name_or_path"]
    del saved["speculators_config"]["verifier"]["name_or_path"]
    defaults = {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    config["speculators_config"]["proposal_methods"][0].update(defaults)
    assert config.items() <= saved.items()


def test_a_head_that_the_library_has_saved_is_taken(tmp_path):
    from safetensors.torch import save_file
    from torch import bfloat16, int64, zeros
    from torch import bool as boolean

    kinds = {"BF16": bfloat16, "BOOL": boolean, "I64": int64}
    tensors = {
        name: zeros(shape, dtype=kinds[kind]) for name, (kind, shape) in SAVED["tensors"].items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SAVED["config"]))
    draft = look(Folder(tmp_path))
    assert (draft.method, draft.tokens) == ("eagle3", 3)
    assert draft.architecture == "Eagle3LlamaForCausalLM"
    assert faults(draft, look_at_model(Folder(tiny.make())), None) == []
