# SPDX-License-Identifier: Apache-2.0
"""The router's own status: /ping, /metrics and /replicas."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from serving.http.exposition import exposition
from serving.router.fleet.own_copies import OwnCopies
from serving.router.fleet.replicas import Replica, ReplicaPool, State
from serving.router.kv.awareness import KvAwareness
from serving.router.metrics import CurrentSeries, HeldWork, ReplicaState, forget
from serving.router.models.view import OwnModels
from serving.router.policy.policies import Policy, PrefixAware

_JSON = b"application/json"
PAGE = 200
"""Replicas of one answer, some 80 KB."""


def enough(pool: ReplicaPool, copies: OwnCopies | None, hold: int) -> bool:
    """Whether enough replicas are ready: none, if requests wait for one. copies: this
    container's, if they are the replicas.
    """
    ready = len(pool.ready)
    return copies.enough(ready) if copies else ready > 0 or hold > 0


def ping(
    pool: ReplicaPool,
    draining: bool,
    copies: OwnCopies | None,
    hold: int,
    models: OwnModels | None = None,
) -> tuple[bytes, bytes]:
    """The kind and body of an answer to /ping. hold: seconds that requests wait for a replica."""
    ready = len(pool.ready)
    if models:
        detail = f"{ready} of {len(models.rows)} models run"
        status = "draining" if draining else "ready"
        return _JSON, msgspec.json.encode({"status": status, "detail": detail})
    status = "draining" if draining else "ready" if enough(pool, copies, hold) else "starting"
    detail = (
        f"{ready} of {copies.count} copies are ready" if copies else f"{ready} replicas are ready"
    )
    if hold and not ready and not copies:
        detail += f"; requests wait for one for at most {hold} s (OPTION_ROUTER_HOLD_S)"
    return _JSON, msgspec.json.encode({"status": status, "detail": detail})


def metrics(
    pool: ReplicaPool, held: tuple[int, int], accept: bytes, *, traced: bool
) -> tuple[bytes, bytes]:
    """All processes' series, as a scraper accepts them. held: requests that wait for a replica, and
    their work in tokens. traced: whether spans are sent.
    """
    for name in pool.forget_gone():
        forget(name)
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    requests, tokens = held
    mean = pool.seconds_per_token
    work = HeldWork(requests, tokens * mean)
    states = {it.name: _state(it, mean) for it in pool.replicas}
    shown = CollectorRegistry()
    shown.register(CurrentSeries(registry, states, work, pool.counted()))
    return exposition(shown, accept, exemplars=traced)


def _state(it: Replica, mean: float) -> ReplicaState:
    """mean: seconds that a token takes at a replica that was not measured."""
    measured = it.seconds_per_token
    return ReplicaState(
        it.state is State.READY,
        it.in_flight,
        it.role,
        it.queued,
        measured,
        it.queued * (measured or mean),
        it.kv_usage,
    )


def replicas(
    pool: ReplicaPool,
    policy: Policy,
    kvaware: KvAwareness | None,
    warnings: Sequence[str],
    copies: OwnCopies | None,
    start: int,
) -> tuple[bytes, bytes]:
    """The kind and body of an answer about PAGE replicas from this one on, with warnings about all.
    copies: as enough() has it.
    """
    left_out = copies.left_out() if copies else {}
    end, count = start + PAGE, len(pool.replicas)
    rows = [_row(replica, policy, kvaware, left_out) for replica in pool.replicas[start:end]]
    page = {"replicas": rows, "count": count, "next": end if end < count else None}
    return _JSON, msgspec.json.encode(page | {"warnings": warnings})


def _row(
    replica: Replica, policy: Policy, kvaware: KvAwareness | None, left_out: Mapping[int, str]
) -> dict[str, Any]:
    """left_out: as OwnCopies has it."""
    capacity = replica.capacity
    row = {
        "replica": replica.name,
        "state": replica.state,
        "role": replica.role,
        "detail": replica.detail,
        "requests_under_way": replica.in_flight,
        "prompt_tokens_queued": replica.queued,
        "kept_from_requests": replica.breaker.ejected,
        "models": sorted(replica.models - replica.adapters),
        "adapters": len(replica.adapters),
        "adapter_slots": replica.adapter_slots,
        "tenant_header": replica.tenant_header,
        "kv_cache_tokens": capacity.engine,
        "kv_tier_tokens": {
            tier: tokens
            for tier in ("memory", "disk", "shared")
            if (tokens := getattr(capacity, tier))
        },
        "kv_chunk_tokens": replica.chunk,
        "kv_shared_store": capacity.store,
        "kv_transfer": replica.transfer,
    }
    if replica.copy is not None:
        row["copy"] = replica.copy
        if reason := left_out.get(replica.copy):
            row |= {"state": State.FAILED, "detail": f"left out: {reason}"}
    if isinstance(policy, PrefixAware):
        row["kv_tokens_sent"] = policy.index.held(replica.name)._asdict()
    if kvaware:
        row["kv_cache_known"] = kvaware.follows(replica)
        row["kv_tokens_reported"] = kvaware.held(replica)
    return row
