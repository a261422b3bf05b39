# SPDX-License-Identifier: Apache-2.0
"""Admission: limits the requests that wait for the engine, and ends those in flight at a drain."""

import asyncio
from collections.abc import Callable
from typing import Self

from serving.aio import set_within
from serving.cancellation import Cancellation
from serving.errors import NotReady, Overloaded
from serving.inference.queue import FULL, FairQueue


class Admitted(Cancellation):
    """An admitted request, and its places in the queue for the engine."""

    def __init__(self, admission: "Admission", began: float | None = None) -> None:
        super().__init__(began)
        self._admission = admission
        self._places = 0

    def take(self, places: int) -> None:
        """Take more places."""
        self._places += places
        self._admission.waiting += places

    def release_place(self) -> None:
        """Give one place back, if it has any: the engine got the request, or a part of it."""
        if self._places:
            self.take(-1)

    def begin(self) -> None:
        """Its body has arrived: from now on a drain waits for its answer."""
        self._admission.begin(self)

    def __enter__(self) -> Self:
        self.take(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_after(None)
        self.take(-self._places)
        self._admission.end(self)


class Admission:
    """The requests in flight.

    limit: the most requests that may wait. elsewhere: returns the number of waiting requests that
    do not count, because they wait for a resource that other requests do not need.
    """

    def __init__(self, queue: FairQueue, limit: int, elsewhere: Callable[[], int]) -> None:
        self._queue = queue
        self._limit = limit
        self._elsewhere = elsewhere
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight: set[Admitted] = set()
        self.waiting = 0
        """Places of requests that the engine does not have yet."""

    def admitted(self) -> Admitted:
        """Admit a request whose head has arrived. Returns it as a context manager. Raises
        Overloaded if too many requests wait.
        """
        self.require_places(1)
        return Admitted(self)

    def again(self, request: Admitted) -> Admitted:
        """Return the same request, shared by several clients."""
        return Admitted(self, request.began)

    def begin(self, request: Admitted) -> None:
        self.in_flight.add(request)
        self._idle.clear()

    def end(self, request: Admitted) -> None:
        self.in_flight.discard(request)
        if not self.in_flight:
            self._idle.set()

    def require_places(self, number: int, room: bool = True) -> None:
        """Raise Overloaded unless `number` more requests may wait.

        room: whether to add the engine's free capacity to the limit. Those requests hardly wait.
        """
        waiting = self.waiting - self._elsewhere() - (self._queue.room if room else 0)
        self.require_room(waiting + number - 1)

    def require_room(self, waiting: int) -> None:
        """Raise Overloaded if `waiting` requests have reached the limit."""
        if waiting >= self._limit:
            FULL.inc()
            raise Overloaded(
                f"{self._limit} requests are waiting; SERVING_JOB_QUEUE_SIZE sets the limit"
            )

    async def drained(self, deadline: float) -> bool:
        """Wait until all requests have ended, for at most `deadline` seconds. Returns whether they
        have.
        """
        return await set_within(self._idle, deadline)

    def abort(self) -> int:
        """End every request in flight with an error. Returns their number."""
        for request in list(self.in_flight):
            request.cancel(NotReady("the server is stopping"))
        return len(self.in_flight)
