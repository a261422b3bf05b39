# SPDX-License-Identifier: Apache-2.0
"""An engine that fills each block with a unique number, chosen by prompt, salt, place and layer.
Stored and loaded blocks can be compared with the expected numbers.
"""

from collections.abc import Mapping

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from tests.serving.engine.test_kv_connector import QUICK, Engine

SHAPE = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
GPU_WAY = QUICK | {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}


def full(block: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block, **SHAPE)


def window(block: int, tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **SHAPE)


def local(block: int, tokens: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=tokens, **SHAPE)


class Painted(Engine):
    """Fills the blocks that it computes, and notes each stored or loaded block that is wrong."""

    def __init__(
        self,
        port: int,
        layers: Mapping[str, KVCacheSpec],
        gpu_way: bool = False,
        blocks: int = 300,
        budget: int = 4096,
    ) -> None:
        super().__init__(port, layers, GPU_WAY if gpu_way else QUICK, blocks, budget)
        self._numbers: dict[object, int] = {}
        self._loading: dict[str, int] = {}
        self.specs = list(layers.values())
        self.wrong: list[str] = []
        self.stored: list[tuple[int, int]] = []

    def number(self, name: str, group: int, at: int) -> int:
        """The expected number of the block at this place of a request."""
        request = self.scheduler.requests[name]
        prompt = request.prompt_token_ids[0], request.cache_salt
        return self._numbers.setdefault((prompt, group, at), 1 + len(self._numbers))

    def holds(self, group: int, block: int) -> int:
        return int([*self.layers.values()][group][block].flatten()[0])

    def compute(self, scheduled: SchedulerOutput) -> None:
        manager = self.scheduler.kv_cache_manager
        for name, loaded in [*self._loading.items()]:
            if name in scheduled.num_scheduled_tokens:
                del self._loading[name]
                self.compare(name, manager.get_block_ids(name), 0, loaded, "loaded")
        for name, count in scheduled.num_scheduled_tokens.items():
            end = self.scheduler.requests[name].num_computed_tokens
            for group, blocks in enumerate(manager.get_block_ids(name)):
                span = self.specs[group].block_size
                for at in range((end - count) // span, min(-(-end // span), len(blocks))):
                    if blocks[at]:
                        layer = [*self.layers.values()][group]
                        layer[blocks[at]] = self.number(name, group, at)
        for it in scheduled.kv_connector_metadata.requests:
            if it.direction == "STORE":
                self.stored.append((it.op.start, it.op.end))
                self.compare(it.request_id, it.op.block_ids, it.op.start, it.op.end, "stored")
            elif it.request_id in self.scheduler.requests:
                self._loading[it.request_id] = it.op.end

    def compare(self, name: str, blocks, start: int, end: int, done: str) -> None:
        for group, ids in enumerate(blocks):
            span = self.specs[group].block_size
            for at, block in zip(range(start // span, end // span), ids, strict=False):
                if block == 0 and done == "loaded":
                    continue  # outside of the window
                found, right = self.holds(group, block), self.number(name, group, at)
                if found != right or block == 0:
                    self.wrong.append(f"{done}: group {group}, block {at} of {name[:4]}: {block}")
