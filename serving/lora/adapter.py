# SPDX-License-Identifier: Apache-2.0
"""One version of an adapter, its states, and its loading and unloading.

The engine loads an adapter at its first use, once for all waiting requests. An adapter in use is
never unloaded. Its inner name in the engine is `name@digest`, so that no cache of the engine's
confuses two versions.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Histogram

from serving.aio import in_thread
from serving.engine.base import Engine
from serving.errors import AdapterFailed, AlreadyLoaded, NotLoaded, ServingError
from serving.lora.adapter_files import AdapterFiles, LocalCopy, Located
from serving.lora.slots import BatchSlots, EngineSlots
from serving.sources.source import SourceError
from serving.user_code import UserCode

log = logging.getLogger(__name__)

_LOADS = Histogram(
    "slipway_adapter_load_seconds",
    "How long the engine took to load an adapter.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
_FAILED = Counter("slipway_adapter_load_failures", "Loads that failed.")

CodeStarter = Callable[[Path], Awaitable[UserCode | None]]
"""Starts a folder's model.py, if it has functions to call."""


@dataclass(frozen=True)
class AdapterHost:
    """The parts that all adapters of a server share: engine, slots and the sources of files."""

    engine: Engine
    batch: BatchSlots["Adapter"]
    slots: EngineSlots["Adapter"]
    files: AdapterFiles
    start_code: CodeStarter | None
    """None if adapters may not have code."""


class State(enum.StrEnum):
    """The states of an adapter.

    REGISTERED: the engine does not have it. GONE: it is unregistered, and cannot be loaded.
    """

    REGISTERED = "registered"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    GONE = "gone"


_NEXT = {
    State.REGISTERED: {State.LOADING, State.GONE},
    State.LOADING: {State.LOADED, State.REGISTERED},
    State.LOADED: {State.UNLOADING},
    State.UNLOADING: {State.REGISTERED},
    State.GONE: set[State](),
}


class Adapter:
    """One version of an adapter, with its loading and unloading.

    src, preload, pin: the registered values, or later changes.
    """

    def __init__(self, name: str, located: Located, host: AdapterHost) -> None:
        self.name = name
        self.digest = located.digest
        self.src = located.src
        self.preload = False
        self.pin = False
        self._host = host
        self.fault: str | None = None
        """Why its last load failed, or None."""
        self._users = 0  # requests in flight, and changes that need it loaded
        self._state = State.REGISTERED
        # The task that takes it from LOADING or UNLOADING to the next state. No client's disconnect
        # cancels it, and there is never a second one.
        self._change: asyncio.Task[None] | None = None
        # While it is loaded:
        self.code: UserCode | None = None
        self._resources = contextlib.AsyncExitStack()

    @property
    def inner(self) -> str:
        """Its name in the engine."""
        return f"{self.name}@{self.digest}"

    @property
    def located(self) -> Located:
        return Located(self.src, self.digest)

    @property
    def state(self) -> State:
        return self._state

    @property
    def loaded(self) -> bool:
        return self._state is State.LOADED

    @property
    def wanted(self) -> bool:
        """Whether requests use it, or wait for it."""
        return self._users > 0

    @property
    def evictable(self) -> bool:
        """Whether it may be unloaded for another: the engine runs none of its requests."""
        return self.loaded and not self.pin and self not in self._host.batch

    @contextlib.asynccontextmanager
    async def use(self, located: Located | None = None) -> AsyncIterator[None]:
        """Load it if needed, and keep it loaded until the block ends.

        located: the place of its files, if they were just found; otherwise they are looked up at
        `src`. Raises AdapterFailed and NoSlot.
        """
        self._users += 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                if not self.pin:  # a pinned adapter keeps its slot in the batch
                    await stack.enter_async_context(self._host.batch.acquire(self))
                await self._ensure_loaded(located or self.located)
                yield
        finally:
            self._users -= 1
            self._host.slots.notify()

    async def configure(self, located: Located, preload: bool, pin: bool) -> None:
        """Apply a registration. If loading or pinning fails, nothing changes.

        located: the same version, perhaps at another place. Raises AdapterFailed and NoSlot.
        """
        if preload:
            async with self.use(located):
                if pin and not self.pin:
                    await self._host.engine.pin_adapter(self.inner)
                    self.pin = True
        self.preload = preload
        self.src = located.src

    async def unload(self) -> None:
        """Leave the engine. Call only if it is loaded and not in use."""
        self._begin(State.UNLOADING, self._unload())
        await self._changed(State.UNLOADING)

    async def retire(self) -> None:
        """Leave the engine forever, when no request uses it. No new request may get it."""
        while self._users:
            await self._host.slots.change()
        while self._change:
            await asyncio.wait({self._change})
        if self.loaded:
            await self.unload()
        self._end(State.GONE)

    async def _ensure_loaded(self, located: Located) -> None:
        """Load it into the engine, once for all waiting requests. A failure fails all of them."""
        while not self.loaded:
            if not self._change:
                self._begin(State.LOADING, self._load(located))
            await self._changed(State.LOADING)
        self._host.slots.touch(self)

    async def _load(self, located: Located) -> None:
        """Go from LOADING to LOADED, or to REGISTERED if the load fails or no request waits."""
        reached = State.REGISTERED
        try:
            if await self._host.slots.take(self):
                with _FAILED.count_exceptions(), _LOADS.time():
                    await self._bring(located)
                reached, self.fault = State.LOADED, None
        except Exception as error:
            foreseen = isinstance(error, ServingError)
            self.fault = str(error) if foreseen else "it could not be loaded; the log says why"
            raise
        finally:
            self._end(reached)
            if reached is State.REGISTERED:
                self._host.slots.release(self)
            self._host.slots.notify()

    async def _bring(self, located: Located) -> None:
        async with contextlib.AsyncExitStack() as resources:
            copy = await self._fetch(located)
            resources.callback(copy.release)
            code = await self._host.start_code(copy.folder) if self._host.start_code else None
            if code:
                resources.push_async_callback(code.stop)
            with contextlib.suppress(AlreadyLoaded):  # the inner name has the content's digest
                await self._host.engine.load_adapter(self.inner, copy.folder)
            self.code = code
            if code:  # a restart of the code needs the same files
                self._resources = resources.pop_all()

    async def _fetch(self, located: Located) -> LocalCopy:
        try:
            return await in_thread(self._host.files.fetch, located)
        except (SourceError, OSError) as error:
            raise AdapterFailed(f"adapter {self.name} cannot be read: {error}") from None

    async def _unload(self) -> None:
        """Go from UNLOADING to REGISTERED, whether or not the engine reports an error."""
        try:
            with contextlib.suppress(NotLoaded):
                await self._host.engine.unload_adapter(self.inner)
        finally:
            try:
                await self._resources.aclose()
            finally:
                self.code = None
                self._end(State.REGISTERED)
                self._host.slots.release(self)
                self._host.batch.assign()

    def _begin(self, state: State, change: Coroutine[Any, Any, None]) -> None:
        """Enter a state that ends when `change` calls _end()."""
        self._enter(state)
        self._change = asyncio.create_task(change)
        self._change.add_done_callback(self._log_unheard)

    def _end(self, state: State) -> None:
        """Enter a state that lasts."""
        self._enter(state)
        self._change = None

    def _enter(self, state: State) -> None:
        if state not in _NEXT[self._state]:
            raise RuntimeError(f"adapter {self.inner} cannot go from {self._state} to {state}")
        self._state = state

    async def _changed(self, state: State) -> None:
        """Wait for the current change, and raise its exception if it left this state."""
        change, left = self._change, self._state
        assert change
        await asyncio.wait({change})
        if left is state:
            change.result()

    def _log_unheard(self, change: "asyncio.Task[None]") -> None:
        """Log why a change failed if no request can be answered with the error."""
        error = None if change.cancelled() else change.exception()
        if error and not self._users:
            unforeseen = None if isinstance(error, ServingError) else error
            log.warning("adapter %s: %s", self.name, error, exc_info=unforeseen)
