# SPDX-License-Identifier: Apache-2.0
"""`lmcache server` with Slipway's parts in it, as a program: the child of serving.kv_cache.server.

Standard input has a line for each new figure of how many seconds the engine computes one chunk.
When it ends, so does this process, however its parent ended.
"""

import functools
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import opentelemetry.sdk.metrics
from lmcache.cli.main import main
from lmcache.v1.distributed.storage_controllers.prefetch_policy import register_prefetch_policy
from lmcache.v1.distributed.storage_controllers.store_policy import register_store_policy
from lmcache.v1.mp_observability.event_bus import get_event_bus
from lmcache.v1.mp_observability.subscribers.metrics.sm_lifecycle import SMLifecycleSubscriber
from lmcache.v1.multiprocess.http_server import app
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import View

from lmi_config.plan.kv_tiers import POLICY, POLICY_SKIPPING_L1, SHARED_STORE
from serving.follow import kept_in_thread
from serving.kv_cache.lmcache.kv_events import report_what_all_share
from serving.kv_cache.lmcache.lookups import Lookups
from serving.kv_cache.lmcache.prefetch_policy import CostAwarePrefetch, CostAwareStore
from serving.kv_cache.lmcache.shared_store import SharedStore
from serving.kv_cache.patches import abandoned_writes, forgotten_workers, null_chunks


def run() -> None:
    for patch in (abandoned_writes, forgotten_workers, null_chunks):
        patch.apply()
    sum_tenants()
    report_what_all_share()
    logging.getLogger("uvicorn.access").addFilter(lambda _: False)  # we ask every 2 s
    prefetch, lookups = CostAwarePrefetch(), Lookups()

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
    if store := os.environ.pop(SHARED_STORE, None):
        share = functools.partial(kept_in_thread, "shared_store", functools.partial(_share, store))
        threading.Thread(target=share, daemon=True).start()
    main()


class _AllBut(set[str]):
    """The set of all labels but these, as a View takes it."""

    def __contains__(self, label: object) -> bool:
        return not super().__contains__(label)


class _SummedTenants(MeterProvider):
    """A provider of meters that count all tenants together, and the one model without its name."""

    def __init__(self, **more: Any) -> None:
        kept = View(instrument_name="*", attribute_keys=_AllBut({"cache_salt", "model_name"}))
        super().__init__(views=[kept], **more)


def sum_tenants() -> None:
    """Have LMCache count all tenants together.

    It has series for each cache_salt and keeps them for ever, as it takes salts for an operator's.
    Here clients choose them. LMCache looks the class of its meters up when it starts.
    """
    opentelemetry.sdk.metrics.MeterProvider = _SummedTenants  # type: ignore[misc, assignment]
    count = SMLifecycleSubscriber._bump_salt_counter
    SMLifecycleSubscriber._bump_salt_counter = lambda self, _: count(self, "")


def _listen(prefetch: CostAwarePrefetch) -> None:
    for line in sys.stdin:
        prefetch.seconds_per_chunk = float(line)
    os.kill(os.getpid(), signal.SIGTERM)


def _share(adapter: str) -> None:
    store = SharedStore(adapter)
    while not hasattr(app.state, "engine"):
        time.sleep(0.1)
    store.keep(app.state.engine.storage_manager)


if __name__ == "__main__":
    run()
