# SPDX-License-Identifier: Apache-2.0
"""The patches of the engine core's process and of its workers', by the component that applies them.

A plugin of vLLM's applies the patches for adapters (`plugin.py`). The connectors apply the others;
vLLM imports them by their paths.
"""

from collections.abc import Sequence

from serving.engine.patches.engine_core import (
    cache_keys,
    cpu_lora,
    kv_copy,
    kv_fetches,
    real_blocks,
    tier_waits,
    unapplied_adapters,
)
from serving.patching import patch
from serving.patching.patch import Patch

ADAPTERS: Sequence[Patch] = (cpu_lora.KERNELS, cpu_lora.PROMPTS, unapplied_adapters.PATCH)
TIERS: Sequence[Patch] = (real_blocks.PATCH, cache_keys.PATCH, tier_waits.PATCH, kv_copy.PATCH)
TRANSFER: Sequence[Patch] = (kv_fetches.PATCH,)
PATCHES = (*ADAPTERS, *TIERS, *TRANSFER)


def apply_adapters() -> None:
    """Raises Unfit."""
    _apply(ADAPTERS)


def apply_tiers() -> None:
    """Raises Unfit."""
    _apply(TIERS)


def apply_transfer() -> None:
    """Raises Unfit."""
    _apply(TRANSFER)


def _apply(patches: Sequence[Patch]) -> None:
    from vllm.logger import init_logger

    patch.apply(patches, init_logger(__name__))
