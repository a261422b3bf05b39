# SPDX-License-Identifier: Apache-2.0
"""A worker's reserved but unwritten memory is discarded when the worker ends.

Not covered: a worker that is stopped for longer than LMCache waits (120 s), and then continues to
write into memory that may have another owner by then. The supervisor of several copies restarts a
copy only after all processes of the old one have ended.
"""

import functools
from typing import Any

from serving.patching.patch import CACHE_SERVER, Name, Patch, replace

_DISCARD = "finish_write_and_delete"
_TAG = "_L1_WRITE_TAG"
_MANAGERS = "_l1_managers_by_id"


def _put() -> None:
    from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule

    replace(EngineDrivenTransferModule, "_release_entry", _discarding)


def _discarding(release: Any) -> Any:
    from lmcache.v1.distributed import storage_manager

    @functools.wraps(release)
    def released(self: Any, instance_id: int, entry: Any) -> None:
        with self._pending_shm_lock:
            writes = self._pending_shm_writes
            stale = [key for key in writes if key[0] == instance_id]
            keys = [it for key in stale for it in writes.pop(key)]
        if keys:
            tag = getattr(storage_manager, _TAG)
            for manager in getattr(self._ctx.storage_manager, _MANAGERS).values():
                getattr(manager, _DISCARD)(keys, tag)
        release(self, instance_id, entry)  # it finds no writes any more

    return released


_STORAGE = "lmcache.v1.distributed"
PATCH = Patch(
    name="abandoned_writes",
    process=CACHE_SERVER,
    names=(
        Name(
            "lmcache.v1.multiprocess.modules.engine_driven_transfer:"
            "EngineDrivenTransferModule._release_entry",
            "self, instance_id, entry",
            says=("self._ctx.storage_manager.finish_write(obj_keys)",),
        ),
        Name(
            "lmcache.v1.multiprocess.modules.engine_driven_transfer:EngineDrivenTransferModule",
            has=("_pending_shm_lock", "_pending_shm_writes"),
        ),
        Name(f"{_STORAGE}.l1_manager:L1Manager", says=(f"def {_DISCARD}(",)),  # it is decorated
        Name(
            f"{_STORAGE}.storage_manager:",
            says=(f"finish_write(keys, tag={_TAG})", f"self.{_MANAGERS}"),
        ),
    ),
    does="Discards the reservations of a worker that unregisters, or that has been silent for too "
    "long; LMCache would finish them. Reads in progress end as before.",
    why="If engines copy KV themselves, as without GPUs, a worker reserves memory, writes into it "
    "and commits. LMCache treats a finished reservation as readable, and stores it on the disk "
    "and in the shared store, although its memory may be unwritten.",
    without="after a copy of the model died during a store, the next server could load unwritten "
    "memory",
    closed=True,
    upstream="[abandoned_writes](../upstream/abandoned_writes.md)",
    put=_put,
)
