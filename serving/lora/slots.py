# SPDX-License-Identifier: Apache-2.0
"""Slots for adapters: few in a batch of the engine (BatchSlots), more in its memory (EngineSlots).

vLLM (0.32) skips a request whose adapter has no room in the batch as long as requests for other
adapters in the batch arrive. It also forgets that pinned adapters take room, and then crashes. So
an adapter here has a slot in the batch, or waits for one. It keeps the slot while it has requests.
If others wait, its new requests also wait, until its current ones have ended and it queues again.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from prometheus_client import Counter, Gauge

from serving.errors import NoSlot

QUANTUM_S = 3.0
"""Seconds that an adapter may always keep its slot. If another one has waited for this long, new
requests of the adapter with the oldest slot also wait. After twice as long, new requests of the two
oldest wait, and so on.
"""

_LOADED = Gauge("slipway_adapters_loaded", "Adapters that the engine has.")
_SLOTS = Gauge("slipway_adapter_slots", "Adapters that the engine has room for.")
_EVICTED = Counter("slipway_adapter_evictions", "Adapters that made room for others.")

T = TypeVar("T")


@dataclass
class _Slot:
    """An adapter's slot in the batch."""

    since: float
    requests: int = 0


@dataclass
class _Waiting:
    """An adapter's waiting requests."""

    since: float
    requests: "list[asyncio.Future[None]]" = field(default_factory=list)


class BatchSlots(Generic[T]):
    """The batch's slots, which adapters with requests take in turns.

    number: returns the number of slots, which may change.
    """

    def __init__(
        self, number: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._number = number
        self._clock = clock
        self._slots: dict[T, _Slot] = {}  # the oldest first
        self._waiting: dict[T, _Waiting] = {}  # the one that has waited longest first

    @property
    def waiting(self) -> int:
        """Waiting requests."""
        return sum(len(waiting.requests) for waiting in self._waiting.values())

    def __contains__(self, adapter: T) -> bool:
        return adapter in self._slots

    @contextlib.asynccontextmanager
    async def acquire(self, adapter: T) -> AsyncIterator[None]:
        """Wait for the adapter's slot. One request then holds it until the block ends.

        Raises NoSlot if there are no slots at all.
        """
        if self._admits(adapter) and (adapter in self._slots or not self._waiting):
            self._enter(adapter, 1)
        else:
            await self._wait(adapter)
        try:
            if self._number() < 1:
                raise NoSlot(
                    "pinned adapters have all places; OPTION_MAX_LORAS sets how many there are"
                )
            yield
        finally:
            self._leave(adapter)

    def assign(self) -> None:
        """Give free slots to waiting adapters; call it when there may be more slots."""
        for adapter in list(self._waiting):
            if self._admits(adapter):
                # Without requests that have been cancelled.
                requests = [
                    future for future in self._waiting.pop(adapter).requests if not future.done()
                ]
                self._enter(adapter, len(requests))
                for future in requests:
                    future.set_result(None)

    async def _wait(self, adapter: T) -> None:
        assigned = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(adapter, _Waiting(self._clock())).requests.append(assigned)
        try:
            await assigned
        except asyncio.CancelledError:
            if not assigned.cancelled():  # it got the slot at the same time
                self._leave(adapter)
            elif adapter in self._waiting and all(
                future.done() for future in self._waiting[adapter].requests
            ):
                del self._waiting[adapter]
                self.assign()
            raise

    def _admits(self, adapter: T) -> bool:
        """Whether its requests may proceed: there is a free slot, or it may keep its own slot. Also
        True if there are no slots at all; acquire() then raises NoSlot.
        """
        slot = self._slots.get(adapter)
        if not slot:
            return len(self._slots) < self._number() or self._number() < 1
        since = next(
            (waiting.since for other, waiting in self._waiting.items() if other not in self._slots),
            None,
        )
        if since is None:
            return True
        now = self._clock()
        giving_way = itertools.islice(self._slots, int((now - since) / QUANTUM_S))
        return now - slot.since < QUANTUM_S or adapter not in giving_way

    def _enter(self, adapter: T, requests: int) -> None:
        if requests:
            self._slots.setdefault(adapter, _Slot(self._clock())).requests += requests

    def _leave(self, adapter: T) -> None:
        self._slots[adapter].requests -= 1
        if not self._slots[adapter].requests:
            del self._slots[adapter]
        self.assign()


class Resident(Protocol):
    """An adapter's interface to the engine's slots."""

    @property
    def pin(self) -> bool:
        """Whether it always stays loaded."""

    @property
    def wanted(self) -> bool:
        """Whether requests use it, or wait for it."""

    @property
    def evictable(self) -> bool:
        """Whether it may be unloaded now."""

    async def unload(self) -> None:
        """Leave the engine, and release() the slot."""


R = TypeVar("R", bound=Resident)


class EngineSlots(Generic[R]):
    """The engine's slots: the adapters that it has, or is loading. The least recently used one is
    evicted for another.

    number: the number of slots.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._recent: dict[R, None] = {}  # the most recently used last
        self._changed = asyncio.Event()
        _LOADED.set_function(lambda: len(self._recent))
        _SLOTS.set(number)

    @property
    def pinned(self) -> int:
        return sum(adapter.pin for adapter in self._recent)

    async def take(self, adapter: R) -> bool:
        """Wait for a slot. Returns False if no request wants the adapter any more."""
        while len(self._recent) >= self._number:
            idle = [other for other in self._recent if other.evictable]
            if not adapter.wanted:
                return False
            if idle:
                _EVICTED.inc()
                # Adapters without waiting requests first.
                await min(idle, key=lambda other: other.wanted).unload()
            else:
                await self.change()
        self._recent[adapter] = None
        return True

    def touch(self, adapter: R) -> None:
        """Mark an adapter as the most recently used."""
        self._recent[adapter] = self._recent.pop(adapter)

    def release(self, adapter: R) -> None:
        self._recent.pop(adapter, None)
        self.notify()

    def notify(self) -> None:
        """Wake up all that wait for a change: a request or a load has ended."""
        self._changed.set()

    async def change(self) -> None:
        """Wait until a request has ended, or an adapter's state has changed."""
        self._changed.clear()
        await self._changed.wait()
