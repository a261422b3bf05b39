# SPDX-License-Identifier: Apache-2.0
"""The patches of the cache server's process: those of each start, and those of a store."""

from typing import Any

from serving.kv_cache.patches import (
    abandoned_writes,
    disk_files,
    forgotten_workers,
    late_hits,
    null_chunks,
    retained_sessions,
    shared_events,
    summed_tenants,
    tiered_objects,
)
from serving.patching import patch

START = (
    *(abandoned_writes.PATCH, forgotten_workers.PATCH, null_chunks.PATCH, summed_tenants.PATCH),
    *(shared_events.SALTS, shared_events.TOKENS, shared_events.PACKED),
)
PATCHES = (
    *(*START, retained_sessions.PATCH, late_hits.PATCH),
    *(disk_files.PATCH, tiered_objects.PATCH),
)


def apply_start() -> None:
    """Apply the patches of each start. Raises Unfit."""
    _apply(START)


def apply_retention(retention: Any) -> None:
    """Apply the patch of eviction. retention: as the patch has it."""
    _apply((retained_sessions.PATCH,), retention)


def apply_read_ahead() -> bool:
    """Apply the patch of look-ups. Returns whether it fits: else nothing may be read ahead."""
    return bool(_apply((late_hits.PATCH,)))


def apply_disk(folder: str) -> None:
    """Apply the disk tier's patch. folder: of its files. Raises Unfit."""
    _apply((disk_files.PATCH,), folder)


def apply_tiered_storage() -> None:
    """Apply the patch of tiered storage. Raises Unfit."""
    _apply((tiered_objects.PATCH,))


def _apply(patches: tuple[patch.Patch, ...], *context: Any) -> list[str]:
    """Apply patches. Returns the names of those that fit. Raises Unfit."""
    from lmcache.logging import init_logger

    return patch.apply(patches, init_logger(__name__), *context)
