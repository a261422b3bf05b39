# SPDX-License-Identifier: Apache-2.0
"""What the router says of itself: /ping, /metrics, and /replicas for people."""

import html
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from serving.router.fleet.replicas import Replica, ReplicaPool, State
from serving.router.kv.awareness import KvAwareness
from serving.router.metrics import CurrentSeries, forget
from serving.router.policy.policies import Policy, PrefixAware

_JSON = b"application/json"


def ping(pool: ReplicaPool, draining: bool) -> tuple[bytes, bytes]:
    """The kind and body of an answer to /ping."""
    ready = len(pool.ready)
    status = "draining" if draining else "ready" if ready else "starting"
    return _JSON, msgspec.json.encode({"status": status, "detail": f"{ready} replicas are ready"})


def metrics(pool: ReplicaPool) -> tuple[bytes, bytes]:
    """All processes' series."""
    for name in pool.forget_gone():
        forget(name)
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    states = {
        replica.name: (replica.state is State.READY, replica.in_flight) for replica in pool.replicas
    }
    shown = CollectorRegistry()
    shown.register(CurrentSeries(registry, states, pool.counted()))
    return CONTENT_TYPE_LATEST.encode(), generate_latest(shown)


def replicas(
    pool: ReplicaPool,
    policy: Policy,
    kvaware: KvAwareness | None,
    warnings: Sequence[str],
    accept: bytes,
) -> tuple[bytes, bytes]:
    """The replicas, and warnings about them: a page for browsers, JSON for others."""
    rows = [_row(replica, policy, kvaware) for replica in pool.replicas]
    if b"text/html" not in accept:
        return _JSON, msgspec.json.encode({"replicas": rows, "warnings": warnings})
    shown = "".join(
        f"<tr>{''.join(f'<td>{html.escape(_cell(value))}</td>' for value in row.values())}</tr>"
        for row in rows
    )
    titles = "".join(f"<th>{title.replace('_', ' ')}</th>" for title in rows[0]) if rows else ""
    told = "".join(f"<p>{html.escape(warning)}</p>" for warning in warnings)
    page = _PAGE.format(warnings=told, titles=titles, rows=shown)
    return b"text/html; charset=utf-8", page.encode()


def _row(replica: Replica, policy: Policy, kvaware: KvAwareness | None) -> dict[str, Any]:
    capacity = replica.capacity
    row = {
        "replica": replica.name,
        "state": replica.state,
        "role": replica.role,
        "detail": replica.detail,
        "requests_under_way": replica.in_flight,
        "prompt_tokens_queued": replica.queued,
        "kept_from_requests": replica.breaker.is_open(time.monotonic()),
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
    }
    if isinstance(policy, PrefixAware):
        row["kv_tokens_sent"] = policy.index.held(replica.name)._asdict()
    if kvaware:
        row["kv_cache_known"] = kvaware.follows(replica)
        row["kv_tokens_reported"] = kvaware.held(replica)
    return row


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count:,}" for key, count in value.items())
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>Replicas</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 2em }}
table {{ border-collapse: collapse }}
th, td {{ padding: .4em .8em; text-align: left; border-bottom: 1px solid #ccc }}
</style></head>
<body><h1>Replicas</h1>{warnings}<table><tr>{titles}</tr>{rows}</table></body></html>
"""
