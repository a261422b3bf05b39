# SPDX-License-Identifier: Apache-2.0
"""A worker whose KV caches are not registered learns that from its next ping."""

import functools
from collections.abc import Mapping
from typing import Any

from serving.patching.patch import CACHE_SERVER, Name, Patch, replace

_TOLD = "_slipway_told"
_MOST_TOLD = 1000


def _put() -> None:
    from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
    from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
    from lmcache.v1.multiprocess.modules.management import ManagementModule

    # The attribute of each module that copies KV with its registered workers, by their numbers.
    registered = {
        LMCacheDrivenTransferModule: "_cache_contexts",
        EngineDrivenTransferModule: "_engine_driven_contexts",
    }
    replace(ManagementModule, "ping", functools.partial(_telling, registered=registered))


def _telling(ping: Any, registered: Mapping[type, str]) -> Any:
    @functools.wraps(ping)  # keeps the attributes that mark LMCache's handlers
    def pinged(self: Any, instance_id: int | None) -> bool:
        answer: bool = ping(self, instance_id)
        if instance_id is None:
            return answer
        told: dict[int, None] = vars(self).setdefault(_TOLD, {})
        if _knows(self, instance_id, registered):
            told.pop(instance_id, None)
            return answer
        if instance_id in told:  # it registers before its next ping
            del told[instance_id]
            return answer
        if len(told) >= _MOST_TOLD:
            told.clear()
        told[instance_id] = None
        return False

    return pinged


def _knows(self: Any, instance_id: int, registered: Mapping[type, str]) -> bool:
    return any(
        instance_id in getattr(target, name)
        for target in self._liveness_targets
        for kind, name in registered.items()
        if isinstance(target, kind)
    )


_MODULES = "lmcache.v1.multiprocess.modules"
PATCH = Patch(
    name="forgotten_workers",
    process=CACHE_SERVER,
    names=(
        Name(f"{_MODULES}.management:ManagementModule.ping", "self, instance_id"),
        Name(f"{_MODULES}.management:ManagementModule", has=("_liveness_targets",)),
        Name(
            f"{_MODULES}.lmcache_driven_transfer:LMCacheDrivenTransferModule",
            says=("self._cache_contexts: dict[",),
        ),
        Name(
            f"{_MODULES}.engine_driven_transfer:EngineDrivenTransferModule",
            says=("self._engine_driven_contexts: dict[",),
        ),
    ),
    does="Answers False to the first ping of a worker that the server does not know. The worker "
    "then treats the server as lost, cancels its pending requests, and registers its KV caches "
    "again.",
    why="LMCache answers every ping with True, and a worker registers again only after an "
    "unanswered ping. If the server restarts between two pings, no ping stays unanswered.",
    without="such a worker would store and find nothing until it ends, and a request with a load "
    "in progress would wait until then",
    closed=True,
    put=_put,
)
