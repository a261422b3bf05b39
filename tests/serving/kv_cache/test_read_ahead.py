# SPDX-License-Identifier: Apache-2.0
"""Reading conversations ahead of their next turns, on LMCache's own storage, with a store in memory
that LMCache has for tests.
"""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.mock_l2_adapter import MockL2AdapterConfig
from lmcache.v1.distributed.storage_controllers.prefetch_controller import PrefetchController
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.engine_context import LayoutDescRegistry
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.testclient import TestClient

from serving.kv_cache import retention_hint
from serving.kv_cache.lmcache import read_ahead, session_paths
from serving.kv_cache.lmcache.read_ahead import ReadAhead, pieces
from serving.kv_cache.lmcache.retention import Retention
from serving.kv_cache.patches import late_hits
from serving.kv_cache.session_client import PATH
from tests.support.harness.wait import until

CHUNK_BYTES = 64 << 10
LAYOUT = MemoryLayoutDesc([torch.Size([CHUNK_BYTES])], [torch.uint8])
CHUNKS = 10
SOON = 1000.0 + read_ahead.LIMIT_S


def key(place, group=0, rank=0, world=1, salt=""):
    kv_rank = ObjectKey.ComputeKVRank(world, rank, world, rank)
    return ObjectKey(bytes([place]) * 32, "m", kv_rank, object_group_id=group, cache_salt=salt)


KEYS = [key(place) for place in range(CHUNKS)]


class Reading:
    """A cache server's storage, and its reader."""

    def __init__(self, storage):
        self.storage = storage
        self.loads = False
        self.now = 1000.0
        self.registry = CollectorRegistry()
        self.retention = Retention(lambda: self.now, self.registry)
        layouts = LayoutDescRegistry()
        layouts.register("m", 1, LAYOUT)
        self.context = SimpleNamespace(storage_manager=storage, layout_desc_registry=layouts)
        self.ahead = ReadAhead(
            self.retention, lambda: self.loads, lambda: self.now, registry=self.registry
        )

    def keep(self, keys):
        """A turn of the conversation `s`, whose chunks only the store has by now."""
        (_, store), *_ = self.storage.l2_adapters()
        self.storage.reserve_write(keys, LAYOUT)
        self.storage.finish_write(keys)
        until(lambda: all(it in store._memory_objects for it in keys))
        until(lambda: self.storage.delete_l1_keys(keys) and not self.in_memory(keys))
        self.turn(keys)

    def turn(self, keys):
        hint = {retention_hint.KEY: {"session": "s", "seconds": 300}}
        self.retention.on_request_end(hint, keys)

    def in_memory(self, keys):
        return [it for it in keys if self.storage._l1_manager.get_object_state(it)]

    def read(self):
        self.ahead.prefetch(self.context, "s", SOON)

    def ends(self):
        name = "slipway_kv_prefetches_total"
        counts = {it: self.registry.get_sample_value(name, {"end": it}) for it in read_ahead.ENDS}
        return {end: count for end, count in counts.items() if count}

    @property
    def chunks(self):
        return self.registry.get_sample_value("slipway_kv_prefetched_chunks_total")


@pytest.fixture
def patched(monkeypatch):
    name = "_transition_to_load_phase"
    monkeypatch.setattr(PrefetchController, name, getattr(PrefetchController, name))
    late_hits.PATCH.apply()


@pytest.fixture
def storage():
    name = f"lmcache_l1_pool_ahead_{os.getpid()}"
    memory = L1MemoryManagerConfig(size_in_bytes=16 << 20, use_lazy=False, shm_name=name)
    made = StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig(eviction_policy="noop"),
            l2_adapter_config=L2AdaptersConfig([MockL2AdapterConfig(0.1, 10.0)]),
        )
    )
    yield made
    made.close()
    Path(f"/dev/shm/{name}").unlink(missing_ok=True)


@pytest.fixture
def reading(storage, patched):
    return Reading(storage)


def test_a_conversation_is_read_into_memory(reading, monkeypatch):
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 3 * CHUNK_BYTES)
    reading.keep(KEYS)
    reading.read()
    assert reading.in_memory(KEYS) == KEYS
    assert (reading.ends(), reading.chunks) == ({"done": 1}, CHUNKS)
    reading.read()
    assert (reading.ends(), reading.chunks) == ({"done": 2}, CHUNKS)
    deleted, locked = reading.storage.delete_l1_keys(KEYS)
    assert (deleted, locked) == (CHUNKS, 0)


def test_a_forgotten_conversation_is_in_no_tier(reading):
    reading.keep(KEYS)
    reading.read()
    app = Starlette()
    reading.context.chunk_size = 256
    app.state.engine = SimpleNamespace(context=reading.context)
    session_paths.add(app, reading.retention, None)
    with TestClient(app) as client:
        answer = client.delete(f"{PATH}/s?forget=true")
        assert answer.json() == {"tokens": CHUNKS * 256}
    assert not reading.in_memory(KEYS)
    (_, store), *_ = reading.storage.l2_adapters()
    assert not any(it in store._memory_objects for it in KEYS)


def held_back(reading):
    """The thread of a read that has loaded nothing yet."""
    thread = threading.Thread(target=reading.read)
    thread.start()
    thread.join(0.3)
    assert not reading.in_memory(KEYS)
    return thread


def test_it_yields_to_the_loads_of_requests(reading):
    reading.keep(KEYS)
    reading.loads = True
    thread = held_back(reading)
    reading.loads = False
    thread.join(20)
    assert reading.ends() == {"done": 1}


def test_it_begins_nothing_late(reading):
    reading.keep(KEYS)
    reading.now = SOON
    reading.read()
    assert (reading.ends(), reading.in_memory(KEYS)) == ({"late": 1}, [])


def test_it_leaves_room_for_stores(reading, monkeypatch):
    reading.keep(KEYS)
    monkeypatch.setattr(read_ahead, "ROOM", 0.0)
    thread = held_back(reading)
    reading.now = SOON
    thread.join(20)
    assert reading.ends() == {"late": 1}


def test_nothing_after_a_gap_is_read(reading, monkeypatch):
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 2 * CHUNK_BYTES)
    reading.keep(KEYS)
    (_, store), *_ = reading.storage.l2_adapters()
    store.delete([KEYS[2]])
    until(lambda: KEYS[2] not in store._memory_objects)
    reading.read()
    assert reading.ends() == {"part": 1}
    assert not reading.in_memory(KEYS[4:])


def test_a_conversation_that_the_tiers_do_not_know_or_that_has_ended(reading):
    reading.read()
    reading.keep(KEYS)
    reading.retention.end("s")
    reading.read()
    assert (reading.ends(), reading.in_memory(KEYS)) == ({"nothing": 2}, [])


def test_an_engine_that_is_not_registered_yet(reading):
    reading.turn([key(1, world=2)])
    reading.read()
    assert reading.ends() == {"nothing": 1}


def test_the_queue_has_each_conversation_once_and_an_end(reading):
    for number in range(read_ahead.QUEUED):
        assert reading.ahead.ask(f"s{number}")
    assert reading.ahead.ask("s0")
    assert not reading.ahead.ask("one more")
    assert reading.ends() == {"busy": 1}


def test_pieces_have_all_ranks_and_only_the_end_of_windows(monkeypatch):
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 5 * CHUNK_BYTES)

    def row(group, rank, window):
        keys = [key(place, group, rank, 2) for place in range(5)]
        return GroupedObjectKeys(keys, group, LAYOUT, window)

    rows = [row(0, 0, -1), row(0, 1, -1), row(1, 0, 2), row(1, 1, 2)]
    found = [
        [(it.object_group_id, [each.chunk_hash[0] for each in it.keys]) for it in piece]
        for piece in pieces(rows)
    ]
    assert found == [
        *([(0, [0, 1])] * 2, [(0, [2, 3])] * 2, [(0, [4])] * 2),
        [(1, [3, 4])] * 2,
    ]
    assert {it.sliding_window_size for piece in pieces(rows) for it in piece} == {-1}


@pytest.mark.parametrize("late", [[], [3]])
def test_a_chunk_that_a_read_brings_during_a_look_up_is_a_hit(reading, monkeypatch, late):
    """LMCache alone would end the hit before it."""
    reading.keep(KEYS)
    storage = reading.storage
    (_, store), *_ = storage.l2_adapters()
    query = store.query_lookup_and_lock_result

    def answering(task):
        keys = [KEYS[place] for place in late]
        storage._l1_manager.reserve_write(keys, [False] * len(keys), LAYOUT, "read")
        storage._l1_manager.finish_write(keys, "read")
        return query(task)

    monkeypatch.setattr(store, "query_lookup_and_lock_result", answering)
    handle = storage.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(KEYS, 0, LAYOUT)]))
    assert storage.wait_prefetch_status(handle, 20)
    found = storage.query_prefetch_status(handle)
    assert (found.l1_hit_count, found.l2_hit_count) == (len(late), CHUNKS - len(late))
