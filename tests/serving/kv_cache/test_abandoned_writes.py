# SPDX-License-Identifier: Apache-2.0
"""Memory that a worker has reserved in the cache server, and never written.

The classes are LMCache's own: its storage, and its module for engines that copy by themselves.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule

from serving.kv_cache.patches import abandoned_writes

DEAD, LIVING = 1, 2
SIZE = 16 << 20


class Key:
    """A request's key; the module only passes it on."""

    def __init__(self, request_id):
        self.request_id = request_id


@pytest.fixture
def cache():
    name = f"lmcache_l1_pool_test_{os.getpid()}"
    memory = L1MemoryManagerConfig(size_in_bytes=SIZE, use_lazy=False, shm_name=name)
    config = StorageManagerConfig(
        l1_manager_config=L1ManagerConfig(memory_config=memory),
        eviction_config=EvictionConfig(eviction_policy="LRU"),
    )
    storage = StorageManager(config)
    chunk = ObjectKey(chunk_hash=b"0" * 32, model_name="m", kv_rank=0)
    sessions = {}
    context = SimpleNamespace(
        storage_manager=storage,
        chunk_size=128,
        shm_pool_info={"shm_name": name, "pool_size": SIZE},
        resolve_obj_keys=lambda key, groups: [[chunk]],
        get_read_owners=lambda *_: None,
        session_manager=SimpleNamespace(
            get_or_create=lambda it: sessions.setdefault(it, SimpleNamespace(extras={}))
        ),
        layout_desc_registry=SimpleNamespace(register=lambda *_: None, unregister=lambda *_: None),
    )
    module = EngineDrivenTransferModule(context)
    for number in (DEAD, LIVING):
        module.register_kv_cache_engine_driven_context(
            SimpleNamespace(
                instance_id=number,
                model_name="m",
                world_size=1,
                block_size=16,
                num_layers=2,
                hidden_dim_size=64,
                dtype_str="float32",
                use_mla=False,
                num_physical_slots=None,
            )
        )
    yield SimpleNamespace(module=module, storage=storage, chunk=chunk)
    storage.close()
    Path(f"/dev/shm/{name}").unlink(missing_ok=True)


@pytest.fixture
def patched(monkeypatch):
    release = EngineDrivenTransferModule._release_entry
    monkeypatch.setattr(EngineDrivenTransferModule, "_release_entry", release)
    abandoned_writes.PATCH.apply()


def readable(cache):
    """How many chunks another worker would load."""
    manager = cache.storage._l1_manager
    found = [key for key, it in manager.reserve_read([cache.chunk]).items() if it[1] is not None]
    manager.finish_read(found)
    return len(found)


def goes(cache, number, how):
    if how == "unregisters":
        cache.module.unregister_kv_cache(number)
    else:
        for it in cache.module._engine_driven_contexts.values():
            it.last_seen -= 1000 * (it is cache.module._engine_driven_contexts[number])
        assert cache.module.reap_stale_instances(120, 300) == [number]


@pytest.mark.parametrize("how", ["unregisters", "is silent"])
def test_what_a_worker_has_not_written_is_not_there_when_it_goes(cache, patched, how):
    assert cache.module.prepare_store(Key("a"), DEAD).context["slots"]
    assert readable(cache) == 0
    used = cache.storage.get_l1_usage()[0]
    goes(cache, DEAD, how)
    assert readable(cache) == 0
    assert cache.storage.get_l1_usage()[0] < used  # its memory is free
    key = Key("b")  # ... and another worker can store the same
    assert cache.module.prepare_store(key, LIVING).context["slots"]
    assert cache.module.commit_store(key, LIVING, b"")
    assert readable(cache) == 1


def test_what_another_worker_writes_is_kept(cache, patched):
    key = Key("b")
    cache.module.prepare_store(key, LIVING)
    cache.module.prepare_store(Key("a"), DEAD)  # refused: it is reserved
    goes(cache, DEAD, "unregisters")
    assert cache.module.commit_store(key, LIVING, b"")
    assert readable(cache) == 1


def test_what_was_committed_stays_when_its_worker_goes(cache, patched):
    key = Key("a")
    cache.module.prepare_store(key, DEAD)
    assert cache.module.commit_store(key, DEAD, b"")
    goes(cache, DEAD, "is silent")
    assert readable(cache) == 1


def test_lmcache_itself_has_it_readable(cache):
    """The defect that the patch mends. If this fails, LMCache has mended it."""
    cache.module.prepare_store(Key("a"), DEAD)
    goes(cache, DEAD, "unregisters")
    assert readable(cache) == 1
