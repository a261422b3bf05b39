# SPDX-License-Identifier: Apache-2.0
"""The start of an engine by a plan: fetch the model, start the cache server, start vLLM."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import Gauge

from handlers.custom import FILE, THREADS
from lmi_config.facts import adapter
from lmi_config.facts.model import Folder, Tensor, tensors
from lmi_config.options.declared import SCRIPTS, Settings
from lmi_config.plan.kv_tiers import NoTiers, ports
from lmi_config.plan.plan import Plan
from lmi_config.plan.vllm import LORA_MODULES, arguments
from serving import folders
from serving.aio import in_thread
from serving.engine import vllm
from serving.engine.base import Engine, EngineError
from serving.engine.canary.comparison import Verification
from serving.engine.no_engine import NoEngine
from serving.errors import ServingError, UserCodeFailed
from serving.kv_cache.cache_server import CacheServer
from serving.kv_cache.session_client import SessionClient
from serving.lifecycle import Note, Step
from serving.lora.adapter_files import AdapterFiles
from serving.lora.adapter_registry import AdapterRegistry
from serving.lora.shared_list import ListBucket, ListFolder, ListStore, SharedList
from serving.server import cache, fetching
from serving.server.compile_cache import Kept, prepare_model_infos
from serving.server.fetching import Fetched
from serving.server.prepare import Deployment
from serving.sources.hub import OFFLINE, Hub, offline
from serving.sources.locate import downloads_folder
from serving.user_code import INITIAL_S, Limits, UserCode, start_user_code

log = logging.getLogger(__name__)

_TIERS = Gauge(
    "slipway_kv_tiers_info",
    "Whether KV caches are kept in tiers, for which kind of attention, and why not.",
    ["state", "attention", "reason"],
)

HANDLER_S = 240
"""Seconds for a custom handler's answer. LMI has the same limit."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """The running parts after the start: the engine, adapters, model.py and cache server."""

    engine: Engine
    adapters: AdapterRegistry | None
    code: UserCode | None
    """The model's model.py."""
    cache: CacheServer | None
    tiers: SessionClient | None = None
    """The conversations in the KV cache tiers; None without tiers or retention."""
    gpus: int = 0
    """The number of GPUs that the engine may use."""
    compiled: Kept | None = None
    """The compiled files, for the next start."""

    async def save(self) -> None:
        """List the compiled files, for the next start."""
        if self.compiled:
            await in_thread(self.compiled.save)

    async def follow(self) -> None:
        """Keep the adapters equal to the list shared with other servers, until cancelled."""
        if self.adapters:
            await self.adapters.follow()

    async def stop(self) -> None:
        """Stop all parts; the cache server last, because the engine uses it."""
        if self.code:
            await self.code.stop()
        await self.engine.stop()
        if self.tiers:
            await self.tiers.close()
        if self.cache:
            await self.cache.stop()
        await self.save()
        if self.compiled:
            self.compiled.close()


async def start(deployment: Deployment, note: Note) -> Runtime:
    """Start a deployment. Raises EngineError, and may then leave processes running."""
    plan = deployment.plan
    gpus = len(plan.machine.gpus)
    if plan.hindrance and not await in_thread(_may_have_code, deployment):
        raise EngineError(plan.hindrance)
    shared = deployment.shared
    opening = asyncio.create_task(_open_compile_cache(plan, note))
    if shared:
        fetched, draft = Fetched(shared.folder), shared.draft
    else:
        fetched = await fetching.fetch(deployment.model, plan, note)
        draft = await cache.fetch(deployment.draft, note) if deployment.draft else None
    folder = fetched.folder
    small = plan.model.weight_bytes < plan.machine.memory_free / 2
    # Other loaders than vLLM's own read past the page cache.
    own = not (fetched.options or plan.loading.format)
    if small and own and not shared:
        threading.Thread(target=read_ahead, args=(folder,), daemon=True).start()
    compiled = await opening
    # Compilers read these when they are imported.
    os.environ.update({name: os.environ.get(name, it) for name, it in compiled.environment.items()})
    await in_thread(prepare_model_infos, os.environ)
    async with _beside(_start_cache(deployment, folder)) as starting_cache:
        _, code = await asyncio.gather(vllm.load(note), _start_code(deployment, folder))
        if not starting_cache.done():
            note(Step.CACHE_SERVER)
        server, name = await starting_cache
    if code and code.alone:
        if server:
            await server.stop()
        log.info("vLLM is not started: the handle of %s is the whole service", FILE)
        if names := plan.settings.for_engine:
            log.warning("only the handle of %s may read %s", FILE, ", ".join(names))
        return Runtime(engine=NoEngine(THREADS), adapters=None, code=code, cache=None, gpus=gpus)
    if plan.hindrance:
        if server:
            await server.stop()
        raise EngineError(plan.hindrance)
    without = shared.without_tiers if shared else cache.without(server)
    if without:
        plan = plan.without_tiers(without)
    _TIERS.labels(*tiers_info(plan)).set(1)
    options = {**plan.engine(str(name), str(draft) if draft else None), **fetched.options}
    async with fetched.blamed():
        engine = await vllm.start(arguments(options), note, _verification(plan))
    await fetched.whole()
    adapters = await _register_adapters(plan, folder, engine)
    return Runtime(
        engine=engine,
        adapters=adapters,
        code=code,
        cache=server,
        tiers=_sessions(plan),
        gpus=gpus,
        compiled=compiled,
    )


def _sessions(plan: Plan) -> SessionClient | None:
    """Return the client of the conversations in the tiers; None without tiers or retention."""
    if isinstance(plan.tiers, NoTiers) or not plan.settings.kv_retention:
        return None
    return SessionClient(ports(plan.machine).http)


async def _open_compile_cache(plan: Plan, note: Note) -> Kept:
    """The compile cache, or one that keeps nothing."""
    options = plan.settings
    fetching = functools.partial(note, Step.FETCHING)
    return await in_thread(
        Kept, plan.compile_cache, options.cache_size, options.cache_source, fetching
    )


async def _start_cache(deployment: Deployment, folder: Path) -> tuple[CacheServer | None, Path]:
    """Call cache.start(), unless a supervisor has started the cache server for all copies."""
    if deployment.shared:
        return None, deployment.shared.name
    return await cache.start(deployment.plan, folder, vllm.prefilled, vllm.hits)


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run work in a task during the block. If the block fails, cancel the task and wait for it."""
    task = asyncio.create_task(work)
    try:
        yield task
    except BaseException:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _may_have_code(deployment: Deployment) -> bool:
    """Whether there may be a model.py, which may answer all requests without vLLM."""
    settings = deployment.plan.settings
    folder = settings.model_folder
    if settings.entry_point == FILE or (folder and (folder / FILE).is_file()):
        return True
    return not isinstance(deployment.model, Hub) and FILE in deployment.model.checkpoint().sizes


def read_ahead(folder: Path) -> None:
    """Read the weights from the disk into the page cache, before vLLM needs them.

    POSIX_FADV_WILLNEED would not do: Linux cuts each request to one read-ahead window.
    """
    buffer = bytearray(1024**2)
    for file in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(OSError), file.open("rb", buffering=0) as weights:
            while weights.readinto(buffer):
                pass


def _limits(settings: Settings) -> Limits:
    return Limits(
        settings.formatter_timeout,
        settings.whole_timeout or HANDLER_S,
        settings.formatter_memory,
        settings.model_loading_timeout or INITIAL_S,
    )


async def _start_code(deployment: Deployment, folder: Path) -> UserCode | None:
    """Start the model's model.py, if there is one. Raises EngineError if it must not or cannot run.

    Its handle answers all requests, without vLLM, if OPTION_ENTRYPOINT names it, as in LMI, or if
    the handle has its own engine (UserCode.alone).
    """
    settings = deployment.plan.settings
    folders = _code_folders(deployment, folder)
    place = next((place for place in folders if (place / FILE).is_file()), None)
    required = settings.entry_point == FILE
    if place is None:
        if required:
            where = " or ".join(map(str, folders))
            raise EngineError(f"there is no {FILE} in {where}; put it there")
        return None
    if settings.secure_mode and SCRIPTS in settings.security_controls:
        raise EngineError(f"{place / FILE}: {SCRIPTS} forbids it")
    try:
        properties = handler_properties(deployment.plan, folder)
        code = await start_user_code(
            *(place.resolve(), folder, _limits(settings), properties),
            in_front=settings.entry_point not in (None, FILE),
        )
    except UserCodeFailed as error:
        raise EngineError(str(error)) from None
    if required and not code:
        raise EngineError(
            f"{settings.origins['entry_point']}={FILE}, but {place / FILE} has no function "
            "that is called: `handle(inputs)`, or one under @input_formatter or @output_formatter; "
            "write one of them"
        )
    if code and code.handles:
        code.alone = code.alone or required
        if code.alone and settings.enable_lora:
            await code.stop()
            raise EngineError(
                f"{settings.origins['enable_lora']}: adapters need vLLM, and the handle of "
                f"{place / FILE} is the whole service; remove one of them"
            )
    return code


def handler_properties(plan: Plan, folder: Path) -> Mapping[str, str]:
    """Return the properties for handlers: the options as LMI passes them, with LMI's additions.

    folder: the model's local folder, which replaces the URI of a model from S3.
    """
    settings = plan.settings
    properties = {
        **settings.properties,
        "tensor_parallel_degree": str(plan.parallelism.tensor),
        "device_id": "0" if plan.machine.gpus else "-1",
    }
    if settings.model_id.startswith("s3://"):
        properties["model_id"] = str(folder)
    return properties


def _code_folders(deployment: Deployment, folder: Path) -> list[Path]:
    """Return the folders that may have a model.py: the deployment's, and the model's.

    Files from the hub are not part of a deployment. They are never run.
    """
    own = _own_folders(deployment.plan.settings, folder)
    return [it for it in own if it != folder] if isinstance(deployment.model, Hub) else own


def _own_folders(settings: Settings, folder: Path) -> list[Path]:
    """Return the folders of the deployment's files: of serving.properties, of the weights."""
    own = settings.model_folder
    return [folder] if own in (None, folder) else [own, folder]


async def _register_adapters(plan: Plan, folder: Path, engine: Engine) -> AdapterRegistry | None:
    """Make the registry, with the adapters in the folder of OPTION_ADAPTERS and those that
    OPTION_LORA_MODULES names. Returns None without adapters. Raises EngineError.
    """
    settings = plan.settings
    if not settings.enable_lora:
        return None
    adapters = _registry(plan, folder, engine, await in_thread(tensors, Folder(folder)))
    places = [place / settings.adapters for place in _own_folders(settings, folder)]
    found = next((place for place in places if place.is_dir()), None)
    if found is None and (option := settings.origins.get("adapters")):
        log.warning("%s: there is no folder %s", option, " or ".join(map(str, places)))
    for path in sorted(found.iterdir()) if found else ():
        if path.is_dir() and not path.name.startswith("."):
            try:
                await adapters.register(path.name, str(path), settings.lmi_preload, share=False)
            except ServingError as error:
                raise EngineError(str(error)) from None
    for module in plan.lora_modules:
        try:
            await adapters.register(module.name, module.src, settings.lmi_preload, share=False)
        except ServingError as error:
            raise EngineError(f"{settings.named(LORA_MODULES)}: {error}") from None
    await adapters.catch_up()
    return adapters


def _registry(
    plan: Plan, folder: Path, engine: Engine, base: Mapping[str, Tensor]
) -> AdapterRegistry:
    settings = plan.settings
    start_code = None
    if settings.runs_adapter_code:
        limits = _limits(settings)
        start_code = functools.partial(
            start_user_code, tokenizer=folder, limits=limits, of_adapter=True
        )
    return AdapterRegistry(
        engine,
        files=_adapter_files(plan, folder),
        base=base,
        max_rank=plan.options["max_lora_rank"],
        batch_slots=plan.options["max_loras"],
        engine_slots=settings.max_cpu_loras or plan.options["max_loras"],
        limit=settings.max_adapters,
        start_code=start_code,
        model_names=settings.model_names,
        shared=_shared_list(settings),
        names=adapter.names(
            plan.model.architectures, settings.engine, engine.embeds or engine.classifies
        ),
    )


def _shared_list(settings: Settings) -> SharedList | None:
    """Return the list of adapters that all servers share, or None. Raises EngineError if it cannot
    be read.
    """
    if not settings.adapter_list:
        return None
    try:
        where = settings.adapter_list
        match where.partition("://"):
            case "s3", _, _:
                shared = SharedList(ListBucket(where))
            case _, "", _:
                shared = SharedList(ListFolder(Path(where)))
            case _:
                shared = SharedList(ListStore(where))
        shared.read()
    except OSError as error:
        raise EngineError(f"OPTION_ADAPTER_LIST cannot be used: {error}") from None
    return shared


def _adapter_files(plan: Plan, folder: Path) -> AdapterFiles:
    settings = plan.settings
    # The plan sets those of these variables that the operator has not set.
    told = {name: os.environ.get(name, "") for name in OFFLINE if name not in plan.environment}
    downloads = downloads_folder(settings.download_dir)
    with contextlib.suppress(OSError):  # an adapter that needs the folder reports the failure
        folders.make(downloads)
    return AdapterFiles(
        roots=tuple(
            root.resolve()
            for root in (
                *map(Path, settings.adapter_roots),
                *_own_folders(settings, folder),
                *(Path(module.src) for module in plan.lora_modules if "://" not in module.src),
            )
        ),
        buckets=settings.adapter_buckets,
        store=downloads / f"adapters-{settings.port}",
        limit=settings.adapter_disk,
        controls=settings.security_controls if settings.secure_mode else (),
        repos=settings.adapter_repos,
        offline=offline(told),
    )


def tiers_info(plan: Plan) -> tuple[str, str, str]:
    """Return the labels of the tiers' series: on or off, the kind of attention, and why off."""
    kind = plan.verdict.kind
    if isinstance(plan.tiers, NoTiers):
        return "off", kind, plan.tiers.word
    return "on", kind, ""


def _verification(plan: Plan) -> Verification | None:
    """Return how hits of the tiers are verified, or None if they are not."""
    settings, tiers = plan.settings, plan.tiers
    if isinstance(tiers, NoTiers) or not settings.kv_tiers_verify:
        return None
    there = {"l1": not tiers.skip_l1, "disk": tiers.disk, "shared": tiers.shared}
    return Verification(
        every=settings.kv_tiers_verify,
        top=settings.kv_tiers_verify_top,
        any=settings.kv_tiers_verify_any,
        tiers="+".join(name for name, it in there.items() if it),
    )
