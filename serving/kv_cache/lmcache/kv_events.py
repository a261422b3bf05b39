# SPDX-License-Identifier: Apache-2.0
"""In LMCache's server: which of its memory's changes engines report to routers.

LMCache (0.5.6) reports a chunk with its tokens, by a hash that knows no salt. It learns the tokens
only where it copies KV itself, which takes a GPU. And it takes a chunk of one tenant for the same
chunk of all.
"""

import functools
from typing import Any

from lmcache.v1.mp_observability.event import Event
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
from lmcache.v1.multiprocess.modules.kv_events import KVEventModule
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule


def report_what_all_share() -> None:
    """Have LMCache's server report the chunks that all requests share, and no others."""
    KVEventModule._record_kv_event = _without_salts(KVEventModule._record_kv_event)
    EngineDrivenTransferModule.prepare_store = _with_tokens(
        EngineDrivenTransferModule.prepare_store
    )


def _without_salts(record: Any) -> Any:
    @functools.wraps(record)
    def recorded(self: KVEventModule, event: Event) -> None:
        keys = event.metadata.get("keys")
        if keys is None:  # tokens: a hash has the same for all
            record(self, event)
        elif shared := [key for key in keys if not key.cache_salt]:
            ours = Event(event_type=event.event_type, metadata={**event.metadata, "keys": shared})
            record(self, ours)

    return recorded


def _with_tokens(prepare: Any) -> Any:
    @functools.wraps(prepare)
    def prepared(self: EngineDrivenTransferModule, key: IPCCacheServerKey, instance_id: int) -> Any:
        if not key.cache_salt and not key.worker_id:  # the others have the same tokens
            keys = self._resolve_single_group_obj_keys(key)
            LMCacheDrivenTransferModule._publish_token_bindings(self, key, keys)
        return prepare(self, key, instance_id)

    return prepared
