# SPDX-License-Identifier: Apache-2.0
"""Our copy of KV writes the same bytes as LMCache's own, block by block."""

import pytest
import torch
from lmcache.lmcache_native import EngineKVFormat
from lmcache.v1.multiprocess.transfer_context import base
from lmcache.v1.platform.torch_ops import mp_mem_kernels

from serving.engine.patches.engine_core import kv_copy

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 7, 2, 8, 10
FORMATS = {"HND": EngineKVFormat.NL_X_NB_NH_BS_CS, "NHD": EngineKVFormat.NL_X_NB_BS_NH_CS}
THEIRS = mp_mem_kernels._transfer_per_layer_fused


@pytest.fixture(params=["HND", "NHD"])
def layout(request):
    return request.param


def caches(layout, seed):
    shape = (HEADS, TOKENS, WIDTH) if layout == "HND" else (TOKENS, HEADS, WIDTH)
    made = torch.Generator().manual_seed(seed)
    return {str(n): torch.randn(BLOCKS, *shape, generator=made) for n in range(LAYERS)}


def chunks(count, blocks_per_chunk):
    made = torch.Generator().manual_seed(1)
    shape = LAYERS, TOKENS * blocks_per_chunk, HEADS * WIDTH
    return [torch.randn(shape, generator=made) for _ in range(count)]


def both(monkeypatch, work):
    """The results of LMCache's own copy, and of ours."""
    found = []
    for copy in (THEIRS, kv_copy.copy):
        monkeypatch.setattr(mp_mem_kernels, "_transfer_per_layer_fused", copy)
        found.append(work())
    return found


@pytest.mark.parametrize(("blocks_per_chunk", "skipped"), [(1, 0), (2, 0), (2, 1), (3, 3)])
def test_a_load_writes_the_same(monkeypatch, layout, blocks_per_chunk, skipped):
    ids = [5, 0, 3, 6, 1, 2]

    def load():
        kv = caches(layout, 0)
        base.scatter_cpu_to_paged_kv(
            kv,
            ids,
            chunks(len(ids) // blocks_per_chunk, blocks_per_chunk),
            blocks_per_chunk,
            skip_first_n_tokens=skipped * TOKENS,
            layout_hints={"kv_layout": layout},
            engine_kv_format=FORMATS[layout],
        )
        return torch.stack([*kv.values()])

    theirs, ours = both(monkeypatch, load)
    assert not torch.equal(theirs, torch.stack([*caches(layout, 0).values()]))
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize(("blocks_per_chunk", "chosen"), [(1, None), (2, None), (2, [0, 2])])
def test_a_store_reads_the_same(monkeypatch, layout, blocks_per_chunk, chosen):
    ids = [5, 0, 3, 6, 1, 2]

    def store():
        count = len(chosen) if chosen else len(ids) // blocks_per_chunk
        return torch.stack(
            base.gather_paged_kv_to_cpu(
                caches(layout, 0),
                ids,
                blocks_per_chunk,
                layout_hints={"kv_layout": layout},
                engine_kv_format=FORMATS[layout],
                out=chunks(count, blocks_per_chunk),
                chunk_indices=chosen,
            )
        )

    theirs, ours = both(monkeypatch, store)
    assert torch.equal(theirs, ours)
