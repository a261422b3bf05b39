# SPDX-License-Identifier: Apache-2.0
"""The parts of a start that need no engine: fetching the model, and starting the cache server. The
supervisor of several copies runs them once for all copies.
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from prometheus_client import Gauge

from lmi_config.plan import kv_tiers, memory
from lmi_config.plan.kv_tiers import DiskTier, NoTiers, Tiers
from lmi_config.plan.plan import Plan
from serving import folders
from serving.aio import in_thread
from serving.engine.base import EngineError, Hits, Prefilled
from serving.kv_cache import disk, fingerprints
from serving.kv_cache import pool as kv_pool
from serving.kv_cache.cache_server import CacheServer, CacheServerError, Capacity
from serving.lifecycle import Note, Step
from serving.sources.source import Source, SourceError

log = logging.getLogger(__name__)

_TRANSFER = Gauge(
    "slipway_kv_transfer_info", "Servers with the same KV fetch it from each other.", ["kv"]
)


async def fetch(source: Source, note: Note) -> Path:
    """Fetch a model's files. Returns their folder. Raises EngineError if that fails."""
    try:
        return await in_thread(source.fetch, functools.partial(note, Step.FETCHING))
    except SourceError as error:
        raise EngineError(str(error)) from None


_ENGINES_COMPARE = ("speculative_config", "block_size", "attention_backend")
"""Options that may differ between engines that fetch KV from each other. vLLM checks these."""


async def start(
    plan: Plan, folder: Path, prefilled: Callable[[], Prefilled], hits: Callable[[], Hits]
) -> tuple[CacheServer | None, Path]:
    """Start the cache server. Returns it, and the name of the model's folder for it.

    The server is None if the plan has no tiers, or if it cannot be started. prefilled, hits: as for
    CacheServer.
    """
    tiers = plan.tiers
    if isinstance(tiers, NoTiers):
        return None, await in_thread(_transferring, plan, folder)
    try:
        outlives = bool(tiers.disk or tiers.shared)
        fingerprint = await in_thread(_fingerprint, plan, folder, tiers.chunk_size, outlives)
        name = fingerprints.served_path(folder, fingerprint)
        write_tiers(tiers, plan.settings.port)
        if tiers.disk:
            claimed = await in_thread(_claim_disk, tiers.disk, fingerprint)
            tiers = dataclasses.replace(tiers, disk=claimed)
        server = _cache_server(plan, tiers, fingerprint, prefilled, hits)
        await server.start()
    except (CacheServerError, OSError) as error:
        log.error("serving without KV cache tiers: the cache server did not start: %s", error)
        return None, folder
    return server, name


def without(server: CacheServer | None) -> str:
    """Return why an engine is served without tiers after start(), or nothing."""
    return "" if server else "the cache server did not start"


def _transferring(plan: Plan, folder: Path) -> Path:
    """Return the name of the model's folder for the engine. Engines that fetch KV from each other
    must have the same name.
    """
    if not kv_tiers.transfers(plan.settings):
        arriving = plan.loading.arriving
        return fingerprints.steady_path(folder, arriving) if plan.compile_cache else folder
    fingerprint = _fingerprint(plan, folder, 0, whole=True, besides=_ENGINES_COMPARE)
    _TRANSFER.labels(fingerprints.store_name({"by": kv_tiers.TRANSFERRING}, fingerprint)).set(1)
    return _named(folder, fingerprint)


def _fingerprint(
    plan: Plan, folder: Path, chunk_size: int, whole: bool, besides: Collection[str] = ()
) -> str:
    """Return the fingerprint of the model and its options. besides: options that do not count."""
    options = {name: value for name, value in plan.options.items() if name not in besides}
    return fingerprints.fingerprint(
        *(folder, options, chunk_size, whole), machine=plan.machine, environ=os.environ
    )


def _cache_server(
    plan: Plan,
    tiers: Tiers,
    fingerprint: str,
    prefilled: Callable[[], Prefilled],
    hits: Callable[[], Hits],
) -> CacheServer:
    """Make the cache server. tiers: the plan's, without a disk tier that the disk cannot hold.
    fingerprint: the model's.
    """
    pool = kv_tiers.shared_pool(tiers, plan.machine)
    if pool:
        kv_pool.hold(pool)
    return CacheServer(
        arguments=plan.cache_command(tiers),
        environ=plan.cache_environment,
        http_port=kv_tiers.ports(plan.machine).http,
        capacity=_capacity(plan, tiers, fingerprint),
        prefilled=prefilled,
        hits=hits,
        chunk_size=tiers.chunk_size,
        pool=pool,
    )


def _capacity(plan: Plan, tiers: Tiers, fingerprint: str) -> Capacity:
    sizes = {"l1": tiers.l1, "disk": tiers.disk.size if tiers.disk else 0}
    kept = sizes | {"l1": 0} if tiers.skip_l1 else sizes
    store = ""
    if tiers.shared:
        if tiers.shared.capacity:
            kept = kept | {"shared": tiers.shared.capacity}
        store = fingerprints.store_name(tiers.shared.place, fingerprint)
    token = memory.kv_per_token(plan.settings, plan.model)
    return Capacity(sizes=sizes, kept=kept, token=token, store=store)


def write_tiers(tiers: Tiers, port: int) -> None:
    """Write the decided tiers to a file, which an operator can read, or pass as
    OPTION_LMCACHE_CONFIG_FILE. Servers on one machine have different files by their ports.
    """
    try:
        file = folders.make(folders.place(str(port))) / "lmcache.yaml"
        file.write_text(kv_tiers.yaml(tiers))
    except OSError as error:
        log.warning("the file with the KV cache tiers cannot be written: %s", error)


def _named(folder: Path, fingerprint: str) -> Path:
    try:
        return fingerprints.served_path(folder, fingerprint)
    except OSError as error:
        log.warning("KV caches are shared only with servers whose model has this path: %s", error)
        return folder


def _claim_disk(tier: DiskTier, fingerprint: str) -> DiskTier | None:
    try:
        return disk.claim(tier, fingerprint)
    except OSError as error:
        log.error("serving without the disk tier; OPTION_KV_DISK_PATH names another: %s", error)
        return None
