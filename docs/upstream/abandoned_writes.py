# SPDX-License-Identifier: Apache-2.0
"""See abandoned_writes.md. Needs LMCache, and no engine."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule

SIZE = 16 << 20
WORKER = 1


class Key:
    """A request's key, which the module only hands on."""

    request_id = "a"


def main() -> None:
    name = f"lmcache_l1_pool_report_{os.getpid()}"
    memory = L1MemoryManagerConfig(size_in_bytes=SIZE, use_lazy=False, shm_name=name)
    storage = StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
        )
    )
    chunk = ObjectKey(chunk_hash=b"0" * 32, model_name="m", kv_rank=0)
    session = SimpleNamespace(extras={})
    context: Any = SimpleNamespace(
        storage_manager=storage,
        chunk_size=128,
        shm_pool_info={"shm_name": name, "pool_size": SIZE},
        resolve_obj_keys=lambda key, groups: [[chunk]],
        get_read_owners=lambda *_: None,
        session_manager=SimpleNamespace(get_or_create=lambda _: session),
        layout_desc_registry=SimpleNamespace(register=lambda *_: None, unregister=lambda *_: None),
    )
    module = EngineDrivenTransferModule(context)
    module.register_kv_cache_engine_driven_context(
        SimpleNamespace(
            instance_id=WORKER,
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
    key: Any = Key()
    module.prepare_store(key, WORKER)
    module.unregister_kv_cache(WORKER)
    manager = storage._l1_manager
    found = [it for it, got in manager.reserve_read([chunk]).items() if got[1] is not None]
    manager.finish_read(found)
    print(f"readable though nobody has written it: {len(found)} chunk")
    storage.close()
    Path(f"/dev/shm/{name}").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
