# SPDX-License-Identifier: Apache-2.0
"""LMCache's eviction knows the conversations that requests belong to."""

import functools
from typing import Any

from serving.patching.patch import CACHE_SERVER, Name, Patch, replace

_CONTROLLER = "lmcache.v1.distributed.storage_controllers.eviction_controller"
_LOOKUP = "lmcache.v1.multiprocess.modules.lookup"


def _put(retention: Any) -> None:
    """retention: of serving/kv_cache/lmcache, with the policies of eviction and the leases."""
    from lmcache.v1.distributed.storage_controllers import eviction_controller
    from lmcache.v1.multiprocess.modules.lookup import LookupModule

    def creating(create: Any) -> Any:
        @functools.wraps(create)
        def created(config: Any) -> Any:
            return retention.policy() if config.eviction_policy == "LRU" else create(config)

        return created

    def ending(end: Any) -> Any:
        from lmcache.logging import init_logger

        log = init_logger(__name__)

        @functools.wraps(end)
        def ended(self: Any, request_id: str) -> None:
            try:
                told = _of(self, request_id)  # before LMCache forgets the request
            except Exception:
                log.exception("the chunks of a request that ends are not known")
                told = None
            end(self, request_id)
            if told:
                try:
                    retention.on_request_end(*told)
                except Exception:
                    log.exception("the end of a request changes no lease")

        return ended

    replace(eviction_controller, "CreateEvictionPolicy", creating)
    replace(LookupModule, "end_session", ending)


def _of(module: Any, request_id: str) -> tuple[Any, list[Any]] | None:
    """Return a request's configs and its chunks in order, or None if it was not looked up."""
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    session = module._ctx.session_manager.get(request_id)
    if session is None or session.lookup_ipc_key is None:
        return None
    hashes = [TokenHasher.hash_to_bytes(it) for it in session.get_hashes(0)]
    places = {it: place for place, it in enumerate(hashes)}
    keys = module._all_object_keys(session.lookup_ipc_key, hashes)
    keys.sort(key=lambda key: places[key.chunk_hash])
    return session.lookup_ipc_key.request_configs, keys


PATCH = Patch(
    name="retained_sessions",
    process=CACHE_SERVER,
    names=(
        Name(f"{_CONTROLLER}:", says=("CreateEvictionPolicy(eviction_config)",)),
        Name(f"{_LOOKUP}:LookupModule.end_session", "self, request_id"),
        Name(f"{_LOOKUP}:LookupModule._all_object_keys", "self, key, chunk_hashes"),
        Name("lmcache.v1.multiprocess.session:Session", has=("lookup_ipc_key",)),
        Name("lmcache.v1.multiprocess.session:SessionManager.get", "self, request_id"),
        Name(
            "lmcache.v1.distributed.eviction_policy.lru:LRUEvictionPolicy",
            has=("_lock", "_order", "_destinations", "_default_destination"),
        ),
    ),
    does="Evicts chunks of ended conversations first, and those of paused conversations last.",
    why="LMCache's LRU knows no conversations: while one pauses, prompts that never come again "
    "push its KV out.",
    without="hints about the lifetime of KV have no effect on the tiers",
    closed=False,
    put=_put,
)
