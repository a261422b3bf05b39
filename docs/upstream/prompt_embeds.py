# SPDX-License-Identifier: Apache-2.0
"""LMCache 0.5.6 with vLLM 0.32 has one key for all prompts of embeddings. Needs no GPU."""

import torch
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK = 16
init_none_hash(sha256)


def prompt(name: str, seed: int) -> Request:
    embeds = torch.randn(4 * BLOCK, 8, generator=torch.Generator().manual_seed(seed))
    hasher = get_request_block_hasher(BLOCK, sha256)
    sampling = SamplingParams(max_tokens=1)
    return Request(name, None, sampling, None, prompt_embeds=embeds, block_hasher=hasher)


one, other = prompt("one", 1), prompt("other", 2)
print("vLLM's block hashes are equal:", one.block_hashes == other.block_hashes)
keys = [LMCacheMPRequestTracker(it).get_token_ids() for it in (one, other)]
print("LMCache's token ids are equal:", keys[0] == keys[1], sorted(set(keys[0])))
print("WRONG: each is answered from the other's KV" if keys[0] == keys[1] else "right")
