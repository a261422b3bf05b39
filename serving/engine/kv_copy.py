# SPDX-License-Identifier: Apache-2.0
"""In the workers without a GPU: copying KV between the engine's blocks and LMCache's memory.

LMCache's own copy (0.5.6) gathers each layer's blocks by index, heads and tokens swapped, which
takes four times as long as memory does. Here each block of a layer is copied once, from where it is
to where it belongs: half as much again as a plain copy of memory takes.
"""

from collections.abc import Sequence
from typing import Any

import torch


def copy(
    layers: Sequence[torch.Tensor],
    chunks: Sequence[torch.Tensor],
    block_ids: Any,
    block_count: int,
    blocks_per_chunk: int,
    block_size: int,
    layout: Any,
    to_chunks: bool,
    skipped: int,
) -> None:
    """Copy blocks to chunks, or chunks to blocks; LMCache's signature for vLLM's layout on CPUs.

    layers: [blocks, heads, tokens, width] of keys and values each, or tokens before heads, as
    `layout` says. chunks: [layers, tokens, heads x width]. block_ids: of all chunks, in order.
    skipped: so many blocks at the beginning are not copied.
    """
    layers = [layer.view(*layer.shape[:3], -1) for layer in layers]
    heads, width = layers[0].shape[1 if layout.is_hnd else 2], layers[0].shape[3]
    for number in range(skipped, block_count):
        chunk, place = divmod(number, blocks_per_chunk)
        tokens = chunks[chunk].view(len(layers), -1, heads, width)
        parts = tokens[:, place * block_size : (place + 1) * block_size]
        if layout.is_hnd:
            parts = parts.transpose(1, 2)
        for layer, part in zip(layers, parts, strict=True):
            block = layer[int(block_ids[number])]
            if to_chunks:
                part.copy_(block)
            else:
                block.copy_(part)
