# SPDX-License-Identifier: Apache-2.0
"""`lmcache server` with Slipway's parts, as a program: the child of serving.kv_cache.cache_server.

Each line of standard input has the seconds that the engine takes to compute a chunk. The end of
standard input ends this process, in whatever way its parent ended.
"""

import functools
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from lmcache.cli.main import main
from lmcache.v1.distributed.storage_controllers.prefetch_policy import register_prefetch_policy
from lmcache.v1.distributed.storage_controllers.store_policy import register_store_policy
from lmcache.v1.mp_observability.event_bus import get_event_bus
from lmcache.v1.multiprocess.http_server import app

from lmi_config.plan.kv_tiers import POLICY, POLICY_SKIPPING_L1, SHARED_STORE
from serving.follow import kept_in_thread
from serving.kv_cache.lmcache import session_paths
from serving.kv_cache.lmcache.lookups import Lookups
from serving.kv_cache.lmcache.prefetch_policy import CostAwarePrefetch, CostAwareStore
from serving.kv_cache.lmcache.read_ahead import ReadAhead
from serving.kv_cache.lmcache.retention import Retention
from serving.kv_cache.lmcache.shared_store import SharedStore
from serving.kv_cache.patches import registry


def run() -> None:
    """Run the server. Raises Unfit."""
    registry.apply_start()
    retention = Retention()
    registry.apply_retention(retention)
    logging.getLogger("uvicorn.access").addFilter(lambda _: False)  # its parent asks every 2 s
    prefetch, lookups = CostAwarePrefetch(), Lookups()
    ahead = ReadAhead(retention, prefetch.is_loading) if registry.apply_read_ahead() else None
    session_paths.add(app, retention, ahead)

    def policy() -> CostAwarePrefetch:
        get_event_bus().register_subscriber(prefetch)
        get_event_bus().register_subscriber(lookups)
        return prefetch

    register_prefetch_policy(POLICY, policy)
    register_store_policy(POLICY, lambda: CostAwareStore(prefetch, keeps_in_memory=True))
    register_store_policy(
        POLICY_SKIPPING_L1, lambda: CostAwareStore(prefetch, keeps_in_memory=False)
    )
    listen = functools.partial(kept_in_thread, "cache_server", functools.partial(_listen, prefetch))
    threading.Thread(target=listen, daemon=True).start()
    if ahead:
        read = functools.partial(kept_in_thread, "read_ahead", functools.partial(_read, ahead))
        threading.Thread(target=read, daemon=True).start()
    if store := os.environ.pop(SHARED_STORE, None):
        share = functools.partial(kept_in_thread, "shared_store", functools.partial(_share, store))
        threading.Thread(target=share, daemon=True).start()
    main()


def _listen(prefetch: CostAwarePrefetch) -> None:
    for line in sys.stdin:
        prefetch.seconds_per_chunk = float(line)
    os.kill(os.getpid(), signal.SIGTERM)


def _read(ahead: ReadAhead) -> None:
    ahead.keep(_engine().context)


def _share(adapter: str) -> None:
    SharedStore(adapter).keep(_engine().storage_manager)


def _engine() -> Any:
    """Return LMCache's engine, once it has started."""
    while not hasattr(app.state, "engine"):
        time.sleep(0.1)
    return app.state.engine


if __name__ == "__main__":
    run()
