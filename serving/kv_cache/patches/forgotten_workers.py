# SPDX-License-Identifier: Apache-2.0
"""In the cache server: a worker whose KV caches are not registered is told so by its next ping.

What it does: LMCache's server (0.5.6) answers every ping with True. Here it answers the first ping
of a worker that it does not know with False. The worker then counts it as away, gives up what it
has asked of it, and at its next ping registers its KV caches anew.

Why: LMCache registers them anew only after a ping without an answer. A server that is started
again between two pings misses none, and neither does one that has forgotten a worker which was
silent for too long. Where the server copies KV by itself, as on GPUs, it refuses each store of such
a worker with an answer, so that nothing else tells the worker either.

Without it: that worker neither stores nor finds anything until it ends, and a request whose load
was under way when the server ended waits until then. The cache server does not start where
`applies()` is false.
"""

import functools
import inspect
from typing import Any

from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
from lmcache.v1.multiprocess.modules.management import ManagementModule

_REGISTERED = {
    LMCacheDrivenTransferModule: "_cache_contexts",
    EngineDrivenTransferModule: "_engine_driven_contexts",
}
"""Where each module that copies KV keeps the workers that it knows, by their numbers."""
_TOLD = "_slipway_told"
_MOST_TOLD = 1000


def applies() -> bool:
    """Whether LMCache keeps what it knows of workers in these places, and has such a ping."""
    return (
        [*inspect.signature(ManagementModule.ping).parameters] == ["self", "instance_id"]
        and "self._liveness_targets = " in inspect.getsource(ManagementModule.__init__)
        and all(f"self.{name}: dict[" in inspect.getsource(it) for it, name in _REGISTERED.items())
    )


def apply() -> None:
    """Raises RuntimeError where it does not apply."""
    if not applies():
        raise RuntimeError(f"{__name__} does not fit the installed version of LMCache")
    ManagementModule.ping = _telling(ManagementModule.ping)


def _telling(ping: Any) -> Any:
    @functools.wraps(ping)  # with the attributes by which LMCache finds its handlers
    def pinged(self: Any, instance_id: int | None) -> bool:
        answer: bool = ping(self, instance_id)
        if instance_id is None:
            return answer
        told: dict[int, None] = vars(self).setdefault(_TOLD, {})
        if _knows(self, instance_id):
            told.pop(instance_id, None)
            return answer
        if instance_id in told:  # by the next ping it registers
            del told[instance_id]
            return answer
        if len(told) >= _MOST_TOLD:
            told.clear()
        told[instance_id] = None
        return False

    return pinged


def _knows(self: Any, instance_id: int) -> bool:
    return any(
        instance_id in getattr(target, name)
        for target in self._liveness_targets
        for kind, name in _REGISTERED.items()
        if isinstance(target, kind)
    )
