"""From a plan to a running engine: fetch the model, start the cache server, start vLLM."""

import asyncio
import logging
from pathlib import Path

from lmi_config import kv_tiers
from lmi_config.vllm_args import arguments
from serving import cache_server
from serving import engine as vllm
from serving.cache_server import CacheServer, CacheServerError
from serving.engine import Engine, EngineError, Note
from serving.prepare import Prepared
from serving.sources import Source, SourceError
from serving.threads import in_thread

log = logging.getLogger(__name__)


class _Served:
    """An engine, and the cache server that is to outlive it."""

    def __init__(self, engine: Engine, cache: CacheServer) -> None:
        self._engine = engine
        self._cache = cache
        self.app = engine.app

    @property
    def failure(self) -> str | None:
        return self._engine.failure

    async def stop(self) -> None:
        await self._engine.stop()
        await self._cache.stop()


async def start(prepared: Prepared, note: Note) -> Engine:
    """Start what the plan says. Raises EngineError; processes may then still be there."""
    plan = prepared.plan
    caching = asyncio.create_task(_cache(prepared))
    folder = await _fetched(prepared.model, note)
    draft = await _fetched(prepared.draft, note) if prepared.draft else None
    await vllm.load(note)
    if not caching.done():
        note("waiting for the cache server")
    cache = await caching
    options = plan.engine(str(folder), str(draft) if draft else None, tiers=cache is not None)
    engine = await vllm.start(arguments(options), note)
    return _Served(engine, cache) if cache else engine


async def _fetched(source: Source, note: Note) -> Path:
    try:
        return await in_thread(source.fetch, note)
    except SourceError as error:
        raise EngineError(str(error)) from None


async def _cache(prepared: Prepared) -> CacheServer | None:
    """The cache server, or None where there is to be none, or it cannot be had."""
    plan = prepared.plan
    if not plan.cache_server or not plan.tiers:
        return None
    kv_tiers.DECISION.parent.mkdir(parents=True, exist_ok=True)
    kv_tiers.DECISION.write_text(kv_tiers.yaml(plan.tiers))
    try:
        return await cache_server.start(
            plan.cache_server, plan.cache_environment, plan.machine.ports[1]
        )
    except CacheServerError as error:
        log.error("serving without KV cache tiers: the cache server did not start: %s", error)
        return None
