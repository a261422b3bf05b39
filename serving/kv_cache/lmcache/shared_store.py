# SPDX-License-Identifier: Apache-2.0
"""In LMCache's server: the store that instances share, used while it answers, else left out.

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

from serving.observability.trouble_log import TroubleLog

log = init_logger(__name__)

LOOK_S = 2.0
"""Between two looks at it, and how long each may take."""
DRAIN_S = 30.0


class SharedStore:
    """A store that LMCache's server uses while it answers.

    adapter: LMCache's configuration of the store, as JSON.
    """

    def __init__(self, adapter: str) -> None:
        arguments = argparse.Namespace(l2_adapter=[adapter])
        (self._config,) = parse_args_to_l2_adapters_config(arguments).adapters
        self._probe: ValkeyWorkerPool | None = None
        self._index: int | None = None

    def keep(self, manager: StorageManager) -> None:
        """Add the store to the server when it answers, remove it when it does not; for ever."""
        away = TroubleLog(log.error, "the shared KV store is left out until it answers: %s")
        while True:
            trouble = self._trouble()
            away.note(trouble)
            try:
                if not trouble and self._index is None:
                    self._index = manager.add_l2_adapter(self._config)
                    log.warning("the shared KV store is used")
                elif trouble and self._index is not None:
                    manager.delete_l2_adapter(self._index, DRAIN_S)
                    self._index = None
            except TimeoutError:  # requests that wait for it do not end; it gets no new ones
                continue
            except Exception as error:  # of the store's own client, about its configuration
                log.error("the shared KV store is not used: %s", error)
                return
            time.sleep(LOOK_S)

    def _trouble(self) -> str | None:
        """Why Redis or Valkey does not answer. Of another store only its own client knows."""
        nodes: list[Any] = getattr(self._config, "startup_nodes", [])
        try:
            for node in nodes:
                socket.create_connection(node, LOOK_S).close()
            if nodes and not self._probe:
                self._probe = self._connect()
            if self._probe:
                self._probe.submit_exists("slipway").result(LOOK_S)
        except Exception as error:  # glide's are many
            return f"{type(error).__name__}: {error}"
        return None

    def _connect(self) -> ValkeyWorkerPool:
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
