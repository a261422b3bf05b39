# SPDX-License-Identifier: Apache-2.0
"""No fault of the cache server ends the engine (serving/engine/kv_connector.py)."""

from serving.patching.patch import ENGINE, Name, Patch

_LMCACHE = "lmcache.integration.vllm"
_ADAPTER = f"{_LMCACHE}.vllm_multi_process_adapter"
PATCH = Patch(
    name="tier_waits",
    process=ENGINE,
    names=(
        Name(
            f"{_LMCACHE}.lmcache_mp_connector:LMCacheMPConnector",
            has=(
                *("_report_request_errors", "lazy_offload", "request_trackers"),
                *("scheduler_adapter", "worker_adapter"),
            ),
        ),
        Name(
            f"{_ADAPTER}:LMCacheMPSchedulerAdapter",
            has=(
                *("_unacked_lookups", "_lookup_status", "_finished_lookup_results"),
                *("lmcache_tokens_per_chunk", "is_healthy"),
            ),
        ),
        Name(f"{_ADAPTER}:LMCacheMPSchedulerAdapter.cleanup_lookup_result", "self, request_id"),
        Name(
            f"{_ADAPTER}:LMCacheMPSchedulerAdapter.free_lookup_locks",
            "self, token_ids, start, end, request_id, cache_salt, request_configs",
        ),
        Name(f"{_ADAPTER}:_LookupAck", has=("futures",)),
        Name(
            f"{_ADAPTER}:LMCacheMPWorkerAdapter",
            has=(
                *("_failed_request_ids", "_dropped_retrieves", "_returned_finished"),
                *("_mq_timeout", "_health_event", "store_futures", "retrieve_futures"),
            ),
        ),
        Name(
            f"{_LMCACHE}.lmcache_mp_metadata:LMCacheMPRequestTracker",
            has=("state", "lookup_started_at", "request_configs", "get_token_ids"),
        ),
        Name(
            f"{_LMCACHE}.lmcache_mp_metadata:LMCacheMPRequestState",
            has=("BYPASS_LMCACHE", "WAITING_FOR_LOAD"),
        ),
        Name(
            "lmcache.v1.multiprocess.futures:MessagingFuture",
            has=("query", "result", "set_result", "wait"),
        ),
    ),
    does="Limits a request's wait for the tiers, recomputes a failed load, and frees a request's "
    "blocks only once.",
    why="LMCache's connector waits for the server's answer without a limit, reports blocks that "
    "other requests share, and reports a finished request twice, which ends vLLM's engine.",
    without="a fault of the cache server would end the engine, or block every request",
    closed=True,
)
