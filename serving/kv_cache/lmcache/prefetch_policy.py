# SPDX-License-Identifier: Apache-2.0
"""In LMCache's server: prefetch and store policies that leave slow stores out.

KV is loaded from an L2 store only if that is faster than computing it again. For each request the
prefetch policy gets the chunks in memory and those in each store, and decides what to load. Chunks
in memory are always used. A store's speed is measured on its loads. Slipway's server measures the
engine's speed. A load is worth it if

    (bytes in flight + its own) / bytes per second  <=  its chunks x seconds per chunk
"""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from lmcache.logging import init_logger
from lmcache.v1.distributed.api import FetchingPolicy, GroupedObjectKeys, ObjectKey
from lmcache.v1.distributed.bitmap_ops.fold import fold_unfold_grouped
from lmcache.v1.distributed.storage_controllers.prefetch_policy import (
    PrefetchPlan,
    RetainPrefetchPolicy,
)
from lmcache.v1.distributed.storage_controllers.store_policy import DefaultStorePolicy
from lmcache.v1.distributed.storage_controllers.utils import (
    Bitmap2D,
    L1ManagerDescriptor,
    L2AdapterDescriptor,
    MapState,
)
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventSubscriber
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from lmi_config.plan.kv_tiers import STORES
from serving.kv_cache.speed import Speed

log = init_logger(__name__)

TRIAL_S = 10.0
"""Seconds between two trials of a slow store. A trial loads one chunk."""
SLOW_S = 60.0
"""A store that was too slow gets no writes for this long, because they would slow it further."""
BEHIND_S = 5.0
"""A store gets no further writes while its pending writes take longer than this."""
TRIAL_COST = 0.01
"""The share of the time that trials may take."""
WARNING_S = 60.0
"""Seconds between two warnings about the same slow store."""
FADES = 0.8
"""Each measurement multiplies the weight of the earlier ones by this factor."""


@dataclass
class Traffic:
    """The transfers to or from one store, and their speed. Times are in seconds."""

    speed: Speed = field(default_factory=lambda: Speed(FADES))
    """The speed of finished transfers, in seconds per byte."""
    in_flight: dict[int, int] = field(default_factory=dict)
    """Bytes in flight, by task."""
    counted_until: float = 0.0
    """`speed` includes the time until then."""
    last_trial: float = -math.inf
    last_warning: float = -math.inf
    slow_until: float = -math.inf

    def begin(self, task: int, size: int, now: float) -> None:
        if not self.in_flight:
            self.counted_until = now
        self.in_flight[task] = size

    def end(self, task: int, now: float) -> None:
        self.speed.add(self.in_flight.pop(task, 0), max(now - self.counted_until, 0.0))
        self.counted_until = now

    def duration(self, size: int, alone: bool = False) -> float:
        """Return the seconds for `size` more bytes; 0 before the first measurement. alone: without
        the time of the bytes in flight.
        """
        before = 0 if alone else sum(self.in_flight.values())
        return (before + size) * self.speed.seconds_per_unit


class CostAwarePrefetch(RetainPrefetchPolicy, EventSubscriber):  # type: ignore[misc]  # not type-checked
    """LMCache's prefetch policy without the stores that are slower than the engine."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.seconds_per_chunk = 0.0
        """Seconds that the engine takes to compute a chunk; 0 if unknown."""
        self._loads: defaultdict[int, Traffic] = defaultdict(Traffic)
        self._stores: defaultdict[int, Traffic] = defaultdict(Traffic)
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._seconds = Gauge(
            "slipway_kv_load_seconds_per_byte",
            "What loading from a store takes, as measured last.",
            ["l2_name"],
            registry=registry,
        )
        self._loaded = Counter(
            "slipway_kv_chunks_loaded",
            "Chunks of prompts that came from a store.",
            ["l2_name"],
            registry=registry,
        )
        self._skipped = Counter(
            "slipway_kv_chunks_not_loaded",
            "Chunks that a store had and that were computed again, as that was quicker.",
            registry=registry,
        )

    def get_subscriptions(self) -> dict[EventType, Callable[[Event], None]]:
        return {
            EventType.L2_LOAD_TASK_SUBMITTED: lambda event: self._begin(self._loads, event),
            EventType.L2_LOAD_TASK_COMPLETED: self._end_load,
            EventType.L2_STORE_SUBMITTED: lambda event: self._begin(self._stores, event),
            EventType.L2_STORE_COMPLETED: lambda event: self._end(self._stores, event),
        }

    def _begin(self, traffic: dict[int, Traffic], event: Event) -> None:
        task = event.metadata
        with self._lock:
            traffic[task["adapter_index"]].begin(
                task["task_id"], task["total_bytes"], event.timestamp
            )

    def _end(self, traffic: dict[int, Traffic], event: Event) -> None:
        task = event.metadata
        with self._lock:
            traffic[task["adapter_index"]].end(task["task_id"], event.timestamp)

    def _end_load(self, event: Event) -> None:
        self._end(self._loads, event)
        index = event.metadata["adapter_index"]
        if name := self._names.get(index):
            self._seconds.labels(name).set(self._loads[index].speed.seconds_per_unit)

    def plan_load(
        self,
        key_groups: list[GroupedObjectKeys],
        l1_locked_keys: MapState,
        l2_locked_keys: MapState,
        l1_manager_descs: dict[int, L1ManagerDescriptor],
        l2_adapter_descs: dict[int, L2AdapterDescriptor],
        fetching_policy: FetchingPolicy,
    ) -> PrefetchPlan:
        """LMCache's own plan, without the stores that are too slow for this request. Reads ahead of
        requests (read_ahead.py) have the policy "full".
        """

        def planned(l2: MapState) -> PrefetchPlan:
            return super(CostAwarePrefetch, self).plan_load(
                key_groups, l1_locked_keys, l2, l1_manager_descs, l2_adapter_descs, fetching_policy
            )

        def name(index: int) -> str:
            kind: str = l2_adapter_descs[index].type_name
            return STORES.get(kind, kind)

        self._names |= {index: name(index) for index in l2_adapter_descs}
        if fetching_policy == "full":  # before a request asks: its time is not the engine's
            return planned(self._without_slow_stores(l2_locked_keys))
        whole = plan = planned(l2_locked_keys)
        if not whole.l2_planned_keys.items():
            return whole
        memory = _length(key_groups, planned(MapState()))
        offered, tried = l2_locked_keys.copy(), set[int]()
        while self.seconds_per_chunk and (
            loads := {
                index: _size(key_groups, cells)
                for index, cells in plan.l2_planned_keys.items()
                if index not in tried
            }
        ):
            chunks = max(_length(key_groups, plan) - memory, 1)
            saved = chunks * self.seconds_per_chunk
            index, duration = self._slowest(loads)
            if duration <= saved:
                break
            if self._loads[index].duration(loads[index], alone=True) > saved:
                self._loads[index].slow_until = monotonic() + SLOW_S
            self._warn(index, name(index), loads[index], duration, saved)
            if self._is_trial_due(index, duration / chunks):
                offered[index] = _columns(offered[index], memory + 1)
                tried.add(index)
            else:
                del offered[index]
            plan = planned(offered)
        if skipped := _length(key_groups, whole) - _length(key_groups, plan):
            self._skipped.inc(skipped)
        for index, cells in plan.l2_planned_keys.items():
            self._loaded.labels(name(index)).inc(max(row.popcount() for row in cells))
        return plan

    def is_worth_storing_in(self, index: int) -> bool:
        """Whether to write to a store: not while it is too slow, or far behind."""
        with self._lock:
            slow = self._loads[index].slow_until > monotonic()
            behind = self._stores[index].duration(0)
        return not slow and behind < BEHIND_S

    def is_loading(self) -> bool:
        """Whether chunks are being loaded."""
        with self._lock:
            return any(it.in_flight for it in self._loads.values())

    def _without_slow_stores(self, l2: MapState) -> MapState:
        """Return only the chunks of stores that load faster than the engine computes."""
        offered, now = l2.copy(), monotonic()
        for index in [index for index, _ in l2.items() if self._loads[index].slow_until > now]:
            del offered[index]
        return offered

    def _slowest(self, loads: dict[int, int]) -> tuple[int, float]:
        with self._lock:
            durations = {index: self._loads[index].duration(size) for index, size in loads.items()}
        index = max(durations, key=durations.__getitem__)
        return index, durations[index]

    def _warn(self, index: int, name: str, size: int, duration: float, saved: float) -> None:
        now, loads = monotonic(), self._loads[index]
        if now - loads.last_warning > WARNING_S:
            loads.last_warning = now
            log.warning(
                "the KV store %s is slower than computing again: %.1f MB would take %.2f s, and "
                "save %.2f s; the engine computes its KV until loading is faster",
                *(name, size / 1e6, duration, saved),
            )

    def _is_trial_due(self, index: int, seconds: float) -> bool:
        """Whether to load one chunk from a slow store. seconds: the expected time of the load."""
        now, loads = monotonic(), self._loads[index]
        if now - loads.last_trial < max(TRIAL_S, seconds / TRIAL_COST):
            return False
        first, loads.last_trial = loads.last_trial == -math.inf, now
        return not first  # the load that showed it to be slow was just measured


class CostAwareStore(DefaultStorePolicy):  # type: ignore[misc]  # not type-checked
    """LMCache's store policy without the stores that are too slow to load from, or to write to.

    keeps_in_memory: whether stored chunks stay in L1.
    """

    def __init__(self, prefetch: CostAwarePrefetch, keeps_in_memory: bool) -> None:
        self._prefetch = prefetch
        self._keeps_in_memory = keeps_in_memory

    def select_store_targets(
        self, keys: list[ObjectKey], adapters: list[L2AdapterDescriptor]
    ) -> dict[int, list[ObjectKey]]:
        indices = [adapter.index for adapter in adapters]
        return {index: list(keys) for index in indices if self._prefetch.is_worth_storing_in(index)}

    def select_l1_deletions(self, keys: list[ObjectKey]) -> list[ObjectKey]:
        return [] if self._keeps_in_memory else list(keys)


def _length(key_groups: Sequence[GroupedObjectKeys], plan: PrefetchPlan) -> int:
    """Return the number of the prompt's chunks that need not be computed."""
    planned = Bitmap2D.zeros(len(key_groups), len(key_groups[0].keys))
    for state in (plan.l1_planned_keys, plan.l2_planned_keys):
        for _, cells in state.items():
            planned = planned + cells
    windows = [group.sliding_window_size for group in key_groups]
    length: int
    length, _ = fold_unfold_grouped(planned.to_list(), windows)
    return length


def _size(key_groups: Sequence[GroupedObjectKeys], cells: Bitmap2D) -> int:
    """Return the bytes of these cells."""
    return sum(
        row.popcount()
        * sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(group.layout_desc.shapes, group.layout_desc.dtypes, strict=True)
        )
        for group, row in zip(key_groups, cells, strict=True)
    )


def _columns(cells: Bitmap2D, end: int) -> Bitmap2D:
    """Return only the cells of the chunks before `end`."""
    kept = cells.zeros_like()
    for row, wanted in zip(cells, kept, strict=True):
        for column in row.get_indices_list():
            if column < end:
                wanted.set(column)
    return kept
