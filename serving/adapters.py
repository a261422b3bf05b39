"""LoRA adapters: which there are, which of them the engine has, and their life. No HTTP.

An adapter is registered in milliseconds: its configuration and the header of its weights are read,
nothing else. The engine loads it when it is first used, once for all who wait. The engine has room
for so many; the one that was used longest ago makes room for the next. What is in use is never
unloaded, and what is unregistered goes when its last request has ended.

Inside, an adapter is called `name@digest`, so that no cache of the engine's can take one version of
it for another.
"""

import ast
import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from prometheus_client import Counter, Gauge, Histogram

from handlers.custom import FILE, told
from lmi_config import adapter
from lmi_config.model import Checkpoint, ModelError, Tensor
from serving.adapter_files import AdapterFiles
from serving.errors import (
    AdapterFailed,
    AdapterRefused,
    BadRequest,
    Conflict,
    NoSlot,
    NotFound,
)
from serving.places import Places
from serving.sources import SourceError
from serving.threads import in_thread
from serving.user_code import UserCode

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
LABELS = 100
"""Adapters that have a series of their own, the first ones that are used; the others share one."""

_REGISTERED = Gauge("slipway_adapters_registered", "Adapters that can be used.")
_LOADED = Gauge("slipway_adapters_loaded", "Adapters that the engine has.")
_LOADS = Histogram(
    "slipway_adapter_load_seconds",
    "How long the engine took to load an adapter.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
_FAILED = Counter("slipway_adapter_load_failures", "Loads that failed.")
_EVICTED = Counter("slipway_adapter_evictions", "Adapters that made room for others.")
_REQUESTS = Counter("slipway_adapter_requests", "Requests by adapter.", ["adapter"])

Wait = Callable[[Awaitable[None]], Awaitable[None]]


async def _simply(it: Awaitable[None]) -> None:
    await it


CodeStarter = Callable[[Path], Awaitable[UserCode | None]]
"""Starts a folder's model.py, where it has one that does something."""


class LoraEngine(Protocol):
    """What an engine does with adapters, by their inner names. Raises AdapterFailed."""

    async def load_adapter(self, name: str, folder: Path) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def pin_adapter(self, name: str) -> None: ...


@dataclass(eq=False)
class Adapter:
    """One version of an adapter.

    src: as it was registered. users: requests that are under way. code: that of its model.py, while
    it is loaded. kept: what has to be ended when it is unloaded.
    """

    name: str
    src: str
    digest: str
    pin: bool = False
    preload: bool = False
    users: int = 0
    code: UserCode | None = None
    kept: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack, repr=False)
    loading: "asyncio.Task[None] | None" = field(default=None, repr=False)

    @property
    def inner(self) -> str:
        return f"{self.name}@{self.digest}"

    @property
    def loaded(self) -> bool:
        task = self.loading
        return bool(task and task.done() and not task.cancelled() and not task.exception())


class Adapters:
    """The registry.

    base: the model's tensors. max_rank: of an adapter. slots: how many the engine has room for, in
    a batch and in all. limit: how many may be registered. code: starts the model.py of a folder.
    """

    def __init__(
        self,
        engine: LoraEngine,
        files: AdapterFiles,
        base: Mapping[str, Tensor],
        max_rank: int,
        slots: tuple[int, int],
        limit: int,
        code: CodeStarter,
    ) -> None:
        self._engine = engine
        self._files = files
        self._base = base
        self._max_rank = max_rank
        in_batch, self._slots = slots
        # A pinned one has its room in the batch for good.
        self._places = Places[Adapter](lambda: in_batch - sum(it.pin for it in self._recent))
        self._limit = limit
        self._code = code
        self._registered: dict[str, Adapter] = {}
        self._recent: dict[Adapter, None] = {}  # those in the engine, the one used last at the end
        self._freed = asyncio.Condition()
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # names come and go
        self._labels: set[str] = set()
        _REGISTERED.set_function(lambda: len(self._registered))
        _LOADED.set_function(lambda: len(self._recent))

    @property
    def waiting(self) -> int:
        """Requests that wait until their adapter is worked on."""
        return self._places.waiting

    def __contains__(self, name: object) -> bool:
        return name in self._registered

    def listed(self) -> list[Adapter]:
        return [self._registered[name] for name in sorted(self._registered)]

    def get(self, name: str) -> Adapter:
        try:
            return self._registered[name]
        except KeyError:
            raise NotFound(f"adapter {name!r:.140} is not registered") from None

    async def register(self, name: str, src: str, preload: bool = False, pin: bool = False) -> None:
        """Add an adapter; again with the same content does nothing more.

        Raises BadRequest for a name or a place that cannot be, Conflict where the name has other
        content, AdapterRefused where the files cannot be used, AdapterFailed or NoSlot where it was
        to be loaded and that failed; then it is not registered.
        """
        if not NAME.fullmatch(name):
            raise BadRequest(
                f"name={name!r:.140}: should be letters, digits, '-', '_' and '.', at most 128, "
                "with a letter or a digit at both ends"
            )
        async with self._lock(name):
            found = await self._look(name, src)
            known = self._registered.get(name)
            if known and known.digest != found.digest:
                raise Conflict(
                    f"adapter {name} is registered with other content, from {known.src}; "
                    "update it, or delete it first"
                )
            if not known and len(self._registered) >= self._limit:
                raise NoSlot(
                    f"{self._limit} adapters are registered; OPTION_MAX_ADAPTERS sets the limit"
                )
            adapter = known or found
            adapter.src = found.src
            self._registered[name] = adapter
            try:
                await self._apply(adapter, preload or pin, pin)
            except BaseException:
                if not known:
                    del self._registered[name]
                    await self._forget(adapter)
                raise

    async def update(
        self, name: str, src: str | None, preload: bool | None, pin: bool | None
    ) -> None:
        """Change an adapter's content or how it is kept. Where that fails it stays as it was.

        Raises as register() does, and NotFound.
        """
        self.get(name)
        async with self._lock(name):
            known = self.get(name)
            if known.pin and pin is False:
                raise BadRequest("an adapter cannot be unpinned; delete it and register it again")
            found = await self._look(name, src) if src else known
            adapter = known if found.digest == known.digest else found
            adapter.src = found.src
            pin = known.pin or bool(pin)
            await self._apply(adapter, bool(preload) or pin, pin)
            if adapter is not known:
                self._registered[name] = adapter
                await self._forget(known)

    async def unregister(self, name: str) -> None:
        """Take an adapter away: from new requests at once, from the engine when none uses it."""
        self.get(name)
        async with self._lock(name):
            adapter = self.get(name)
            del self._registered[name]
            await self._forget(adapter)

    @contextlib.asynccontextmanager
    async def using(self, name: str, wait: Wait = _simply) -> AsyncIterator[Adapter]:
        """An adapter that the engine has, and keeps for so long.

        wait: awaits what is given, or gives up. Raises NotFound, AdapterFailed, NoSlot, and what
        `wait` raises.
        """
        adapter = self.get(name)
        async with self._kept(adapter, wait):
            if len(self._labels) < LABELS:
                self._labels.add(name)
            _REQUESTS.labels(name if name in self._labels else "other").inc()
            yield adapter

    @contextlib.asynccontextmanager
    async def _kept(self, adapter: Adapter, wait: Wait = _simply) -> AsyncIterator[None]:
        adapter.users += 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                at_hand = adapter.loaded and (adapter.pin or self._places.free(adapter))
                await (_simply if at_hand else wait)(self._entered(adapter, stack))
                yield
        finally:
            adapter.users -= 1
            async with self._freed:
                self._freed.notify_all()

    async def _entered(self, adapter: Adapter, stack: contextlib.AsyncExitStack) -> None:
        if not adapter.pin:
            await stack.enter_async_context(self._places.held(adapter))
        await self._load(adapter)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _look(self, name: str, src: str) -> Adapter:
        return await in_thread(self._read, name, src)

    def _read(self, name: str, src: str) -> Adapter:
        try:
            with self._files.look(src) as (checkpoint, digest):
                faults = adapter.faults(adapter.look(checkpoint), self._base, self._max_rank)
                faults += _faults_of_code(checkpoint)
        except (ModelError, SourceError, OSError) as error:
            raise AdapterRefused(f"adapter {name} cannot be used: {error}") from None
        if faults:
            raise AdapterRefused(f"adapter {name} cannot be used: {'; '.join(faults)}")
        return Adapter(name, src, digest)

    async def _apply(self, adapter: Adapter, load: bool, pin: bool) -> None:
        if load:
            async with self._kept(adapter):
                if pin and not adapter.pin:
                    await self._engine.pin_adapter(adapter.inner)
                    adapter.pin = True
        adapter.preload = adapter.preload or load

    async def _load(self, adapter: Adapter) -> None:
        """Have the engine load it, once for all who wait."""
        if not adapter.loading:
            adapter.loading = asyncio.create_task(self._loaded(adapter))
        try:
            await asyncio.shield(adapter.loading)
        except asyncio.CancelledError:
            raise
        except Exception:
            adapter.loading = None  # the next one tries again
            raise
        self._recent.pop(adapter, None)
        self._recent[adapter] = None

    async def _loaded(self, adapter: Adapter) -> None:
        await self._take_slot(adapter)
        try:
            with _FAILED.count_exceptions(), _LOADS.time():
                async with contextlib.AsyncExitStack() as kept:
                    folder = await self._fetched(adapter, kept)
                    adapter.code = await self._code(folder)
                    if adapter.code:
                        kept.push_async_callback(adapter.code.stop)
                    await self._engine.load_adapter(adapter.inner, folder)
                    if adapter.code:  # which may have to be started again, from the same files
                        adapter.kept = kept.pop_all()
        except BaseException:
            async with self._freed:
                del self._recent[adapter]
                self._freed.notify_all()
            raise
        async with self._freed:  # whoever asked for it may have left
            self._freed.notify_all()

    async def _fetched(self, adapter: Adapter, kept: contextlib.AsyncExitStack) -> Path:
        fetched = self._files.fetched(adapter.src, adapter.digest)
        try:
            folder = await in_thread(fetched.__enter__)
        except (SourceError, OSError) as error:
            raise AdapterFailed(f"adapter {adapter.name} cannot be read: {error}") from None
        kept.push(fetched.__exit__)
        return folder

    async def _take_slot(self, adapter: Adapter) -> None:
        async with self._freed:
            while len(self._recent) >= self._slots:
                idle = [
                    it for it in self._recent if it.loaded and not it.pin and it not in self._places
                ]
                if idle:
                    _EVICTED.inc()
                    # Those first that no request waits for.
                    await self._unload(min(idle, key=lambda it: it.users > 0))
                else:
                    await self._freed.wait()
            self._recent[adapter] = None

    async def _forget(self, adapter: Adapter) -> None:
        async with self._freed:
            while adapter.users:
                await self._freed.wait()
            if adapter in self._recent:
                await self._unload(adapter)

    async def _unload(self, adapter: Adapter) -> None:
        adapter.loading = None
        try:
            await self._engine.unload_adapter(adapter.inner)
            await adapter.kept.aclose()
        finally:
            del self._recent[adapter]
            self._places.changed()


def _faults_of_code(checkpoint: Checkpoint) -> list[str]:
    """What can be said against its model.py without running it."""
    if FILE in checkpoint.sizes:
        try:
            ast.parse(checkpoint.head(FILE, checkpoint.sizes[FILE]), FILE)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return [told(error)]
    return []
