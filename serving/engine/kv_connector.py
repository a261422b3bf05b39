# SPDX-License-Identifier: Apache-2.0
"""In the engine core's process and in its workers': LMCache's connector, made fault-tolerant.

No fault of the cache server fails a request or ends the engine. vLLM imports the connector by its
path. In vLLM's processes an exception ends the engine. A report about a request that vLLM has
forgotten ends it as well. LMCache's connector (0.5.6) does not handle these cases; this one does:

- A load that fails is reported by its request, and the prompt is computed again, without a second
  try. LMCache would report blocks, including blocks that other requests share and compute with.
- Exceptions of storing and loading do not leave a worker's step.
- A request's blocks are freed once, after the last read or write (see Transfers).
- The KV of a prompt that another server has just computed is stored only after that server has
  answered. The prompt is therefore looked up again for a moment, until all of its KV is stored.
- A request waits for the tiers for a limited time only. LMCache waits for the server's answer
  however long a store behind it takes; a store that hangs would hold every request.
- Only a request's own KV is stored, under a key that covers all that the KV depends on
  (`patches/engine_core`).
"""

import contextlib
from collections.abc import Iterable, Iterator
from time import monotonic, sleep, time_ns
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestState
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.futures import MessagingFuture
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.tracing import SpanKind, extract_trace_context, instrument_manual

from serving.engine.base import HANDED_OVER
from serving.engine.canary.comparison import WITHOUT_TIERS
from serving.engine.patches.engine_core import cache_keys, real_blocks, registry

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger(__name__)

STORE_LIMIT_S = 10.0
SERVER_LIMIT_S = 2.0
"""Seconds that a request waits for the tiers. A running server acknowledges it at once; a longer
wait is due to a store.
"""
UNRESPONSIVE_LIMIT_S = 0.1
"""The limit after a request has waited without an answer, until a request is answered in time
again.
"""
PROBE_INTERVAL_S = 5.0
"""Then one request in this time still waits for the whole limit: on a busy machine no answer may
come within the short one.
"""
ANSWER_S = 0.02
"""Seconds that an engine with nothing to compute waits for the tiers' answer before it looks for
other work. An answer from memory takes a few milliseconds.
"""
STORE_PAUSE_S = 0.002
"""Between two such answers that a store is being read."""
HANDOVER_LIMIT_S = 2.0
"""Seconds during which a prompt that another server has computed is looked up again. The other
server copies some 3 GB of a large model's KV in this time. A prompt that takes longer is computed
here.
"""
HANDOVER_PAUSE_S = 0.01
"""Between two such look-ups."""
END_LIMIT_S = 1.0
"""For the server to acknowledge that an engine ends; it need not."""
MOST_REPORTS = 10_000


class Transfers:
    """The scheduler's record of the requests whose blocks the workers still read or write.

    For a request that has ended, the workers report the end of its load and the end of its stores.
    vLLM (0.32) frees the blocks and forgets the request at the first report; at the second it fails
    with an assertion. Both reports come when a client leaves during a load, and then the first
    comes while the load still writes.
    """

    def __init__(self) -> None:
        self._loading: set[str] = set()
        self._ended: set[str] = set()
        self._stored: set[str] = set()

    def load(self, request_id: str) -> None:
        """The workers are about to load its blocks."""
        self._loading.add(request_id)

    def end(self, request_id: str) -> None:
        """The request has ended, and vLLM keeps its blocks until its stores are reported."""
        self._ended.add(request_id)

    def settle(self, loaded: set[str], stored: set[str]) -> tuple[set[str], set[str]]:
        """Take what all workers report. Returns the requests that may go on, and those whose blocks
        may be freed.
        """
        loaded = loaded & self._loading
        self._loading -= loaded
        self._stored |= stored & self._ended
        free = self._stored - self._loading
        going_on = loaded - self._ended
        self._stored -= free
        self._ended -= free
        return going_on, free


class HandOvers:
    """The scheduler's record of the prompts that other servers have computed, and that it looks up
    again. Once one did not come, the others wait for the short limit until one does.
    """

    def __init__(self) -> None:
        self.requests: dict[str, tuple[float, float]] = {}
        """When each was looked up first, and when it may be looked up again."""
        self.in_vain = False

    def is_early(self, request_id: str, now: float) -> bool:
        """Whether it was looked up a moment ago."""
        return request_id in self.requests and now < self.requests[request_id][1]

    def try_again(self, request_id: str, complete: bool, now: float) -> bool:
        """Whether to look a prompt up again. complete: whether all of it was found."""
        began, _ = self.requests.get(request_id, (now, now))
        limit = UNRESPONSIVE_LIMIT_S if self.in_vain else HANDOVER_LIMIT_S
        again = not complete and now - began < limit
        if not again:
            self.in_vain = not complete
        self.requests[request_id] = began, now + HANDOVER_PAUSE_S * again
        return again

    def end(self, request_id: str) -> None:
        """The request has ended."""
        self.requests.pop(request_id, None)


class _RecentReports(dict[str, None]):
    """The set of requests that a worker has reported last, so that it reports none twice. LMCache
    keeps all of them until a restart. A repeated report comes within a few steps, if at all.
    """

    def update(self, request_ids: Iterable[str]) -> None:  # type: ignore[override]
        super().update(dict.fromkeys(request_ids))
        while len(self) > MOST_REPORTS:
            del self[next(iter(self))]


class FaultTolerantConnector(LMCacheMPConnector):  # type: ignore[misc]  # not type-checked
    """LMCache's connector; a failed load only costs the time to compute the KV again.

    Raises Unfit if the installed versions cannot keep tenants' KV apart, and RuntimeError if a fact
    cannot be checked.
    """

    _unresponsive = False
    """Whether the last request that asked the tiers has waited without an answer."""
    _probe = ""
    """The request that waits for the whole limit nevertheless."""
    _next_probe = 0.0
    _is_idle = False
    """Whether the last step had nothing to compute."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        registry.apply_tiers()
        super().__init__(vllm_config, role, kv_cache_config)
        if self.lazy_offload:  # it stores blocks of requests that have ended
            raise RuntimeError(
                "lmcache.mp.lazy_offload cannot be checked for real KV; leave it out"
            )
        self._report_request_errors = True
        self._transfers = Transfers()
        self._handovers = HandOvers()
        self._failed_loads: set[str] = set()
        self._null_block: int | None = None
        self._kept_out: set[str] = set()
        """Requests that are neither looked up nor stored."""
        if role == KVConnectorRole.WORKER:
            self.worker_adapter._returned_finished = _RecentReports()

    # in the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._null_block = gpu_block_pool.null_block.block_id

    def on_new_request(self, request: "Request") -> None:
        if not _keeps_out(request):
            super().on_new_request(request)

    def _get_or_create_request_tracker(self, request: "Request") -> Any:
        tracker = super()._get_or_create_request_tracker(request)
        tracker.cache_salt = cache_keys.salt(request)
        return tracker

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracker = self.request_trackers.get(request.request_id)
        began = (tracker and tracker.lookup_started_at) or monotonic()
        match = self._matched(request, num_computed_tokens, began)
        if request.trace_headers and match[0] is not None:
            _send_span(request, began, match[0])
        return match

    def _matched(
        self, request: "Request", num_computed_tokens: int, began: float
    ) -> tuple[int | None, bool]:
        """began: when the tiers were asked first, by the clock."""
        if _keeps_out(request):
            self._kept_out.add(request.request_id)
            return self._bypass(request)
        if request.request_id in self._failed_loads:
            return self._bypass(request)
        if self._handovers.is_early(request.request_id, monotonic()):
            return None, True
        match: tuple[int | None, bool]
        try:
            match = super().get_num_new_matched_tokens(request, num_computed_tokens)
            deadline = monotonic() + ANSWER_S
            while match[0] is None and self._is_idle and self._is_answered(request, deadline):
                match = super().get_num_new_matched_tokens(request, num_computed_tokens)
        except Exception as error:  # of the client to the server
            log.warning("the KV tiers cannot be asked: %s: %s", type(error).__name__, error)
            return self._bypass(request)
        adapter = self.scheduler_adapter
        waited = monotonic() - began
        if match[0] is not None:
            # A prompt shorter than a chunk is answered at once, whatever hangs.
            if request.num_tokens >= adapter.lmcache_tokens_per_chunk:
                self._unresponsive = not match[0] and waited > SERVER_LIMIT_S
            return (None, True) if self._is_coming(request, num_computed_tokens) else match
        acknowledged = request.request_id not in adapter._unacked_lookups
        limit = STORE_LIMIT_S if acknowledged else SERVER_LIMIT_S
        if waited < (UNRESPONSIVE_LIMIT_S if self._is_hurried(request, began) else limit):
            return match
        if not self._unresponsive:
            log.warning("the KV tiers did not answer within %.0f s; computing again", limit)
            self._next_probe = monotonic() + PROBE_INTERVAL_S
        self._unresponsive = True
        return self._bypass(request)

    def _is_answered(self, request: "Request", deadline: float) -> bool:
        """Wait for the server's next answer about a request. Returns whether it came before the
        deadline.

        Without this, vLLM would ask again in a separate step: a message to the workers and back,
        and a sleep of a millisecond.
        """
        adapter, name = self.scheduler_adapter, request.request_id
        acknowledgement = adapter._unacked_lookups.get(name)
        futures = [*acknowledgement.futures.values()] if acknowledgement else []
        futures += [future for future, _ in adapter._lookup_status.get(name, {}).values()]
        if not futures:  # it was that a store is still being read
            sleep(STORE_PAUSE_S)
        return monotonic() < deadline and all(
            future.wait(max(deadline - monotonic(), 0)) for future in futures
        )

    def _is_coming(self, request: "Request", computed: int) -> bool:
        """Whether to look up the rest of a prompt again, because another server has just computed
        it. computed: tokens that the engine has.
        """
        if not (request.kv_transfer_params or {}).get(HANDED_OVER) or request.num_output_tokens:
            return False
        adapter, name = self.scheduler_adapter, request.request_id
        tracker = self.request_trackers[name]
        if tracker.state == LMCacheMPRequestState.BYPASS_LMCACHE:
            return False
        found = adapter._finished_lookup_results.get(name, 0)
        chunk = adapter.lmcache_tokens_per_chunk
        whole = (request.num_prompt_tokens - 1) // chunk * chunk
        complete = max(found, computed) >= whole or not adapter.is_healthy
        if not self._handovers.try_again(name, complete, monotonic()):
            return False
        if found:
            adapter.free_lookup_locks(
                *(tracker.get_token_ids(), 0, found, name),
                *(tracker.cache_salt, tracker.request_configs),
            )
        adapter.cleanup_lookup_result(name)
        self.request_trackers.pop(name)
        return True

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Any:
        self._is_idle = not scheduler_output.total_num_scheduled_tokens
        meta = super().build_connector_meta(scheduler_output)
        if self._kept_out:
            meta.requests = [it for it in meta.requests if it.request_id not in self._kept_out]
        if meta.requests:
            real_blocks.real_stores(
                *(meta, scheduler_output.kv_connector_block_state, self._group_tokens_per_block),
                *(self.scheduler_adapter.lmcache_tokens_per_chunk, self._null_block),
            )
        return meta

    def _is_hurried(self, request: "Request", began: float) -> bool:
        """Whether a request that asked the tiers at this time waits for the short limit only."""
        if self._unresponsive and began >= self._next_probe:
            self._probe, self._next_probe = request.request_id, began + PROBE_INTERVAL_S
        return self._unresponsive and request.request_id != self._probe

    def _bypass(self, request: "Request") -> tuple[int, bool]:
        """Let a request be computed without the tiers."""
        self.scheduler_adapter.cleanup_lookup_result(request.request_id)
        # A new one: the old one's blocks and hits are no longer valid.
        self.request_trackers.pop(request.request_id, None)
        tracker = self._get_or_create_request_tracker(request)
        tracker.state = LMCacheMPRequestState.BYPASS_LMCACHE
        return 0, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        tracker = self.request_trackers[request.request_id]
        if tracker.state == LMCacheMPRequestState.WAITING_FOR_LOAD:
            self._transfers.load(request.request_id)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """vLLM reads the workers' reports after this."""
        super().update_connector_output(connector_output)
        going_on, free = self._transfers.settle(
            connector_output.finished_recving or set(), connector_output.finished_sending or set()
        )
        connector_output.finished_recving, connector_output.finished_sending = going_on, free
        self._failed_loads |= connector_output.failed_recving & going_on

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        kept: bool
        kept, parameters = super().request_finished(request, block_ids)
        if kept:
            self._transfers.end(request.request_id)
        self._failed_loads.discard(request.request_id)
        self._kept_out.discard(request.request_id)
        self._handovers.end(request.request_id)
        return kept, parameters or None  # which would be in the client's answer

    # in the workers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        with self._tolerating_faults("loaded"):
            super().start_load_kv(forward_context, **kwargs)
        adapter = self.worker_adapter
        for transfer in self._get_connector_metadata().requests:
            name = transfer.request_id
            if transfer.direction == "RETRIEVE" and name not in adapter.retrieve_futures:
                adapter._failed_request_ids.add(name)
                adapter._dropped_retrieves.add(name)

    def wait_for_save(self) -> None:
        with self._tolerating_faults("stored"):
            super().wait_for_save()

    @contextlib.contextmanager
    def _tolerating_faults(self, done: str) -> Iterator[None]:
        """Log the exceptions of the block, which starts transfers. done: the log's words for the
        consequence for the prompts' KV.

        After a failure, or a wait without an answer, the server counts as away. It counts as
        present again after it has answered LMCache's next ping and the caches are registered again.
        The server may have been restarted between two pings; it would then not know the caches.
        """
        began, adapter = monotonic(), self.worker_adapter
        failed = False
        try:
            yield
        except Exception as error:
            failed = True
            log.warning("prompts' KV is not %s: %s: %s", done, type(error).__name__, error)
        if failed or monotonic() - began >= adapter._mq_timeout:
            adapter._health_event.clear()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        adapter = self.worker_adapter
        for name, future in adapter.store_futures.items():
            adapter.store_futures[name] = _without_error(future)
        for name, (future, blocks) in adapter.retrieve_futures.items():
            adapter.retrieve_futures[name] = _without_error(future), blocks
        finished: tuple[set[str] | None, set[str] | None]
        finished = super().get_finished(finished_req_ids)
        return finished

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            self.worker_adapter._mq_timeout = END_LIMIT_S
        super().shutdown()


def _keeps_out(request: "Request") -> bool:
    """Whether a request is neither looked up nor stored."""
    marked = (request.kv_transfer_params or {}).get(WITHOUT_TIERS)
    return bool(marked) or not cache_keys.has_key(request)


def _send_span(request: "Request", began: float, matched: int) -> None:
    """Send the span of a lookup that is over: a part of the engine's work for the request."""
    now = time_ns()
    instrument_manual(
        "kv_cache_lookup",
        now - int((monotonic() - began) * 1e9),
        now,
        {"slipway.prompt_tokens": request.num_tokens, "slipway.tier_tokens": matched},
        extract_trace_context(request.trace_headers),
        SpanKind.INTERNAL,
    )


def _without_error(future: "MessagingFuture[bool]") -> "MessagingFuture[bool]":
    """The transfer, or a failed transfer if its result would raise."""
    try:
        if future.query():
            future.result(timeout=0)
    except Exception as error:
        log.warning("a transfer of KV failed: %s: %s", type(error).__name__, error)
        failed: MessagingFuture[bool] = MessagingFuture()
        failed.set_result(False)
        return failed
    return future
