# SPDX-License-Identifier: Apache-2.0
"""In LMCache's server: the store that instances share. It is only used while it answers.

LMCache waits for every store at every look-up. A store that does not answer would cost each
request seconds, and its hits in memory. A store on the server's command line would also have to run
before the server, and would show its password there.
"""

import argparse
import socket
import time
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.storage_backend.valkey.worker_pool import ValkeyWorkerPool

from serving.kv_cache.lmcache import tiered_storage
from serving.kv_cache.lmcache.tiered_storage import TieredStorageConfig
from serving.observability.failure_log import FailureLog

log = init_logger(__name__)

LOOK_S = 2.0
"""Seconds between two checks, and the timeout of each."""
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
        self._away = FailureLog(log.error, "the shared KV store is left out until it answers: %s")

    def keep(self, manager: StorageManager) -> None:
        """Add the store to the server when it answers, and remove it when it does not. Never
        returns.
        """
        while True:
            self.look(manager)
            time.sleep(LOOK_S)

    def look(self, manager: StorageManager) -> None:
        """Check the store once, and add or remove it."""
        trouble = self._trouble()
        if trouble is None and self._index is None:
            trouble = self._use(manager)
        self._away.note(trouble)
        if trouble is not None and self._index is not None:
            self._leave_out(manager, self._index)

    def _use(self, manager: StorageManager) -> str | None:
        """Add the store to the server. Returns its client's error, or None."""
        try:
            self._index = manager.add_l2_adapter(self._config)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        log.warning("the shared KV store is used")
        return None

    def _leave_out(self, manager: StorageManager, index: int) -> None:
        try:
            manager.delete_l2_adapter(index, DRAIN_S)
            self._index = None
        except TimeoutError:  # requests still wait for it; it gets no new ones
            pass
        except Exception as error:  # for example, the server is about to end
            log.error("the shared KV store cannot be left out: %s", error)

    def _trouble(self) -> str | None:
        """Return why Redis, Valkey or HyperPod's daemon does not answer, or None. Other stores are
        not checked: only their clients could.
        """
        nodes: list[Any] = getattr(self._config, "startup_nodes", [])
        try:
            if isinstance(self._config, TieredStorageConfig):
                tiered_storage.look(self._config, LOOK_S)
            for node in nodes:
                socket.create_connection(node, LOOK_S).close()
            if nodes and not self._probe:
                self._probe = self._connect()
            if self._probe:
                self._probe.submit_exists("slipway").result(LOOK_S)
        except Exception as error:  # glide has many exceptions
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
