# SPDX-License-Identifier: Apache-2.0
"""Engines report to routers the chunks that all requests share, and no others. The server keeps the
reports in little memory.
"""

import dataclasses
import functools
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from serving.patching.patch import CACHE_SERVER, Name, Patch, replace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache.v1.mp_observability.event import Event
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

_MODULES = "lmcache.v1.multiprocess.modules"


def _put_salts() -> None:
    from lmcache.v1.multiprocess.modules.kv_events import KVEventModule

    replace(KVEventModule, "_record_kv_event", _without_salts)


def _without_salts(record: Any) -> Any:
    @functools.wraps(record)
    def recorded(self: Any, event: "Event") -> None:
        keys = event.metadata.get("keys")
        if keys is None:  # an event of tokens; a hash has the same tokens for all tenants
            record(self, event)
        elif shared := [key for key in keys if not key.cache_salt]:
            metadata = {**event.metadata, "keys": shared}
            record(self, type(event)(event_type=event.event_type, metadata=metadata))

    return recorded


def _put_tokens() -> None:
    from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
    from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule

    publish = LMCacheDrivenTransferModule._publish_token_bindings

    def make(prepare: Any) -> Any:
        @functools.wraps(prepare)
        def prepared(self: Any, key: "IPCCacheServerKey", instance_id: int) -> Any:
            if not key.cache_salt and not key.worker_id:  # other workers have the same tokens
                publish(self, key, self._resolve_single_group_obj_keys(key))
            return prepare(self, key, instance_id)

        return prepared

    replace(EngineDrivenTransferModule, "prepare_store", make)


def _put_packed() -> None:
    from lmcache.v1.multiprocess.modules.kv_events import KVEventModule

    replace(KVEventModule, "__init__", _with_packed_bindings)
    replace(KVEventModule, "_append_kv_event", _packed)
    replace(KVEventModule, "read_kv_events", _unpacked)


class _Bindings(OrderedDict[bytes, "tuple[Sequence[int], bytes | None]"]):
    """A chunk's hash → its tokens and the hash of the chunk before it."""

    def __setitem__(self, name: bytes, binding: "tuple[Sequence[int], bytes | None]") -> None:
        tokens, parent = binding
        super().__setitem__(name, (array("I", tokens), parent))


def _with_packed_bindings(init: Any) -> Any:
    @functools.wraps(init)
    def initialised(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._kv_event_bindings = _Bindings()

    return initialised


def _packed(append: Any) -> Any:
    @functools.wraps(append)
    def appended(self: Any, *args: Any) -> None:
        append(self, *args)
        tokens = args[4] if len(args) > 4 else ()
        if tokens:  # the ones of the binding, without a copy
            self._kv_event_log[-1].token_ids = tokens

    return appended


def _unpacked(batch_of: Any) -> Any:
    @functools.wraps(batch_of)
    def events(self: Any, model_name: str, cursor: int, max_events: int) -> Any:
        batch = batch_of(self, model_name, cursor, max_events)
        batch.events = [
            dataclasses.replace(it, token_ids=list(it.token_ids)) for it in batch.events
        ]
        return batch

    return events


SALTS = Patch(
    name="salted_events",
    process=CACHE_SERVER,
    names=(
        Name(f"{_MODULES}.kv_events:KVEventModule._record_kv_event", "self, event"),
        Name("lmcache.v1.mp_observability.event:Event", has=("event_type", "metadata")),
        Name("lmcache.v1.distributed.api:ObjectKey", has=("cache_salt",)),
    ),
    does="Excludes tenants' chunks from the events for routers.",
    why="LMCache reports a chunk by a hash without the salt, and treats the chunk of one tenant "
    "as the same chunk of all.",
    without="routers would learn tenants' prompts, and send other tenants' requests to their "
    "servers",
    closed=True,
    put=_put_salts,
)
TOKENS = Patch(
    name="event_tokens",
    process=CACHE_SERVER,
    names=(
        Name(
            f"{_MODULES}.engine_driven_transfer:EngineDrivenTransferModule.prepare_store",
            "self, key, instance_id",
        ),
        Name(
            f"{_MODULES}.engine_driven_transfer:EngineDrivenTransferModule",
            has=("_resolve_single_group_obj_keys",),
        ),
        Name(
            f"{_MODULES}.lmcache_driven_transfer:LMCacheDrivenTransferModule._publish_token_bindings",
            "self, key, obj_keys",
        ),
    ),
    does="Adds the tokens to events of chunks that an engine copies itself.",
    why="LMCache learns the tokens only if it copies KV itself, which needs a GPU.",
    without="routers do not learn the contents of the tiers of engines without a GPU",
    closed=False,
    put=_put_tokens,
)
PACKED = Patch(
    name="packed_events",
    process=CACHE_SERVER,
    names=(
        Name(
            f"{_MODULES}.kv_events:KVEventModule",
            has=("_kv_event_bindings", "_kv_event_log"),
        ),
        Name(
            f"{_MODULES}.kv_events:KVEventModule._append_kv_event",
            "self, kind, model_name, hashes, parent, tokens",
        ),
        Name(
            f"{_MODULES}.kv_events:KVEventModule.read_kv_events",
            "self, model_name, cursor, max_events",
        ),
        Name("lmcache.v1.multiprocess.custom_types:KVEventRecord", has=("token_ids",)),
    ),
    does="Keeps the tokens of chunks in 4 bytes each.",
    why="LMCache keeps the tokens of up to 65,536 stored chunks, and of the last events, as lists "
    "of Python's numbers: 36 bytes a token, or 600 MiB with chunks of 256 tokens.",
    without="the cache server takes up to nine times the memory for its events",
    closed=False,
    put=_put_packed,
)
