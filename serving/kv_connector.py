"""LMCache's connector for vLLM, with a limit to how long a request waits for the tiers.

vLLM imports it by its path, in the engine's own processes. LMCache's connector waits for the
server's answer however long a store behind it takes; a store that hangs would hold every request.
"""

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestState
from lmcache.logging import init_logger
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = init_logger(__name__)

STORE_S = 10.0
SERVER_S = 2.0
"""A server that is there takes note of a request at once; what takes longer is a store."""
HASTE_S = 0.1
"""The limit after a request has waited in vain, until one is answered in time again."""


class PatientConnector(LMCacheMPConnector):  # type: ignore[misc]  # LMCache is not type-checked
    _hasty = False

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self.worker_adapter.submit_store_request = _forgiving(
                self.worker_adapter.submit_store_request
            )

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracker = self.request_trackers.get(request.request_id)
        began = (tracker and tracker.lookup_started_at) or monotonic()
        found: tuple[int | None, bool]
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        adapter, tracker = self.scheduler_adapter, self.request_trackers[request.request_id]
        waited = monotonic() - began
        if found[0] is not None:
            # A prompt shorter than a chunk is answered at once, whatever hangs.
            if request.num_tokens >= adapter.lmcache_tokens_per_chunk:
                self._hasty = not found[0] and waited > SERVER_S
            return found
        limit = SERVER_S if request.request_id in adapter._unacked_lookups else STORE_S
        if waited < (HASTE_S if self._hasty else limit):
            return found
        if not self._hasty:
            log.warning("the KV tiers did not answer within %.0f s; computing again", limit)
        self._hasty = True
        adapter.cleanup_lookup_result(request.request_id)
        tracker.state = LMCacheMPRequestState.BYPASS_LMCACHE
        return 0, False


def _forgiving(store: Callable[..., None]) -> Callable[..., None]:
    """Storing that is given up when the server does not answer.

    LMCache raises then, when L1 is in shared memory, and the engine would die of it.
    """

    def stored(*arguments: Any, **named: Any) -> None:
        try:
            store(*arguments, **named)
        except TimeoutError as error:
            log.warning("a prompt's KV is not stored: %s", error)

    return stored
