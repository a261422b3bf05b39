"""The store that instances share, in LMCache's server: used while it answers, left out otherwise.

LMCache waits for every store at every look-up, so one that is away would cost each request seconds
and its hits in memory. And as a part of the server's command line a store would have to be there
before the server, and show its password.
"""

import argparse
import socket
import time
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.storage_backend.valkey.worker_pool import ValkeyWorkerPool

log = init_logger(__name__)

LOOK_S = 2.0
"""Between two looks at it, and how long each may take."""
DRAIN_S = 30.0


class SharedStore:
    """adapter: LMCache's configuration of the store, as JSON."""

    def __init__(self, adapter: str) -> None:
        arguments = argparse.Namespace(l2_adapter=[adapter])
        (self._config,) = parse_args_to_l2_adapters_config(arguments).adapters
        self._looker: ValkeyWorkerPool | None = None
        self._index: int | None = None

    def keep(self, manager: StorageManager) -> None:
        """Add the store to the server when it answers, take it out when it does not; for ever."""
        told = False
        while True:
            trouble = self._trouble()
            if trouble and not told:
                log.error("the shared KV store is left out until it answers: %s", trouble)
            told = bool(trouble)
            try:
                if not trouble and self._index is None:
                    self._index = manager.add_l2_adapter(self._config)
                    log.warning("the shared KV store is used")
                elif trouble and self._index is not None:
                    manager.delete_l2_adapter(self._index, DRAIN_S)
                    self._index = None
            except TimeoutError:  # requests that wait for it do not end; it gets no new ones
                continue
            except Exception as error:  # of the store's own client, about what it was told
                log.error("the shared KV store is not used: %s", error)
                return
            time.sleep(LOOK_S)

    def _trouble(self) -> str | None:
        """Why Redis or Valkey does not answer. Of another store only its own client knows."""
        nodes: list[Any] = getattr(self._config, "startup_nodes", [])
        try:
            for node in nodes:
                socket.create_connection(node, LOOK_S).close()
            if nodes and not self._looker:
                self._looker = self._connected()
            if self._looker:
                self._looker.submit_exists("slipway").result(LOOK_S)
        except Exception as error:  # glide's are many
            return f"{type(error).__name__}: {error}"
        return None

    def _connected(self) -> ValkeyWorkerPool:
        config = self._config
        return ValkeyWorkerPool(
            addresses=config.startup_nodes,
            num_workers=1,
            username=config.username,
            password=config.password,
            request_timeout=LOOK_S,
            tls_enable=config.tls_enable,
            cluster_mode=config.cluster_mode,
            database_id=config.database_id,
        )
