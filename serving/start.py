"""From a plan to a running engine: fetch the model, start the cache server, start vLLM."""

import asyncio
import contextlib
import functools
import logging
import os
import threading
from pathlib import Path

from handlers.custom import FILE
from lmi_config import kv_tiers
from lmi_config.model import Folder, tensors
from lmi_config.options import SCRIPTS, Settings
from lmi_config.plan import Plan
from lmi_config.vllm_args import arguments
from serving import disk_tier
from serving import engine as vllm
from serving.adapter_files import AdapterFiles
from serving.adapters import Adapters, LoraEngine
from serving.cache_server import CacheServer, CacheServerError
from serving.engine import Engine, EngineError, Note
from serving.errors import ServingError, UserCodeFailed
from serving.prepare import Prepared
from serving.sources import DOWNLOADS, Hub, Source, SourceError
from serving.threads import in_thread
from serving.user_code import Limits, UserCode, started

log = logging.getLogger(__name__)

HANDLER_S = 240  # LMI's own limit


class _Served:
    """An engine, the cache server that is to outlive it, and what serves beside it."""

    def __init__(
        self,
        engine: Engine,
        cache: CacheServer | None,
        adapters: Adapters | None,
        code: UserCode | None,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self.app = engine.app
        self.adapters = adapters
        self.code = code
        self.concurrency = engine.concurrency
        self.embeds = engine.embeds

    @property
    def failure(self) -> str | None:
        return self._engine.failure

    async def stop(self) -> None:
        if self.code:
            await self.code.stop()
        await self._engine.stop()
        if self._cache:
            await self._cache.stop()


async def start(prepared: Prepared, note: Note) -> Engine:
    """Start what the plan says. Raises EngineError; processes may then still be there."""
    plan = prepared.plan
    folder = await _fetched(prepared.model, note)
    draft = await _fetched(prepared.draft, note) if prepared.draft else None
    if plan.model.weight_bytes < plan.machine.memory_free / 2:
        threading.Thread(target=read_ahead, args=(folder,), daemon=True).start()
    caching = asyncio.create_task(_cache(plan, folder))
    _, code = await asyncio.gather(vllm.load(note), _code(prepared, folder))
    if not caching.done():
        note("waiting for the cache server")
    cache, name = await caching
    options = plan.engine(str(name), str(draft) if draft else None, tiers=cache is not None)
    engine = await vllm.start(arguments(options), note)
    adapters = await _adapters(plan, folder, engine) if plan.settings.enable_lora else None
    return _Served(engine, cache, adapters, code)


def read_ahead(folder: Path) -> None:
    """Have the kernel read the weights from the disk, before vLLM wants them."""
    for file in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(OSError), file.open("rb") as weights:
            os.posix_fadvise(weights.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _limits(settings: Settings) -> Limits:
    return Limits(
        settings.formatter_timeout, settings.whole_timeout or HANDLER_S, settings.formatter_memory
    )


async def _code(prepared: Prepared, folder: Path) -> UserCode | None:
    """The model's model.py: that of the deployment, or that which came with the model.

    What comes from the hub is no part of a deployment, and is not run.
    """
    settings = prepared.plan.settings
    folders = [settings.model_folder] if settings.model_folder else []
    if not isinstance(prepared.model, Hub):
        folders.append(folder)
    for place in folders:
        if (place / FILE).is_file():
            if settings.secure_mode and SCRIPTS in settings.security_controls:
                raise EngineError(f"{place / FILE}: {SCRIPTS} forbids it")
            try:
                return await started(place.resolve(), folder, _limits(settings))
            except UserCodeFailed as error:
                raise EngineError(str(error)) from None
    if settings.entry_point == FILE:
        raise EngineError(f"there is no {FILE} in {' or '.join(map(str, folders))}")
    return None


async def _adapters(plan: Plan, folder: Path, engine: LoraEngine) -> Adapters:
    """The registry, with what is in the model's own folder `adapters`."""
    settings = plan.settings
    options = plan.engine(str(folder), None)
    adapters = Adapters(
        engine,
        files=AdapterFiles(
            roots=(*(Path(root).resolve() for root in settings.adapter_roots), folder.resolve()),
            buckets=settings.adapter_buckets,
            store=Path(settings.download_dir or DOWNLOADS) / f"adapters-{settings.port}",
            limit=settings.adapter_disk,
            controls=settings.security_controls if settings.secure_mode else (),
        ),
        base=await in_thread(tensors, Folder(folder)),
        max_rank=options["max_lora_rank"],
        slots=(options["max_loras"], settings.max_cpu_loras or options["max_loras"]),
        limit=settings.max_adapters,
        code=functools.partial(started, tokenizer=folder, limits=_limits(settings)),
    )
    own = folder / "adapters"
    for path in sorted(own.iterdir()) if own.is_dir() else ():
        if path.is_dir():
            try:
                await adapters.register(path.name, str(path))
            except ServingError as error:
                raise EngineError(str(error)) from None
    return adapters


async def _fetched(source: Source, note: Note) -> Path:
    try:
        return await in_thread(source.fetch, note)
    except SourceError as error:
        raise EngineError(str(error)) from None


async def _cache(plan: Plan, folder: Path) -> tuple[CacheServer | None, Path]:
    """The cache server, and by which name it knows the model's folder.

    There is none where none is planned, or where it cannot be had.
    """
    tiers = plan.tiers
    if not tiers or not tiers.l1:
        return None, folder
    try:
        options = plan.engine(str(folder), None)
        fingerprint = await in_thread(disk_tier.fingerprint, folder, options)
        name = disk_tier.named(folder, fingerprint)
        if tiers.disk:
            tiers = await in_thread(disk_tier.claim, tiers, fingerprint)
        kv_tiers.DECISION.parent.mkdir(parents=True, exist_ok=True)
        kv_tiers.DECISION.write_text(kv_tiers.yaml(tiers))
        server = CacheServer(
            kv_tiers.server_arguments(tiers, plan.machine),
            plan.cache_environment,
            plan.machine.ports[1],
            {"l1": tiers.l1, "disk": tiers.disk},
            vllm.prefilled,
            tiers.chunk_size,
            kv_tiers.shared_pool(tiers, plan.machine),
        )
        await server.start()
    except (CacheServerError, OSError) as error:
        log.error("serving without KV cache tiers: the cache server did not start: %s", error)
        return None, folder
    return server, name
