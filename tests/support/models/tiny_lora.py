# SPDX-License-Identifier: Apache-2.0
"""Small LoRA adapters for the tiny model; each changes its greedy answers differently."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MODULES: Mapping[str, tuple[int, int]] = {
    "q_proj": (256, 256),
    "v_proj": (256, 128),
    "down_proj": (512, 256),
}
"""Input and output sizes of the adapted modules in each of the tiny model's layers."""
LAYERS = 4
NONE: Mapping[str, "torch.Tensor"] = MappingProxyType({})


def write(
    folder: Path,
    seed: int,
    rank: int = 8,
    modules: Mapping[str, tuple[int, int]] = MODULES,
    layers: int = LAYERS,
    **config: Any,
) -> Path:
    """An adapter, as PEFT saves it, that changes these modules of each layer."""
    named = {
        f"model.layers.{layer}.{'mlp' if module == 'down_proj' else 'self_attn'}.{module}": sides
        for layer in range(layers)
        for module, sides in modules.items()
    }
    return write_modules(folder, named, seed, rank, **config)


def write_modules(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    seed: int,
    rank: int = 8,
    more: Mapping[str, "torch.Tensor"] = NONE,
    **config: Any,
) -> Path:
    """An adapter that changes these modules: name in PEFT's model → input and output sizes. more:
    additional tensors, by their full names.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = dict(more)
    for module, (wide, out) in modules.items():
        embeds = module.endswith("embed_tokens")
        name = f"base_model.model.{module}.lora_{'embedding_' if embeds else ''}"
        end = "" if embeds else ".weight"
        a = torch.randn(rank, wide, generator=generator) * 0.1
        b = torch.randn(out, rank, generator=generator) * 0.1
        tensors[f"{name}A{end}"] = a.to(torch.bfloat16)
        tensors[f"{name}B{end}"] = b.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in modules})
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**told, "bias": "none", **config}))
    return folder
