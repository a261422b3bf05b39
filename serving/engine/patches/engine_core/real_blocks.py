# SPDX-License-Identifier: Apache-2.0
"""LMCache stores a request's own KV and nothing else."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from serving.patching.patch import ENGINE, Name, Patch

if TYPE_CHECKING:
    from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp


def trim(
    operation: "LoadStoreOp",
    held: Sequence[Sequence[int]] | None,
    spans: Sequence[int],
    chunk: int,
    null: int,
) -> bool:
    """Keep the chunks of a store behind the last block that is not real. Returns whether any is
    left.

    held: the request's blocks by group in this step, None if vLLM does not report them. spans:
    tokens that a block of each group has, 0 for groups that are not stored. chunk: tokens, a
    multiple of each span. null: the null block.
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


def skip(operation: "LoadStoreOp", spans: Sequence[int], null: int) -> None:
    """Skip a load's writes into the null block, as long as all groups begin with it.

    A group with a window begins with null blocks, for the tokens before the window. The null
    block's contents are not used, but vLLM's kernels may expect zeros there. If another group needs
    these tokens, they are written for all groups.
    """
    begins = [
        next((n for n, it in enumerate(ids) if it != null), len(ids)) * span
        for ids, span in zip(operation.block_ids, spans, strict=True)
        if span
    ]
    operation.skip_first_n_tokens = max(operation.skip_first_n_tokens, min(begins, default=0))


def real_stores(meta: Any, state: Any, spans: Sequence[int], chunk: int, null: int | None) -> None:
    """Remove from a step's metadata the stores of blocks that are not real, and the loads into the
    null block.

    state: vLLM's KVConnectorBlockState for this step. null: the null block; None if no pool of
    blocks is known, and then no KV is stored.
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


_LMCACHE = "lmcache.integration.vllm"
PATCH = Patch(
    name="real_blocks",
    process=ENGINE,
    names=(
        Name(
            f"{_LMCACHE}.vllm_multi_process_adapter:LoadStoreOp",
            has=("token_ids", "block_ids", "start", "end", "skip_first_n_tokens"),
        ),
        Name(
            f"{_LMCACHE}.lmcache_mp_metadata:LMCacheMPRequestMetadata",
            has=("request_id", "direction", "op"),
        ),
        Name(f"{_LMCACHE}.lmcache_mp_metadata:LMCacheMPConnectorMetadata", has=("requests",)),
        Name(
            f"{_LMCACHE}.lmcache_mp_connector:LMCacheMPConnector",
            has=("_group_tokens_per_block",),
        ),
        Name("vllm.v1.core.sched.output:SchedulerOutput", has=("kv_connector_block_state",)),
        Name("vllm.v1.core.sched.output:KVConnectorBlockState.get_block_ids", "self, req_id"),
        Name(
            "vllm.distributed.kv_transfer.kv_connector.v1.base:"
            "KVConnectorBase_V1.bind_gpu_block_pool",
            "self, gpu_block_pool",
        ),
        Name("vllm.v1.core.block_pool:BlockPool", has=("null_block",)),
    ),
    does="Removes from a step's stores the chunks up to the last block that no longer belongs to "
    "the request, and from its loads the leading blocks that vLLM does not keep.",
    why="vLLM replaces a block that has left an attention window by the null block, which has no "
    "valid KV, and gives the block to other requests. LMCache's connector notices neither, "
    "because it only appends to its own list of blocks.",
    without="KV of other prompts, also of other tenants, would be stored under a prompt's key",
    closed=True,
    upstream="[null_blocks](../upstream/null_blocks.md)",
)
