# SPDX-License-Identifier: Apache-2.0
"""Drafts trained for a Llama of a few thousand numbers, which takes a second or two each."""

import json
from pathlib import Path

import pytest

from lmi_config.facts.draft import faults, look
from lmi_config.facts.model import Folder
from lmi_config.facts.model import look as look_at_model
from scripts.models import tiny

FEW = {"steps": 3, "length": 16, "prompt": 8, "batch": 2, "depth": 2}
SAVED = json.loads(Path(__file__).with_name("speculators_head.json").read_text())
"""An EAGLE-3 head for the tiny model as the library speculators 0.9.0 has saved it."""


@pytest.fixture(scope="module")
def train():
    """Imported where it is used: it brings torch, which takes seconds."""
    from scripts.eagle import train

    return train


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The tiny model's tokenizer, with a model that is smaller still."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("target")
    AutoTokenizer.from_pretrained(tiny.make()).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("A draft guesses what the model writes, and the model looks. " * 40)
    return file


@pytest.fixture(scope="module")
def few(text):
    return FEW | {"text": [text]}


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"method": "eagle"}, "eagle"),
        ({"method": "eagle3"}, "eagle3"),
        ({"method": "eagle3", "draft_vocab": 64}, "eagle3"),
        ({"method": "eagle3", "draft_vocab": 64, "speculators": True}, "eagle3"),
        ({"method": "eagle3", "speculators": True, "generated": True}, "eagle3"),
    ],
    ids=["eagle", "eagle3", "reduced", "reduced speculators", "speculators"],
)
def test_the_plan_takes_what_is_written(train, target, few, tmp_path, options, method):
    out = train.train(target, tmp_path / "draft", **few, **options)
    draft = look(Folder(out))
    assert draft.method == method
    assert faults(draft, look_at_model(Folder(target)), 3) == []
    assert draft.tokens == (2 if options.get("speculators") else None)
    assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors"}


def test_the_format_of_speculators_is_what_the_library_saves(train, tmp_path, few):
    from safetensors import safe_open

    options = few | {"steps": 1, "draft_vocab": 1024, "speculators": True, "text": [], "depth": 3}
    out = train.train(tiny.make(), tmp_path / "draft", method="eagle3", **options)
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


def test_the_reduced_vocabulary_is_that_of_the_text(train, target, few, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    out = train.train(target, tmp_path / "draft", method="eagle3", draft_vocab=8, **few)
    tensors = load_file(out / "model.safetensors")
    kept = [index + offset for index, offset in enumerate(tensors["d2t"].tolist())]
    ids = AutoTokenizer.from_pretrained(target)(few["text"][0].read_text()).input_ids
    assert set(kept) < set(ids)
    assert tensors["t2d"].nonzero().flatten().tolist() == kept
    assert str(tensors["d2t"].dtype) == "torch.int64"


@pytest.mark.parametrize("generated", [False, True])
def test_the_same_arguments_make_the_same_weights(train, target, few, tmp_path, generated):
    options = few | {"method": "eagle", "generated": generated}
    one = train.train(target, tmp_path / "one", **options)
    assert weights(train.train(target, tmp_path / "two", **options)) == weights(one)
    other = train.train(target, tmp_path / "other", **options | {"seed": 1})
    assert weights(other) != weights(one)


def test_a_draft_of_the_models_own_last_words_repeats_them(train, target):
    """How an EAGLE draft begins: each of its tokens is the one that the target has just written."""
    import torch

    model = train.Target(target, eagle3=False)
    torch.manual_seed(0)
    draft = train.Draft(model)
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat([torch.zeros(32, 32), torch.eye(32)], -1))
        ids = torch.randint(2, 4096, (2, 12))
        features, logits = model.look(ids)
        for states in draft(ids, features[:, :-1], 3):
            torch.testing.assert_close(draft.logits(states), logits[:, :-1])


def test_a_chain_of_drafts_is_what_one_draft_after_the_other_makes(train, target):
    """The drafts after all tokens of a text at once, and those after one token as vLLM makes them:
    the text up to it, and then a token at a time behind it."""
    import torch

    model = train.Target(target, eagle3=True)
    torch.manual_seed(0)
    draft = train.Draft(model)
    ids = torch.randint(2, 4096, (1, 12))
    features, _ = model.look(ids)
    with torch.no_grad():
        at_once = [*draft(ids, features[:, :-1], 3)]
        for after in (0, 4, 8):
            hidden = draft.fc(features[:, : after + 1])
            for step in range(3):
                length = after + 1 + step
                embeds = model.embed(ids[:, 1 : 1 + length]).float()
                rotary = draft.rotary(embeds, torch.arange(length)[None])
                states, made = draft._step(embeds, hidden, rotary, [])
                torch.testing.assert_close(states[:, -1], at_once[step][:, after])
                hidden = torch.cat([hidden, made[:, -1:]], 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config.json is not there"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'.*name a model with model_type llama"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "has 2 layers.*--method eagle"),
    ],
)
def test_other_models_are_refused(train, tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(train.Refused, match=message):
        train.train(tmp_path, tmp_path / "draft", method="eagle3")
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eagle2"}, "'eagle2'.*eagle or eagle3"),
        ({"method": "eagle", "speculators": True}, "--method eagle3"),
        ({"method": "eagle", "draft_vocab": 64}, "--method eagle3"),
        ({"method": "eagle3", "steps": 0}, "1 or more"),
        ({"method": "eagle3", "length": 18, "prompt": 16}, "--length is 18.* 20 "),
        ({"method": "eagle3", "draft_vocab": 5000}, "5000.* 4096 tokens"),
    ],
)
def test_options_that_do_not_fit_are_refused(train, target, tmp_path, options, message):
    with pytest.raises(train.Refused, match=message):
        train.train(target, tmp_path / "draft", **options)
    assert not (tmp_path / "draft").exists()


def test_folders_of_something_else_and_short_texts_are_refused(train, target, tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(train.Refused, match="name another folder"):
        train.train(target, tmp_path, method="eagle", **FEW)
    with pytest.raises(train.Refused, match="too short"):
        train.train(target, tmp_path / "draft", method="eagle", text=[tmp_path / "notes"], **FEW)
