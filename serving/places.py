"""Which adapters are worked on at once: a batch of the engine has room for few of them.

vLLM (0.32) passes over a request whose adapter has no room in the batch, for as long as requests of
those that have it keep coming; with pinned adapters it forgets that they take room, and dies. So an
adapter here has a place or waits for one. It keeps the place while it has requests, but when others
wait, it has to let its requests end and wait in its turn.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from serving.errors import NoSlot

QUANTUM_S = 3.0
"""Seconds that an adapter keeps its place, and that another waits, before new requests of the one
that had a place first wait as well; another one for each time more.
"""

T = TypeVar("T")


@dataclass
class _Place:
    since: float
    requests: int = 0


@dataclass
class _Waiting:
    since: float
    who: "list[asyncio.Future[None]]" = field(default_factory=list)


class Places(Generic[T]):
    """number: how many places there are."""

    def __init__(
        self, number: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._number = number
        self._clock = clock
        self._taken: dict[T, _Place] = {}  # the one that was taken first at the front
        self._waiting: dict[T, _Waiting] = {}  # the one that waits longest first

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(len(it.who) for it in self._waiting.values())

    def __contains__(self, it: T) -> bool:
        return it in self._taken

    def free(self, it: T) -> bool:
        """Whether one more request would not wait."""
        return self._open(it) and (it in self._taken or not self._waiting)

    @contextlib.asynccontextmanager
    async def held(self, it: T) -> AsyncIterator[None]:
        """A place, once there is one. Raises NoSlot where there are none at all."""
        if self.free(it):
            self._take(it, 1)
        else:
            await self._wait(it)
        try:
            if self._number() < 1:
                raise NoSlot(
                    "pinned adapters have all places; OPTION_MAX_LORAS sets how many there are"
                )
            yield
        finally:
            self._leave(it)

    def changed(self) -> None:
        """Give away what is free; to be called when the number of places has changed."""
        for it in list(self._waiting):
            if self._open(it):
                # Not those that have given up and are about to be told.
                who = [came for came in self._waiting.pop(it).who if not came.done()]
                self._take(it, len(who))
                for came in who:
                    came.set_result(None)

    async def _wait(self, it: T) -> None:
        came = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(it, _Waiting(self._clock())).who.append(came)
        try:
            await came
        except asyncio.CancelledError:
            if not came.cancelled():  # it came in the same moment
                self._leave(it)
            elif it in self._waiting and all(one.done() for one in self._waiting[it].who):
                del self._waiting[it]
                self.changed()
            raise

    def _open(self, it: T) -> bool:
        """Whether requests go on: there is room, or it has a place and may keep it; or there will
        be none, which they are to be told.
        """
        place = self._taken.get(it)
        if not place:
            return len(self._taken) < self._number() or self._number() < 1
        since = next(
            (at.since for other, at in self._waiting.items() if other not in self._taken), None
        )
        if since is None:
            return True
        now = self._clock()
        first = itertools.islice(self._taken, int((now - since) / QUANTUM_S))
        return now - place.since < QUANTUM_S or it not in first

    def _take(self, it: T, requests: int) -> None:
        if requests:
            self._taken.setdefault(it, _Place(self._clock())).requests += requests

    def _leave(self, it: T) -> None:
        self._taken[it].requests -= 1
        if not self._taken[it].requests:
            del self._taken[it]
        self.changed()
