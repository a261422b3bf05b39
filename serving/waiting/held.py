# SPDX-License-Identifier: Apache-2.0
"""Requests that are held until a server is free, a model is loaded, or the like.

The queue has bounds: requests, bytes of their bodies, and each request's own deadline. The owner
calls wake() when there may be room; without a call the queue does no work.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable

from serving.errors import Overloaded, ServingError
from serving.waiting.turns import Turns

LONGEST_RETRY_S = 30
_SMOOTHING = 0.1  # the weight of the last request in how long requests wait


@dataclasses.dataclass(slots=True, eq=False)
class Waiter:
    """One request that waits.

    kind: names the awaited thing, equally for all requests that wait for it. ready: whether one
    more request of this kind can go now. lane: whose it is; lanes take turns. band: the lowest goes
    first. cost: tokens of work that it is charged for. size: bytes that it holds. until: its
    deadline, by the queue's clock. go: called when its turn has come; after it, ready() has to know
    that the request has gone. fail: called instead if its turn does not come. Both must not raise.
    """

    kind: Hashable
    ready: Callable[[], bool]
    lane: str
    band: int
    cost: int
    size: int
    until: float
    go: Callable[[float], None]
    fail: Callable[[str, ServingError], None]
    since: float = 0.0
    """When it began to wait."""


@dataclasses.dataclass(slots=True)
class _Kind:
    ready: Callable[[], bool]
    count: int = 0


class HeldQueue:
    """The requests that wait, in the order of Turns: bands, then lanes by the cost of the requests
    that have gone, then first come, first served.
    """

    def __init__(self, most: int, most_bytes: int, clock: Callable[[], float]) -> None:
        """most, most_bytes: bounds of all requests together. clock: in seconds."""
        self._most = most
        self._most_bytes = most_bytes
        self._clock = clock
        self._turns: Turns[Waiter] = Turns()
        self._kinds: dict[Hashable, _Kind] = {}
        self._waited_s = 0.0  # mean
        self._waking = False
        self._closed: ServingError | None = None
        self.bytes = 0
        """Bytes that the waiting requests hold."""
        self.cost = 0
        """Tokens of work of all waiting requests."""

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def retry_after(self) -> int:
        """Seconds after which a refused request may come again: the mean time that requests waited
        lately.
        """
        return min(max(math.ceil(self._waited_s), 1), LONGEST_RETRY_S)

    def waits_for(self, kind: Hashable) -> bool:
        """Whether any request waits for this, so that one more has to stand behind it."""
        return kind in self._kinds

    def counts(self) -> dict[Hashable, int]:
        """The number of waiting requests of each kind."""
        return {kind: it.count for kind, it in self._kinds.items()}

    def add(self, waiter: Waiter) -> None:
        """Let a request wait. Raises Overloaded if there is no room for it, and after close() its
        error.

        If the queue is full, a request of a longer lane or of a later band makes room.
        """
        if self._closed:
            raise self._closed
        while self._is_full(waiter):
            last = self._turns.last(waiter.lane, waiter.band) if len(self) else None
            if last is None:
                raise self._full()
            self._fail(last, "full", self._full())
        waiter.since = self._clock()
        self._turns.add(waiter, waiter.lane, waiter.cost, waiter.band)
        self._kinds.setdefault(waiter.kind, _Kind(waiter.ready)).count += 1
        self.bytes += waiter.size
        self.cost += waiter.cost

    def _is_full(self, waiter: Waiter) -> bool:
        return len(self) >= self._most or self.bytes + waiter.size > self._most_bytes

    def _full(self) -> Overloaded:
        return Overloaded(
            f"{len(self)} requests wait for a server, as many as there is room for; try again",
            retry_after=self.retry_after,
        )

    def leave(self, waiter: Waiter) -> None:
        """Take out a request, if it still waits."""
        if waiter not in self._turns:
            return
        self._turns.remove(waiter)
        self._left(waiter)

    def _left(self, waiter: Waiter) -> None:
        self.bytes -= waiter.size
        self.cost -= waiter.cost
        kind = self._kinds[waiter.kind]
        kind.count -= 1
        if not kind.count:
            del self._kinds[waiter.kind]

    def wake(self) -> None:
        """Release the requests whose turn has come. To be called when a server may be ready."""
        if not self._kinds or self._waking:  # by what one of them does; it is looked at next
            return
        self._waking = True
        try:
            while ready := {kind for kind, it in self._kinds.items() if it.ready()}:
                waiter = self._turns.next(lambda it, ready=ready: it.kind in ready)  # type: ignore[misc]
                if waiter is None:
                    return
                self._left(waiter)
                waiter.go(self._waited(waiter))
        finally:
            self._waking = False

    def expire(self) -> None:
        """End the waits whose deadline has passed."""
        now = self._clock()
        for waiter in [it for it in self._turns if it.until <= now]:
            waited = self._waited(waiter)
            error = Overloaded(
                f"no server could take the request within {waited:.0f} s", self.retry_after
            )
            self._fail(waiter, "expired", error)

    def _waited(self, waiter: Waiter) -> float:
        """Return the seconds that a request has waited, and count them in the mean."""
        waited = self._clock() - waiter.since
        self._waited_s += (waited - self._waited_s) * _SMOOTHING
        return waited

    def give_up(self, concerns: Callable[[Hashable], bool], error: ServingError) -> None:
        """Fail the requests of these kinds, because they would wait without result."""
        for waiter in [it for it in self._turns if concerns(it.kind)]:
            self._fail(waiter, "in_vain", error)

    def close(self, error: ServingError) -> None:
        """Fail all that wait, and all that come."""
        self._closed = error
        for waiter in [*self._turns]:
            self._fail(waiter, "stopping", error)

    def _fail(self, waiter: Waiter, reason: str, error: ServingError) -> None:
        self.leave(waiter)
        waiter.fail(reason, error)
