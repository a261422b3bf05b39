# SPDX-License-Identifier: Apache-2.0
"""Which requests are there, from their heads on: how many may wait, and how they are ended."""

import asyncio
from collections.abc import Callable
from typing import Self

from serving.cancellation import Cancellation
from serving.errors import NotReady, Overloaded
from serving.inference.queue import FULL, FairQueue


class Admitted(Cancellation):
    """A request that is there, and its places among those that wait for the engine."""

    def __init__(self, admission: "Admission", began: float | None = None) -> None:
        super().__init__(began)
        self._admission = admission
        self._places = 0

    def take(self, places: int) -> None:
        """Take so many places more."""
        self._places += places
        self._admission.waiting += places

    def go(self) -> None:
        """Give a place back, where it has one: the engine is given the request, or a part of it."""
        if self._places:
            self.take(-1)

    def go_on(self) -> None:
        """Its body has come: the server does not stop before it has been answered."""
        self._admission.begin(self)

    def __enter__(self) -> Self:
        self.take(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_after(None)
        self.take(-self._places)
        self._admission.end(self)


class Admission:
    """The requests that are there.

    limit: how many may wait. elsewhere: how many of them wait for what only few need, which keeps
    no others out.
    """

    def __init__(self, queue: FairQueue, limit: int, elsewhere: Callable[[], int]) -> None:
        self._queue = queue
        self._limit = limit
        self._elsewhere = elsewhere
        self._idle = asyncio.Event()
        self._idle.set()
        self.under_way: set[Admitted] = set()
        self.waiting = 0
        """Places taken: by requests that the engine has not been given."""

    def admitted(self) -> Admitted:
        """A request whose head has come, to be entered. Raises Overloaded where too many wait."""
        self.require_places(1)
        return Admitted(self)

    def again(self, request: Admitted) -> Admitted:
        """The same request, for more clients than its first."""
        return Admitted(self, request.began)

    def begin(self, request: Admitted) -> None:
        self.under_way.add(request)
        self._idle.clear()

    def end(self, request: Admitted) -> None:
        self.under_way.discard(request)
        if not self.under_way:
            self._idle.set()

    def require_places(self, number: int, room: bool = True) -> None:
        """Raise Overloaded unless so many more may wait.

        room: whether what the engine has room for counts as well, which will not wait for long.
        """
        waiting = self.waiting - self._elsewhere() - (self._queue.room if room else 0)
        self.require_room(waiting + number - 1)

    def require_room(self, waiting: int) -> None:
        """Raise Overloaded where no more than these requests may wait."""
        if waiting >= self._limit:
            FULL.inc()
            raise Overloaded(
                f"{self._limit} requests are waiting; SERVING_JOB_QUEUE_SIZE sets the limit"
            )

    async def drained(self, deadline: float) -> bool:
        """Wait until no request is under way, for at most `deadline` seconds; say whether so."""
        try:
            await asyncio.wait_for(self._idle.wait(), deadline)
        except TimeoutError:
            return False
        return True

    def abort(self) -> int:
        """End every request under way with an error, and say how many there were."""
        for request in list(self.under_way):
            request.cancel(NotReady("the server is stopping"))
        return len(self.under_way)
