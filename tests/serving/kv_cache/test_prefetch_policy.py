# SPDX-License-Identifier: Apache-2.0
"""Which chunks are loaded from a store, by the store's measured speed and the engine's."""

import pytest
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.storage_controllers.utils import Bitmap2D, MapState
from lmcache.v1.mp_observability.event import Event, EventType
from prometheus_client import CollectorRegistry

from serving.kv_cache.lmcache import prefetch_policy
from serving.kv_cache.lmcache.prefetch_policy import CostAwarePrefetch

CHUNKS = 8
CHUNK_SIZE = 1000  # bytes of a chunk's KV
DISK, SHARED = 0, 1


class Described:
    type_name = "a store"


@pytest.fixture
def policy():
    return CostAwarePrefetch(CollectorRegistry())


def load(policy: CostAwarePrefetch, store: int, size: int, seconds: float, task: int = 1) -> None:
    """A load that began at 100 s; one of 0 s is still in flight."""
    about = {"adapter_index": store, "task_id": task, "total_bytes": size}
    submitted, completed = EventType.L2_LOAD_TASK_SUBMITTED, EventType.L2_LOAD_TASK_COMPLETED
    handlers = policy.get_subscriptions()
    handlers[submitted](Event(submitted, timestamp=100.0, metadata=about))
    if seconds:
        handlers[completed](Event(completed, timestamp=100.0 + seconds, metadata=about))


def cells(chunks) -> Bitmap2D:
    found = Bitmap2D.zeros(1, CHUNKS)
    for chunk in chunks:
        found[0].set(chunk)
    return found


def planned(policy: CostAwarePrefetch, memory, by="prefix", **stores) -> dict[int, list[int]]:
    """The chunks that are loaded from each store. memory, stores: the chunks that they have. by:
    LMCache's policy.
    """
    keys = [ObjectKey(bytes([chunk]), "model", 0) for chunk in range(CHUNKS)]
    layout = MemoryLayoutDesc([torch.Size([CHUNK_SIZE // 2])], [torch.bfloat16])
    l1, l2 = MapState(), MapState()
    l1[0] = cells(memory)
    for index, chunks in stores.items():
        l2[{"disk": DISK, "shared": SHARED}[index]] = cells(chunks)
    described = {DISK: Described(), SHARED: Described()}
    plan = policy.plan_load([GroupedObjectKeys(keys, 0, layout)], l1, l2, {0: None}, described, by)
    return {index: row[0].get_indices_list() for index, row in plan.l2_planned_keys.items()}


ALL = [*range(CHUNKS)]


def test_how_fast_a_store_is_can_be_seen():
    registry = CollectorRegistry()
    policy = CostAwarePrefetch(registry)
    planned(policy, [], disk=ALL)
    load(policy, DISK, 4_000, 2.0)
    labels = {"l2_name": "a store"}
    assert registry.get_sample_value("slipway_kv_load_seconds_per_byte", labels) == 0.0005


def test_a_store_is_trusted_until_it_was_measured(policy):
    assert planned(policy, [], disk=ALL) == {DISK: ALL}
    policy.seconds_per_chunk = 1e-9
    assert planned(policy, [], disk=ALL) == {DISK: ALL}


@pytest.mark.parametrize(("seconds", "loaded"), [(0.5, ALL), (0.9, ALL), (1.2, [])])
def test_a_load_has_to_be_quicker_than_computing(policy, seconds, loaded):
    policy.seconds_per_chunk = 1.0
    load(policy, DISK, CHUNK_SIZE, seconds)
    assert planned(policy, [], disk=ALL) == ({DISK: loaded} if loaded else {})


def test_a_slow_store_is_tried_with_the_first_chunk_that_is_missing(policy, monkeypatch):
    policy.seconds_per_chunk = 1.0
    load(policy, DISK, CHUNK_SIZE, 10)
    for now, loaded in ((0.0, {}), (990.0, {}), (1001.0, {DISK: [2]}), (1002.0, {})):
        monkeypatch.setattr(prefetch_policy, "monotonic", lambda now=now: now)
        assert planned(policy, [0, 1], disk=ALL) == loaded


def test_a_store_that_was_slow_is_used_again(policy):
    policy.seconds_per_chunk = 1.0
    load(policy, DISK, CHUNK_SIZE, 10)
    assert planned(policy, [], disk=ALL) == {}
    for task in range(20):
        load(policy, DISK, CHUNK_SIZE, 0.1, task)
    assert planned(policy, [], disk=ALL) == {DISK: ALL}


def test_what_is_under_way_comes_first(policy):
    policy.seconds_per_chunk = 1.0
    load(policy, DISK, CHUNK_SIZE, 0.5, task=1)
    load(policy, DISK, 20 * CHUNK_SIZE, 0, task=2)
    assert planned(policy, [], disk=ALL) == {}


def test_only_the_slow_store_is_left_out(policy):
    policy.seconds_per_chunk = 1.0
    load(policy, SHARED, CHUNK_SIZE, 10)
    load(policy, DISK, CHUNK_SIZE, 0.1)
    found = planned(policy, [0], disk=[1, 2], shared=ALL)
    assert found == {DISK: [1, 2]}


def test_a_read_ahead_costs_the_engine_no_time_and_leaves_slow_stores_alone(policy):
    policy.seconds_per_chunk = 1.0
    load(policy, DISK, CHUNK_SIZE, 0.5)
    load(policy, DISK, 20 * CHUNK_SIZE, 0, task=2)
    assert planned(policy, [], disk=ALL) == {}
    assert planned(policy, [0], by="full", disk=ALL) == {DISK: ALL[1:]}
    load(policy, SHARED, CHUNK_SIZE, 10)
    assert planned(policy, [], shared=ALL) == {}
    assert planned(policy, [], by="full", disk=[0], shared=ALL) == {DISK: [0]}


def test_whether_chunks_are_being_loaded(policy):
    assert not policy.is_loading()
    load(policy, DISK, CHUNK_SIZE, 0)
    assert policy.is_loading()
    load(policy, DISK, CHUNK_SIZE, 1)
    assert not policy.is_loading()
