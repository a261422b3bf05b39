# SPDX-License-Identifier: Apache-2.0
"""A chunk with any null block is not stored."""

from collections.abc import Sequence
from typing import Any

from serving.patching.patch import CACHE_SERVER, Name, Patch, replace

_NAME = "all_null_chunk_masks"


def _put() -> None:
    from lmcache.v1.multiprocess.modules import lmcache_driven_transfer

    replace(lmcache_driven_transfer, _NAME, lambda _: null_chunk_masks)


def null_chunk_masks(
    block_ids: Sequence[Sequence[int]],
    object_groups: Sequence[Any],
    blocks_per_chunk: Sequence[int],
    num_chunks: int,
    null_block_id: int = 0,
) -> list[list[bool]]:
    """Return for each object group and chunk whether any of its blocks is the null block.

    block_ids, blocks_per_chunk: by kernel group; an object group has several of them.
    """
    return [
        [
            any(
                null_block_id in block_ids[kernel][chunk * count : (chunk + 1) * count]
                for kernel in group.kernel_group_indices
                for count in (blocks_per_chunk[kernel],)
            )
            for chunk in range(num_chunks)
        ]
        for group in object_groups
    ]


_MODULE = "lmcache.v1.multiprocess.modules.lmcache_driven_transfer"
PATCH = Patch(
    name="null_chunks",
    process=CACHE_SERVER,
    names=(
        Name(
            f"{_MODULE}:{_NAME}",
            "block_ids, object_groups, blocks_per_chunk, num_chunks, null_block_id",
        ),
        Name(f"{_MODULE}:", says=(f"= {_NAME}(",)),
    ),
    does="Skips chunks with any null block if LMCache's server copies KV itself, as on GPUs.",
    why="LMCache skips a chunk only if all its blocks are null. A block is smaller than a chunk "
    "there, so most chunks at the edge of an attention window are partly null. The connector "
    "stores none of them (real_blocks); this patch covers other clients of the server.",
    without="invalid KV could be stored under a prompt's key",
    closed=True,
    upstream="[null_blocks](../upstream/null_blocks.md)",
    put=_put,
)
