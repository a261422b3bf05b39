# SPDX-License-Identifier: Apache-2.0
"""In the scheduler: LMCache stores a request's own KV and nothing else.

What it does: of the stores that LMCache's connector (0.5.6) makes for a step, it leaves out the
chunks up to the last block that is not the request's any more. Of its loads, it leaves out the
blocks in front that vLLM does not keep.

Why: a block that has left an attention window is replaced in the request's table by the null block,
whose KV means nothing, and is handed to other requests. LMCache's connector neither looks for the
null block nor notices the replacement, since it only appends to its own list of blocks. Its server
omits chunks of null blocks alone, on GPUs, and stores those that are null in part.

Upstream: docs/upstream/null_blocks.md.

Without it: other prompts' KV, of other tenants too, is stored under a prompt's key. The connector
does not start where `applies()` is false.
"""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPConnectorMetadata,
    LMCacheMPRequestMetadata,
)
from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

OPERATION = {"token_ids", "block_ids", "start", "end", "skip_first_n_tokens"}


def applies() -> bool:
    """Whether everything that this relies on is in the installed versions."""
    return (
        {it.name for it in dataclasses.fields(LoadStoreOp)} == OPERATION
        and {"request_id", "direction", "op"}
        <= {it.name for it in dataclasses.fields(LMCacheMPRequestMetadata)}
        and "requests" in vars(LMCacheMPConnectorMetadata())
        and "self._group_tokens_per_block = " in inspect.getsource(LMCacheMPConnector.__init__)
        and "kv_connector_block_state" in {it.name for it in dataclasses.fields(SchedulerOutput)}
        and [*inspect.signature(KVConnectorBlockState.get_block_ids).parameters]
        == ["self", "req_id"]
        and "gpu_block_pool" in inspect.signature(KVConnectorBase_V1.bind_gpu_block_pool).parameters
        and "self.null_block = " in inspect.getsource(BlockPool.__init__)
    )


def trim(
    operation: LoadStoreOp,
    held: Sequence[Sequence[int]] | None,
    spans: Sequence[int],
    chunk: int,
    null: int,
) -> bool:
    """Keep the chunks of a store behind the last block that is not real. Returns whether any is
    left.

    held: the request's blocks by group, as vLLM has them in this step, None where it does not say.
    spans: tokens that a block of each group has, 0 for groups that are not stored. chunk: tokens,
    a multiple of each span. null: the null block.
    """
    blocks, start = operation.block_ids, operation.start
    if held is None or not len(held) == len(spans) == len(blocks):
        return False
    real = start
    for ids, own, span in zip(blocks, held, spans, strict=True):
        if not span:
            continue
        if len(ids) * span != operation.end - start:
            return False
        mine = list(own[start // span : operation.end // span])
        if null in ids or mine != ids:
            unlike = [n for n, it in enumerate(ids) if it == null or mine[n : n + 1] != [it]]
            behind = start + (unlike[-1] + 1) * span
            real = max(real, -(-behind // chunk) * chunk)
    if real >= operation.end:
        return False
    left_out = real - start
    operation.block_ids = [
        ids[left_out // span :] if span else ids for ids, span in zip(blocks, spans, strict=True)
    ]
    operation.start = real
    return True


def skip(operation: LoadStoreOp, spans: Sequence[int], null: int) -> None:
    """Have a load write nothing into the null block, where all groups begin with it.

    Groups with a window begin with it, as far as the window does not reach. What is written there
    is not read, but vLLM's kernels may take it for zeros. Where another group needs these tokens,
    they are written for all.
    """
    begins = [
        next((n for n, it in enumerate(ids) if it != null), len(ids)) * span
        for ids, span in zip(operation.block_ids, spans, strict=True)
        if span
    ]
    operation.skip_first_n_tokens = max(operation.skip_first_n_tokens, min(begins, default=0))


def real_stores(meta: Any, state: Any, spans: Sequence[int], chunk: int, null: int | None) -> None:
    """Leave out of a step's metadata what is not to be stored, and loads into the null block.

    state: vLLM's KVConnectorBlockState for this step. null: None where no pool of blocks is known,
    and then nothing is stored.
    """
    kept = []
    for it in meta.requests:
        if it.direction == "RETRIEVE":
            if null is not None and len(it.op.block_ids) == len(spans):
                skip(it.op, spans, null)
            kept.append(it)
        elif (
            null is not None
            and state is not None
            and trim(it.op, state.get_block_ids(it.request_id), spans, chunk, null)
        ):
            kept.append(it)
    meta.requests = kept
