"""A gate for slow stores: KV is loaded from L2 only where that is quicker than computing it again.

A part of LMCache's server, its prefetch policy and its store policy: for each request it sees what
is in memory and what each L2 store has, and says what to load. What is in memory is always used.
How fast a store is, is measured on the loads themselves; how fast the engine computes, it is told.
A load is worth it when

    (bytes under way + its own) / bytes per second  <=  its chunks x seconds per chunk
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
from prometheus_client import Counter

from lmi_config.kv_tiers import STORES

log = init_logger(__name__)

TRY_S = 10.0
"""How often at most one chunk is loaded from a slow store, to see whether it is still slow."""
SLOW_S = 60.0
"""For how long after it was too slow nothing is stored in it, which would make it slower still."""
BEHIND_S = 5.0
"""Of writing; a store that is further behind gets no more until it has caught up."""
COST = 0.01
"""The part of the time that such trials may take."""
TELL_S = 60.0
"""How often the log tells at most that a store is slow."""
FADES = 0.8
"""What is left of a measurement's weight after the next one."""


@dataclass
class Store:
    """What is known of a store. Times in seconds.

    size, seconds: bytes of its loads and how long they took, older ones with less weight.
    loading: bytes of the loads under way, by task. since: up to when `seconds` has counted.
    """

    size: float = 0.0
    seconds: float = 0.0
    loading: dict[int, int] = field(default_factory=dict)
    since: float = 0.0
    tried: float = -math.inf
    told: float = -math.inf
    slow_until: float = -math.inf

    def begin(self, task: int, size: int, now: float) -> None:
        if not self.loading:
            self.since = now
        self.loading[task] = size

    def end(self, task: int, now: float) -> None:
        self.size = FADES * self.size + self.loading.pop(task, 0)
        self.seconds = FADES * self.seconds + max(now - self.since, 0.0)
        self.since = now

    def takes(self, size: int, alone: bool = False) -> float:
        """Seconds until so many more bytes are here, after what is under way or alone; 0 while
        nothing was measured.
        """
        if not self.size:
            return 0.0
        before = 0 if alone else sum(self.loading.values())
        return (before + size) * self.seconds / self.size


class LoadGate(RetainPrefetchPolicy, EventSubscriber):  # type: ignore[misc]  # not type-checked
    """seconds_per_chunk: how long the engine computes one; 0 as long as that is unknown."""

    def __init__(self) -> None:
        self.seconds_per_chunk = 0.0
        self._stores: defaultdict[int, Store] = defaultdict(Store)
        self._written: defaultdict[int, Store] = defaultdict(Store)
        self._lock = threading.Lock()
        self._loaded = Counter(
            "slipway_kv_chunks_loaded", "Chunks of prompts that came from a store.", ["l2_name"]
        )
        self._skipped = Counter(
            "slipway_kv_chunks_not_loaded",
            "Chunks that a store had and that were computed again, as that was quicker.",
        )

    def get_subscriptions(self) -> dict[EventType, Callable[[Event], None]]:
        return {
            EventType.L2_LOAD_TASK_SUBMITTED: lambda event: self._begin(self._stores, event),
            EventType.L2_LOAD_TASK_COMPLETED: lambda event: self._end(self._stores, event),
            EventType.L2_STORE_SUBMITTED: lambda event: self._begin(self._written, event),
            EventType.L2_STORE_COMPLETED: lambda event: self._end(self._written, event),
        }

    def _begin(self, stores: dict[int, Store], event: Event) -> None:
        task = event.metadata
        with self._lock:
            stores[task["adapter_index"]].begin(
                task["task_id"], task["total_bytes"], event.timestamp
            )

    def _end(self, stores: dict[int, Store], event: Event) -> None:
        task = event.metadata
        with self._lock:
            stores[task["adapter_index"]].end(task["task_id"], event.timestamp)

    def plan_load(
        self,
        key_groups: list[GroupedObjectKeys],
        l1_locked_keys: MapState,
        l2_locked_keys: MapState,
        l1_manager_descs: dict[int, L1ManagerDescriptor],
        l2_adapter_descs: dict[int, L2AdapterDescriptor],
        fetching_policy: FetchingPolicy,
    ) -> PrefetchPlan:
        """LMCache's own plan, without the stores that are too slow for this request."""

        def planned(l2: MapState) -> PrefetchPlan:
            return super(LoadGate, self).plan_load(
                key_groups, l1_locked_keys, l2, l1_manager_descs, l2_adapter_descs, fetching_policy
            )

        def name(index: int) -> str:
            kind: str = l2_adapter_descs[index].type_name
            return STORES.get(kind, kind)

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
            index, takes = self._slowest(loads)
            if takes <= saved:
                break
            if self._stores[index].takes(loads[index], alone=True) > saved:
                self._stores[index].slow_until = monotonic() + SLOW_S
            self._tell(index, name(index), loads[index], takes, saved)
            if self._is_due(index, takes / chunks):
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

    def takes_more(self, index: int) -> bool:
        """Whether to store anything there: not while it is too slow, or far behind."""
        with self._lock:
            slow = self._stores[index].slow_until > monotonic()
            behind = self._written[index].takes(0)
        return not slow and behind < BEHIND_S

    def _slowest(self, loads: dict[int, int]) -> tuple[int, float]:
        with self._lock:
            times = {index: self._stores[index].takes(size) for index, size in loads.items()}
        index = max(times, key=times.__getitem__)
        return index, times[index]

    def _tell(self, index: int, name: str, size: int, takes: float, saved: float) -> None:
        now, store = monotonic(), self._stores[index]
        if now - store.told > TELL_S:
            store.told = now
            log.warning(
                "the KV store %s is slower than computing again: %.1f MB would take %.2f s, and "
                "save %.2f s; what is there is computed until loading is quicker",
                *(name, size / 1e6, takes, saved),
            )

    def _is_due(self, index: int, chunk: float) -> bool:
        """Whether to try a slow store with one chunk, which takes so many seconds."""
        now, store = monotonic(), self._stores[index]
        if now - store.tried < max(TRY_S, chunk / COST):
            return False
        first, store.tried = store.tried == -math.inf, now
        return not first  # it was measured a moment ago


class StoreGate(DefaultStorePolicy):  # type: ignore[misc]  # not type-checked
    """LMCache's store policy without the stores that are too slow to load from, or to write to.

    keeps: whether what was stored stays in memory.
    """

    def __init__(self, gate: LoadGate, keeps: bool) -> None:
        self._gate = gate
        self._keeps = keeps

    def select_store_targets(
        self, keys: list[ObjectKey], adapters: list[L2AdapterDescriptor]
    ) -> dict[int, list[ObjectKey]]:
        return {it.index: list(keys) for it in adapters if self._gate.takes_more(it.index)}

    def select_l1_deletions(self, keys: list[ObjectKey]) -> list[ObjectKey]:
        return [] if self._keeps else list(keys)


def _length(key_groups: Sequence[GroupedObjectKeys], plan: PrefetchPlan) -> int:
    """Chunks of the prompt that need not be computed."""
    found = Bitmap2D.zeros(len(key_groups), len(key_groups[0].keys))
    for state in (plan.l1_planned_keys, plan.l2_planned_keys):
        for _, cells in state.items():
            found = found + cells
    length: int
    length, _ = fold_unfold_grouped(found.to_list(), [it.sliding_window_size for it in key_groups])
    return length


def _size(key_groups: Sequence[GroupedObjectKeys], cells: Bitmap2D) -> int:
    """Bytes of these cells."""
    return sum(
        row.popcount()
        * sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(it.layout_desc.shapes, it.layout_desc.dtypes, strict=True)
        )
        for it, row in zip(key_groups, cells, strict=True)
    )


def _columns(cells: Bitmap2D, end: int) -> Bitmap2D:
    """Only the cells of the first chunks."""
    kept = cells.zeros_like()
    for row, wanted in zip(cells, kept, strict=True):
        for column in row.get_indices_list():
            if column < end:
                wanted.set(column)
    return kept
