# SPDX-License-Identifier: Apache-2.0
"""Facts from a replica's /metrics about itself and its KV caches. Any of it may be missing: other
servers than Slipway's have no tiers, or do not say so.
"""

import dataclasses
import math
import re

from serving.router.policy.replica_load import ADAPTERS
from serving.router.policy.tiers import DEFAULT_PRICES, Capacity, Prices


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts about a replica.

    born: the start time of its process, if known. chunk: tokens of a chunk in its tiers, 0 without
    tiers. tenant_header: its header for tenants, "" without one; None if unknown.
    adapter_slots: adapters that its engine keeps. slots: requests that it gives its engine at once,
    0 if unknown. role: `prefill` for one that computes prompts for
    those that `decode`; `both` for one that does all of a request. transfer: engines with the same
    fetch KV from each other, "" for one that does not. computed: prompt tokens that its engine has
    computed so far, and the seconds that it took. kv_usage: the share of its engine's KV cache that
    is in use, the fullest of its engines; None if unknown.
    """

    born: bytes | None
    capacity: Capacity
    prices: Prices
    chunk: int
    tenant_header: str | None
    adapter_slots: int
    slots: int
    role: str
    transfer: str
    computed: tuple[float, float]
    kv_usage: float | None


_BORN = re.compile(rb"^process_start_time_seconds (\S{1,64})", re.MULTILINE)
_BLOCKS = re.compile(rb'^vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', re.MULTILINE)
_BLOCK_SIZE = re.compile(rb'^vllm:cache_config_info\{.*block_size="(\d+)"', re.MULTILINE)
_TIER = re.compile(rb'^slipway_kv_tier_capacity_tokens\{tier="(\w+)"\} (\S+)', re.MULTILINE)
_STORE = re.compile(rb'^slipway_kv_shared_store_info\{store="(\w+)"\} 1', re.MULTILINE)
_LOAD = re.compile(rb'^slipway_kv_tier_load_seconds_per_token\{tier="(\w+)"\} (\S+)', re.MULTILINE)
_CHUNK = re.compile(rb"^slipway_kv_chunk_tokens (\S+)", re.MULTILINE)
_TENANTS = re.compile(rb'^slipway_tenants_info\{header="([^"]{0,256})"\} 1', re.MULTILINE)
_ADAPTERS = re.compile(rb"^slipway_adapter_slots (\S+)", re.MULTILINE)
_SLOTS = re.compile(rb"^slipway_request_slots (\S+)", re.MULTILINE)
_ROLE = re.compile(rb'^slipway_role_info\{role="(prefill|decode|both)"\} 1', re.MULTILINE)
_TRANSFER = re.compile(rb'^slipway_kv_transfer_info\{kv="(\w+)"\} 1', re.MULTILINE)
_PREFILL = re.compile(rb"^slipway_prefill_seconds_per_token (\S+)", re.MULTILINE)

_READ = (
    *(b"slipway_", b"process_start_time_seconds ", b"vllm:cache_config_info{"),
    *(b"vllm:request_prefill_", b"vllm:kv_cache_usage_perc{"),
)
"""The beginnings of the lines with any of these facts."""
_COMPUTED = re.compile(rb"^vllm:request_prefill_kv_computed_tokens_sum\{.* (\S+)$", re.MULTILINE)
_TOOK = re.compile(rb"^vllm:request_prefill_time_seconds_sum\{.* (\S+)$", re.MULTILINE)
_USED = re.compile(rb"^vllm:kv_cache_usage_perc\{.* (\S+)$", re.MULTILINE)


COPIES = "copies"
"""The name of the tiers that the copies of one container have together."""


def read(metrics: bytes, together: bytes = b"") -> Facts:
    """Read an answer to /metrics. Values that are not numbers are missing. together: the series of
    tiers that the replica has together with the other copies of this container.
    """
    # Most lines have none of these facts, and each expression would search all lines.
    metrics = b"\n".join([it for it in metrics.split(b"\n") if it.startswith(_READ)])
    metrics += b"\n" + together
    born = _BORN.search(metrics)
    blocks, size = _BLOCKS.search(metrics), _BLOCK_SIZE.search(metrics)
    tiers = {name: int(_positive(value)) for name, value in _TIER.findall(metrics)}
    store = _STORE.search(metrics)
    engine = int(blocks[1]) * int(size[1]) if blocks and size else None
    prefill = _positive(found[1]) if (found := _PREFILL.search(metrics)) else 0.0
    loads = {name: _positive(value) for name, value in _LOAD.findall(metrics)} if prefill else {}
    measured = {tier: load / prefill for tier, load in loads.items() if load}
    chunk, tenants = _CHUNK.search(metrics), _TENANTS.search(metrics)
    adapters, slots = _ADAPTERS.search(metrics), _SLOTS.search(metrics)
    role, transfer = _ROLE.search(metrics), _TRANSFER.search(metrics)
    return Facts(
        born[1] if born else None,
        Capacity(
            engine=engine or None,
            memory=tiers.get(b"l1", 0),
            disk=tiers.get(b"disk", 0),
            shared=tiers.get(b"shared") if store else None,
            store=store[1].decode() if store else "",
            pool=COPIES if _TIER.search(together) else "",
        ),
        DEFAULT_PRICES._replace(
            disk=measured.get(b"disk", DEFAULT_PRICES.disk),
            shared=measured.get(b"shared", DEFAULT_PRICES.shared),
        ),
        int(_positive(chunk[1])) if chunk else 0,
        tenants[1].decode("latin-1") if tenants else None,
        int(_positive(adapters[1])) or ADAPTERS if adapters else ADAPTERS,
        int(_positive(slots[1])) if slots else 0,
        role[1].decode() if role else "both",
        transfer[1].decode() if transfer else "",
        (_sum(_COMPUTED, metrics), _sum(_TOOK, metrics)),
        max(map(_positive, used)) if (used := _USED.findall(metrics)) else None,
    )


def _sum(series: re.Pattern[bytes], metrics: bytes) -> float:
    """The sum over all its engines."""
    return sum(map(_positive, series.findall(metrics)))


def _positive(text: bytes) -> float:
    """The number, or 0 if it is missing, infinite or negative."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0
