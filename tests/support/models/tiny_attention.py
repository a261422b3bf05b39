# SPDX-License-Identifier: Apache-2.0
"""Make a tiny random model of one kind of attention, for tests and comparisons of KV cache tiers.

Its greedy answer changes with an early token of the prompt, as far as attention reaches: its
weights are wider than those of a model for training. It has 32 bits, and is kept in the user's
cache.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.models.cache import cache, kept
from tests.support.models.tiny import VOCABULARY
from tests.support.models.tiny import make as make_full

VERSION = 5  # change the number when the models change
POSITIONS = 8192
WINDOW = 64
"""The tokens within the window of a layer."""
LAYERS = 4
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LORA_MODULES = {"q_proj": (128, 128), "v_proj": (128, 64), "down_proj": (256, 128)}
"""Input and output sizes of the modules that an adapter of tiny_lora changes."""
_MIXED = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def _full(t: Any) -> Any:
    return t.LlamaForCausalLM(t.LlamaConfig(**_SHAPE))


def _windows(t: Any) -> Any:
    return t.MistralForCausalLM(t.MistralConfig(**_SHAPE, sliding_window=WINDOW))


def _windows_and_full(t: Any, window: int = WINDOW) -> Any:
    shape = _SHAPE | {"num_hidden_layers": len(_MIXED)}
    config = t.Gemma3TextConfig(
        **shape, sliding_window=window, query_pre_attn_scalar=32, layer_types=_MIXED
    )
    return t.Gemma3ForCausalLM(config)


def _chunks_and_full(t: Any) -> Any:
    config = t.Llama4TextConfig(
        **_SHAPE,
        attention_chunk_size=4 * WINDOW,  # of whole blocks
        intermediate_size_mlp=256,
        num_local_experts=2,
        num_experts_per_tok=1,
        moe_layers=[],
        interleave_moe_layer_step=0,
        no_rope_layers=[1, 1, 1, 0],
    )
    return t.Llama4ForCausalLM(config)


def _heads_that_differ(t: Any) -> Any:
    config = t.Gemma4TextConfig(
        **_SHAPE | {"num_hidden_layers": len(_MIXED)},
        sliding_window=WINDOW,
        layer_types=_MIXED,
        global_head_dim=64,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=0,
    )
    return t.Gemma4ForCausalLM(config)


def _latent(t: Any) -> Any:
    """The latent has DeepSeek's width, which vLLM's CPU kernel requires."""
    shape = {k: v for k, v in _SHAPE.items() if k not in ("head_dim", "num_key_value_heads")}
    config = t.DeepseekV2Config(
        **shape,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=LAYERS,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
    )
    return t.DeepseekV2ForCausalLM(config)


def _state(t: Any) -> Any:
    config = t.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=LAYERS,
        state_size=16,
        num_heads=8,
        head_dim=32,
        expand=2,
        n_groups=1,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return t.Mamba2ForCausalLM(config)


def _state_and_full(t: Any) -> Any:
    config = t.FalconH1Config(
        **_SHAPE,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
    )
    return t.FalconH1ForCausalLM(config)


KINDS: dict[str, Callable[..., Any]] = {
    "full": _full,
    "windows": _windows,
    "windows_and_full": _windows_and_full,
    "chunks_and_full": _chunks_and_full,
    "heads_that_differ": _heads_that_differ,
    "latent": _latent,
    "state": _state,
    "state_and_full": _state_and_full,
}


def _attend_to_what_is_far(model: Any) -> None:
    """Give attention more weight beside the last token, and make the scores of tokens differ."""
    gemma = model.config.model_type.startswith("gemma")
    factors: dict[str, float] = {"q_proj": 2, "v_proj": 3, "kv_b_proj": 3, "o_proj": 3}
    if gemma:  # it would normalise the scaled values
        factors = {"embed_tokens": 0.1}
    for name, weight in model.named_parameters():
        part = name.split(".")[-2]
        if part in factors:
            weight.data.mul_(factors[part])
        if gemma and part in ("q_norm", "k_norm"):
            weight.data.fill_(1)
        if gemma and name == "model.norm.weight":
            weight.data.fill_(10)


def write(kind: str, folder: Path, **more: int) -> None:
    import torch
    import transformers

    transformers.AutoTokenizer.from_pretrained(make_full()).save_pretrained(folder)
    torch.manual_seed(0)
    model = KINDS[kind](transformers, **more).float()
    _attend_to_what_is_far(model)
    model.save_pretrained(folder)


def make(kind: str, **more: int) -> Path:
    """A model of one of KINDS. more: the arguments of its function."""
    name = "-".join(["tiny", kind.replace("_", "-"), *map(str, more.values()), str(VERSION)])
    return kept(cache() / name, lambda folder: write(kind, folder, **more))


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    for asked in sys.argv[1:] or KINDS:
        print(make(asked))
