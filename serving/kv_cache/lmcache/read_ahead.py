# SPDX-License-Identifier: Apache-2.0
"""In LMCache's server: a conversation's chunks are read from the stores into memory before its next
turn asks for them.

LMCache looks a prompt up when the engine schedules its request. A request that waits before that
can have its chunks read meanwhile. The chunks are those of the conversation's last prompt, by the
keys that the engine itself used. They are read by LMCache's own prefetch, which locks nothing.

A read yields to requests. It loads one piece at a time, and the next only while no request loads
and memory has room. One conversation is read at a time.
"""

import math
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchLockMode,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.storage_manager import StorageManager
from prometheus_client import REGISTRY, CollectorRegistry, Counter

from serving.kv_cache.lmcache.retention import Retention

PIECE_BYTES = 128 << 20
"""Most bytes of a piece: less than a second of a slow disk. A larger chunk is a piece by itself."""
QUEUED = 8
"""Most conversations that wait to be read."""
LIMIT_S = 60.0
"""A piece begins within this many seconds of the call. Later, the turn has probably come."""
PAUSE_S = 0.02
"""Between two looks at whether a piece may begin."""
ROOM = 0.8
"""LMCache evicts while more than this share of memory is used. Reads that fill more could leave
stores without room.
"""

DONE, PART, NOTHING, LATE, BUSY = ENDS = ("done", "part", "nothing", "late", "busy")
"""How a read can end: all chunks are in memory, some are; the tiers know no such conversation or
have no store; the time was over; the queue was full.
"""


class ReadAhead:
    """Reads the conversations that ask() names, one after the other. Threads may share it.

    is_loading: whether chunks are being loaded from a store.
    """

    def __init__(
        self,
        retention: Retention,
        is_loading: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._retention = retention
        self._is_loading = is_loading
        self._clock = clock
        self._asked: OrderedDict[str, float] = OrderedDict()  # conversation → when
        self._changed = threading.Condition()
        self._ended = Counter(
            "slipway_kv_prefetches",
            "Conversations to be read into memory before their next turn, by what became of it.",
            ["end"],
            registry=registry,
        )
        for end in ENDS:
            self._ended.labels(end)
        self._chunks = Counter(
            "slipway_kv_prefetched_chunks",
            "Chunks that were read from a store into memory before a request asked for them.",
            registry=registry,
        )

    def ask(self, session: str) -> bool:
        """Have a conversation read soon. Returns whether it will be tried."""
        with self._changed:
            if session in self._asked:
                return True
            if len(self._asked) >= QUEUED:
                self._ended.labels(BUSY).inc()
                return False
            self._asked[session] = self._clock()
            self._changed.notify()
        return True

    def keep(self, context: Any) -> None:
        """Read the conversations in the queue. Never returns. context: the engine's in LMCache."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked)
                session, asked = self._asked.popitem(last=False)
            self.prefetch(context, session, asked + LIMIT_S)

    def prefetch(self, context: Any, session: str, until: float) -> None:
        """Read a conversation. until: when the last piece may begin, by the clock."""
        storage: StorageManager = context.storage_manager
        lease = self._retention.lease(session)
        rows = _rows(lease.keys, context.layout_desc_registry) if lease else ()
        end = DONE if rows and storage.l2_adapters() else NOTHING
        if end is DONE:
            for piece in pieces(rows):
                if not self._may_begin(storage, until):
                    end = LATE
                    break
                if not self._load(storage, piece):  # what comes after a gap is of no use
                    end = PART
                    break
        self._ended.labels(end).inc()

    def _may_begin(self, storage: StorageManager, until: float) -> bool:
        """Wait until no request loads and memory has room. Returns False if that took too long."""
        while self._clock() < until:
            used, size = storage.get_l1_usage()
            if used < ROOM * size and not self._is_loading():
                return True
            time.sleep(PAUSE_S)
        return False

    def _load(self, storage: StorageManager, piece: list[GroupedObjectKeys]) -> bool:
        """Load a piece. Returns whether all of it is in memory now."""
        spec = PrefetchTaskSpec(
            key_groups=piece, fetching_policy="full", lock_mode=PrefetchLockMode.NO_LOCK
        )
        handle = storage.submit_prefetch_task(spec)
        while not storage.wait_prefetch_status(handle, LIMIT_S):
            pass  # a store hangs; a further read would only add to its work
        found = storage.query_prefetch_status(handle)
        if found is None:
            return False
        self._chunks.inc(found.l2_hit_count / len(piece))
        return bool(found.l1_hit_count + found.l2_hit_count == handle.total_requested_keys)


def _rows(keys: Sequence[ObjectKey], registry: Any) -> Sequence[GroupedObjectKeys]:
    """Return the chunks by group of layers and rank, as LMCache looks them up; empty if the engine
    is not registered. keys: in the prompt's order. registry: LMCache's LayoutDescRegistry.
    """
    model, world = keys[0].model_name, ObjectKey.WorldSizeFromKVRank(keys[0].kv_rank)
    layouts: Mapping[int, MemoryLayoutDesc] | None
    if not (layouts := registry.find_group_layout_descs(model, world)):
        return ()
    windows: Sequence[int] = registry.find_attn_desc(model, world).num_chunks_in_sw
    rows = defaultdict[tuple[int, int], list[ObjectKey]](list)
    for key in keys:
        rows[key.object_group_id, key.kv_rank].append(key)
    return [
        GroupedObjectKeys(row, group, layouts[group], windows[group])
        for (group, _), row in rows.items()
    ]


def pieces(rows: Sequence[GroupedObjectKeys]) -> Iterator[list[GroupedObjectKeys]]:
    """Yield the rows in pieces, each a part of some rows, the beginning first. Layers with an
    attention window need only the last chunks.
    """
    by_window = defaultdict[int, list[GroupedObjectKeys]](list)
    for row in rows:
        by_window[row.sliding_window_size].append(row)
    for window, alike in by_window.items():
        length = len(alike[0].keys)
        step = max(PIECE_BYTES // sum(_chunk_bytes(row.layout_desc) for row in alike), 1)
        for start in range(0 if window < 0 else max(length - window, 0), length, step):
            yield [
                GroupedObjectKeys(
                    row.keys[start : start + step], *(row.object_group_id, row.layout_desc)
                )
                for row in alike
            ]


def _chunk_bytes(layout: MemoryLayoutDesc) -> int:
    return sum(
        math.prod(shape) * dtype.itemsize
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    )
