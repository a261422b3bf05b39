# SPDX-License-Identifier: Apache-2.0
"""The cost of the connector's checks of a step's stores, beside LMCache's own work for them.

Prompts that have just been computed, with this many blocks each; no engine and no server.

    .venv/bin/python -m tools.ceiling.kv_checks
"""

import functools
import statistics
import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPRequestMetadata,
    LMCacheMPRequestTracker,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from serving.engine.patches.engine_core import cache_keys, real_blocks

BLOCK, CHUNK = 16, 256
ROUNDS = 200


def main() -> None:
    print("requests  blocks  LMCache µs  checks µs  per request  per block  with/without")
    for requests in (1, 64):
        for blocks in (64, 1024):
            _compare(requests, blocks)


def _compare(requests: int, blocks: int) -> None:
    tokens = [*range(blocks * BLOCK)]
    sampling = SamplingParams(max_tokens=1)
    asked = [Request(uuid.uuid4().hex, tokens, sampling, None) for _ in range(requests)]
    ids = [[*range(1 + n * blocks, 1 + (n + 1) * blocks)] for n in range(requests)]
    held = {it.request_id: ([*own],) for it, own in zip(asked, ids, strict=True)}
    state = SimpleNamespace(get_block_ids=held.__getitem__)
    without, checks = [], []
    for _ in range(ROUNDS if requests == 1 else ROUNDS // 20):
        trackers = [_tracker(it, own) for it, own in zip(asked, ids, strict=True)]
        meta = SimpleNamespace(requests=[])
        without.append(_time(functools.partial(_stores, trackers, meta)))
        checks.append(_time(functools.partial(_checked, asked, meta, state)))
    own, extra = (statistics.median(it) * 1e6 for it in (without, checks))
    each, block = extra / requests, extra / requests / blocks
    print(
        f"{requests:8}  {blocks:6}  {own:10.1f}  {extra:9.1f}  {each:11.2f}  {block:9.4f}  "
        f"{(own + extra) / own:12.3f}"
    )


def _tracker(request: Request, blocks: list[int]) -> LMCacheMPRequestTracker:
    tracker = LMCacheMPRequestTracker(request)
    tracker.append_block_ids((blocks,))
    tracker.increase_num_scheduled_tokens(request.num_tokens)
    return tracker


def _stores(trackers: list[LMCacheMPRequestTracker], meta: Any) -> None:
    for it in trackers:
        meta.requests.append(LMCacheMPRequestMetadata.GetStoreMetadata(it, CHUNK, [BLOCK]))


def _checked(asked: list[Request], meta: Any, state: Any) -> None:
    for it in asked:
        cache_keys.has_key(it)
        cache_keys.salt(it)
    real_blocks.real_stores(meta, state, [BLOCK], CHUNK, 0)
    assert len(meta.requests) == len(asked)


def _time(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
