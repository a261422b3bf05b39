"""`lmcache server` with Slipway's parts in it, as a program: the child of serving.cache_server.

Standard input has a line for each new figure of how many seconds the engine computes one chunk.
When it ends, so does this process, however its parent ended.
"""

import os
import signal
import sys
import threading
import time

from lmcache.cli.main import main
from lmcache.v1.distributed.storage_controllers.prefetch_policy import register_prefetch_policy
from lmcache.v1.distributed.storage_controllers.store_policy import register_store_policy
from lmcache.v1.mp_observability.event_bus import get_event_bus
from lmcache.v1.multiprocess.http_server import app

from lmi_config.kv_tiers import POLICY, POLICY_SKIPPING_L1, SHARED_STORE
from serving.load_gate import LoadGate, StoreGate
from serving.shared_store import SharedStore


def run() -> None:
    gate = LoadGate()

    def policy() -> LoadGate:
        get_event_bus().register_subscriber(gate)
        return gate

    register_prefetch_policy(POLICY, policy)
    register_store_policy(POLICY, lambda: StoreGate(gate, keeps=True))
    register_store_policy(POLICY_SKIPPING_L1, lambda: StoreGate(gate, keeps=False))
    threading.Thread(target=_listen, args=(gate,), daemon=True).start()
    if store := os.environ.pop(SHARED_STORE, None):
        threading.Thread(target=_share, args=(store,), daemon=True).start()
    main()


def _listen(gate: LoadGate) -> None:
    for line in sys.stdin:
        gate.seconds_per_chunk = float(line)
    os.kill(os.getpid(), signal.SIGTERM)


def _share(adapter: str) -> None:
    store = SharedStore(adapter)
    while not hasattr(app.state, "engine"):
        time.sleep(0.1)
    store.keep(app.state.engine.storage_manager)


if __name__ == "__main__":
    run()
