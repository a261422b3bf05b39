# SPDX-License-Identifier: Apache-2.0
"""LMCache 0.5.6 with vLLM 0.32 stores the null block under a prompt's keys. Needs no GPU."""

from types import SimpleNamespace

from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPRequestMetadata,
    LMCacheMPRequestTracker,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

BLOCK = CHUNK = 16
NULL = 0  # vllm.v1.core.block_pool.BlockPool.null_block
tokens = list(range(4 * BLOCK))

# A prompt with a sliding window of one block, of which vLLM's prefix cache has three blocks: what
# lies outside of the window is the null block (SlidingWindowManager.find_longest_cache_hit).
request = Request("a", tokens, SamplingParams(max_tokens=1), None)
tracker = LMCacheMPRequestTracker(request)
tracker.num_vllm_hit_tokens = 3 * BLOCK
tracker.append_block_ids(([NULL, NULL, 7, 8],))
tracker.increase_num_scheduled_tokens(BLOCK)

store = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, CHUNK, [BLOCK])
found = store or SimpleNamespace(op=SimpleNamespace(start=0, end=0, block_ids=[[]]))
print(f"stored: tokens {found.op.start} to {found.op.end} from blocks {found.op.block_ids}")
print("WRONG: the null block is stored as KV" if NULL in found.op.block_ids[0] else "right")
