# SPDX-License-Identifier: Apache-2.0
"""Small LoRA adapters for the tiny model, which change its greedy answers, each its own way."""

import json
from collections.abc import Mapping
from pathlib import Path

MODULES = {"q_proj": (256, 256), "v_proj": (256, 128), "down_proj": (512, 256)}
"""In and out of what is changed in each of the tiny model's layers."""
LAYERS = 4


def write(
    folder: Path,
    seed: int,
    rank: int = 8,
    *,
    modules: Mapping[str, tuple[int, int]] = MODULES,
    layers: int = LAYERS,
    **config: object,
) -> Path:
    """An adapter as PEFT saves it."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for module, (wide, out) in modules.items():
            block = "mlp" if module == "down_proj" else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{block}.{module}"
            a = torch.randn(rank, wide, generator=generator) * 0.1
            b = torch.randn(out, rank, generator=generator) * 0.1
            tensors[f"{name}.lora_A.weight"] = a.to(torch.bfloat16)
            tensors[f"{name}.lora_B.weight"] = b.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*modules]}
    (folder / "adapter_config.json").write_text(json.dumps({**told, "bias": "none", **config}))
    return folder
