# SPDX-License-Identifier: Apache-2.0
"""In the cache server: a chunk with any null block is not stored.

What it does: replaces the rule by which LMCache's server (0.5.6) leaves out chunks where it copies
KV itself, as on GPUs: those of null blocks alone. The null block is where an engine has no KV.

Why: a block is a part of a chunk there, so most chunks at the edge of an attention window are null
in part. The connector stores none of them (`serving/engine/patches/real_blocks.py`); this holds for
whatever else uses the server.

Upstream: docs/upstream/null_blocks.md.

Without it: the connector's rule alone. The cache server does not start where `applies()` is false.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from lmcache.v1.multiprocess.modules import lmcache_driven_transfer

_NAME = "all_null_chunk_masks"
_PARAMETERS = ["block_ids", "object_groups", "blocks_per_chunk", "num_chunks", "null_block_id"]


def applies() -> bool:
    """Whether LMCache has the function, with these parameters, and calls it by this name."""
    found = getattr(lmcache_driven_transfer, _NAME, None)
    return (
        found is not None
        and [*inspect.signature(found).parameters] == _PARAMETERS
        and inspect.getsource(lmcache_driven_transfer).count(f"= {_NAME}(") == 1
    )


def apply() -> None:
    """Raises RuntimeError where it does not apply."""
    if not applies():
        raise RuntimeError(f"{__name__} does not fit the installed version of LMCache")
    setattr(lmcache_driven_transfer, _NAME, null_chunk_masks)


def null_chunk_masks(
    block_ids: Sequence[Sequence[int]],
    object_groups: Sequence[Any],
    blocks_per_chunk: Sequence[int],
    num_chunks: int,
    null_block_id: int = 0,
) -> list[list[bool]]:
    """For each object group, and each chunk, whether any of its blocks is the null block.

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
