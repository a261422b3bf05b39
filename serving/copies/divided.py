# SPDX-License-Identifier: Apache-2.0
"""Divides a server's settings and series among a router and several copies."""

import dataclasses
import secrets
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from lmi_config.options.declared import Settings
from lmi_config.plan.devices.copies import Copy
from lmi_config.plan.plan import Plan
from serving.batch.objects import OtherCopies
from serving.server.prepare import Deployment, Shared

ROUTERS_ALONE: dict[str, Any] = {
    **dict.fromkeys(("api_key", "api_keys_file", "admin_api_key", "jwt_issuer")),
    **dict.fromkeys(("tls_cert_file", "tls_key_file", "tls_client_ca_file")),
    "ui": False,
}
"""Settings of the router only, because it checks keys and speaks TLS for the copies."""


def secret(settings: Settings) -> str:
    """The secret that the router signs with and the copies check. It is the operator's, which
    another router in front of this container also has, or else a random one for this start.
    """
    return settings.router_secret or secrets.token_hex(32)


def urls(plan: Plan) -> tuple[str, ...]:
    """The copies' addresses for the router."""
    return tuple(copy.url for copy in plan.copies)


def of_router(settings: Settings, urls: Sequence[str], shared_secret: str) -> Settings:
    """The router's settings, without an access log: the servers' log lines have more fields. urls:
    the servers' addresses.
    """
    strategy = settings.routing_strategy
    return dataclasses.replace(
        settings,
        router_replicas=",".join(urls),
        router_secret=shared_secret,
        router_access_log=False,
        routing_strategy="prefixaware" if strategy == "kvaware" else strategy,
        epp=False,
    )


def of_copy(
    deployment: Deployment, copy: Copy, shared_secret: str, shared: Shared, folder: Path
) -> Deployment:
    """The deployment of a copy. folder: of this container's processes; it has the list of adapters,
    which a restarted copy needs.
    """
    plan = deployment.plan
    settings = plan.settings
    adapters = folder / "adapters"
    urls = tuple(it.url for it in plan.copies if it is not copy)
    shared = dataclasses.replace(shared, others=OtherCopies(urls, folder / "batches"))
    own = dataclasses.replace(
        settings,
        port=copy.port,
        router_secret=shared_secret,
        job_queue_size=-(-settings.job_queue_size // len(plan.copies)),
        adapter_list=settings.adapter_list or (str(adapters) if settings.enable_lora else None),
        **ROUTERS_ALONE,
    )
    made = dataclasses.replace(plan.of_copy(copy), settings=own)
    return dataclasses.replace(deployment, plan=made, shared=shared)


def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that only the processes of this container may read. A process may still write there
    during its removal.
    """
    return tempfile.TemporaryDirectory(prefix="slipway-copies-", ignore_cleanup_errors=True)


_OURS = ("slipway_cop", "slipway_model_", "slipway_kv", "slipway_prefill", "lmcache")
"""Prefixes of the supervisor's series: of copies or models, and of the cache server."""


class _Ours(Collector):
    def collect(self) -> Iterable[Metric]:
        return (it for it in REGISTRY.collect() if it.name.startswith(_OURS))


def write_series(file: Path) -> None:
    """Write the supervisor's series for the router, which answers scrapers."""
    shown = CollectorRegistry()
    shown.register(_Ours())
    new = file.with_suffix(".new")
    new.write_bytes(generate_latest(shown))
    new.replace(file)
