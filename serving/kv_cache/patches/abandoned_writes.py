# SPDX-License-Identifier: Apache-2.0
"""In the cache server: what a worker had reserved and not written is dropped when it goes.

What it does: replaces the step by which LMCache's server (0.5.6) releases the reservations of a
worker that unregisters, or that has been silent for too long. It finishes them, here they are
discarded; reads under way it ends as before.

Why: where engines copy KV by themselves, as without GPUs, a worker reserves memory, writes into it
and commits. A finished reservation is readable, and is stored on the disk and in the shared store.
So the memory of a worker that died in between, which nobody has written, would be KV that the next
server loads.

Not covered: a worker that is stopped for longer than LMCache waits (120 s) and then goes on writing
into memory that may have another owner by then. The supervisor of several copies starts a copy
again only when nothing of the one before it is left.

Upstream: docs/upstream/abandoned_writes.md.

Without it: answers from memory that nobody has written, after a copy of the model died while it
stored. The cache server does not start where `applies()` is false.
"""

import inspect
from typing import Any

from lmcache.v1.distributed import l1_manager, storage_manager
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule

_FINISHING = """\
        for obj_keys in write_obj_keys:
            if obj_keys:
                self._ctx.storage_manager.finish_write(obj_keys)
"""
_DISCARD = "finish_write_and_delete"
_DISCARDING = f"""\
    def {_DISCARD}(
        self,
        keys: list[ObjectKey],
        tag: str = "",
    )"""
_TAG = "_L1_WRITE_TAG"
_MANAGERS = "_l1_managers_by_id"


def applies() -> bool:
    """Whether LMCache releases reservations so, and has these names by which to discard them."""
    release = getattr(EngineDrivenTransferModule, "_release_entry", None)
    return (
        release is not None
        and [*inspect.signature(release).parameters] == ["self", "instance_id", "entry"]
        and _FINISHING in inspect.getsource(release)
        and _DISCARDING in inspect.getsource(l1_manager)
        and f"finish_write(keys, tag={_TAG})" in inspect.getsource(storage_manager)
        and f"self.{_MANAGERS}" in inspect.getsource(storage_manager)
    )


def apply() -> None:
    """Raises RuntimeError where it does not apply."""
    if not applies():
        raise RuntimeError(f"{__name__} does not fit the installed version of LMCache")
    release = EngineDrivenTransferModule._release_entry

    def released(self: Any, instance_id: int, entry: Any) -> None:
        with self._pending_shm_lock:
            writes = self._pending_shm_writes
            stale = [key for key in writes if key[0] == instance_id]
            keys = [it for key in stale for it in writes.pop(key)]
        if keys:
            tag = getattr(storage_manager, _TAG)
            for manager in getattr(self._ctx.storage_manager, _MANAGERS).values():
                getattr(manager, _DISCARD)(keys, tag)
        release(self, instance_id, entry)  # which finds no writes any more

    EngineDrivenTransferModule._release_entry = released
