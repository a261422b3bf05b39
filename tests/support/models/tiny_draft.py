# SPDX-License-Identifier: Apache-2.0
"""Make EAGLE and EAGLE-3 drafts for the tiny Llama, as vLLM 0.32 loads them.

They are not trained. EAGLE guesses the target's last token again. EAGLE-3 continues from the
hidden state before the target's last layer with that layer, its norm and its head. Some of their
tokens are right, which is all that tests need. The names of tensors are those of
vllm/model_executor/models/llama_eagle.py and llama_eagle3.py.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.models import tiny
from tests.support.models.cache import cache, kept

DEPTH = 3
"""Tokens to draft, in the format of speculators."""
_ONE_LAYER = {"num_hidden_layers": 1, "tie_word_embeddings": False}


def make(method: str, *, vocabulary: int | None = None, speculators: bool = False) -> Path:
    """Return the folder of a draft, which is made once.

    method: `eagle` or `eagle3`. vocabulary: the number of tokens that an EAGLE-3 draft can guess,
    or None for all. speculators: write an EAGLE-3 draft in the format of the library speculators
    0.9, otherwise in the format of EAGLE's authors.
    """
    name = "-".join(
        ("tiny-draft", method, str(vocabulary or "all"), "s" if speculators else "e", "1")
    )
    write = partial(_write, eagle3=method == "eagle3", size=vocabulary, speculators=speculators)
    return kept(cache() / name, write)


def _write(folder: Path, eagle3: bool, size: int | None, speculators: bool) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    target = tiny.make()
    config = json.loads((target / "config.json").read_text())
    weights = load_file(target / "model.safetensors")
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    last = f"model.layers.{layers - 1}."
    read = [layers - 3, layers - 2, layers - 1] if eagle3 else []
    select = torch.eye(hidden)
    beside = torch.zeros(hidden, hidden)
    made = {"fc.weight": torch.cat([*[beside] * (max(len(read), 2) - 1), select], -1)}
    for whole, weight in weights.items():
        if whole.startswith(last):
            made["layers.0." + whole.removeprefix(last)] = weight
    if eagle3:
        for it in "qkv":  # they read the token's embedding first, and then the hidden state
            name = f"layers.0.self_attn.{it}_proj.weight"
            made[name] = torch.cat([torch.zeros_like(made[name]), made[name]], -1)
        made["layers.0.hidden_norm.weight"] = made["layers.0.input_layernorm.weight"].clone()
        kept_ids = torch.arange(0, tiny.VOCABULARY, tiny.VOCABULARY // size if size else 1)
        made["norm.weight"] = weights["model.norm.weight"]
        made["lm_head.weight"] = weights["lm_head.weight"][kept_ids]
        if size:
            made["d2t"] = kept_ids - torch.arange(size)
            made["t2d"] = torch.isin(torch.arange(tiny.VOCABULARY), kept_ids)
    else:
        del made["layers.0.input_layernorm.weight"]
        for it in ("self_attn.o_proj", "mlp.down_proj"):
            made[f"layers.0.{it}.weight"].zero_()
    if not eagle3 or speculators:
        made["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    else:
        made = {name.replace("layers.0.", "midlayer."): it for name, it in made.items()}
    dtype = weights["model.norm.weight"].dtype
    tensors = {
        name: (it.to(dtype) if it.is_floating_point() else it).contiguous()
        for name, it in made.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = _config(config | _ONE_LAYER, read, size or tiny.VOCABULARY, speculators)
    (folder / "config.json").write_text(json.dumps(told, indent=2) + "\n")


def _config(
    layer: dict[str, Any], read: list[int], vocabulary: int, speculators: bool
) -> dict[str, Any]:
    """read: the layers that EAGLE-3 reads; none for EAGLE."""
    if not read:
        return layer
    reads = {"draft_vocab_size": vocabulary, "eagle_aux_hidden_state_layer_ids": read}
    if not speculators:
        return layer | reads | {"architectures": ["LlamaForCausalLMEagle3"]}
    return reads | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "dtype": layer["dtype"],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DEPTH}],
            "verifier": {"name_or_path": "tiny", "architectures": layer["architectures"]},
        },
    }
