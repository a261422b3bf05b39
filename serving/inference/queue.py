# SPDX-License-Identifier: Apache-2.0
"""The fair queue before the engine: requests beyond the engine's concurrency wait here.

The engine's own queue is first come, first served: a flood of requests for one adapter would delay
all others. So the engine gets only a few requests more than it runs at once, and adapters take
turns at the free capacity. Background requests run while no other request waits. The cost of a
request is not known before it has ended, since generated tokens cost more than prompt tokens. So
each turn counts the same.
"""

import asyncio
import math
import time
from collections import Counter as Counts
from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from serving.errors import Overloaded
from serving.waiting.held import LONGEST_RETRY_S
from serving.waiting.turns import Turns

QUEUED = Gauge(
    "slipway_requests_queued", "Requests that wait for the engine, or for room for their adapter."
)
_IN_FLIGHT = Gauge("slipway_requests_in_flight", "Requests that the engine has been given.")
_SLOTS = Gauge(
    "slipway_request_slots",
    "Requests that the engine is given at once: a router takes a server with as many for full.",
)
_REFUSED = Counter(
    "slipway_requests_refused",
    "Requests told at once to come again: the queue is full, or they would wait for too long, or "
    "at all.",
    ["reason"],
)
_WAITED = Histogram(
    "slipway_request_wait_seconds",
    "How long those requests waited for the engine that had to.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
FULL, _LATE = _REFUSED.labels("queue_full"), _REFUSED.labels("too_late")
SHED = _REFUSED.labels("shed")

_SMOOTHING = 0.1  # the weight of the last request in the moving average of durations
_FIRST, _BACKGROUND = 0, 1  # bands of the queue


class Ticket:
    """A request's place in the queue, and then in the engine.

    sequences: the number of sequences that it counts as. background: whether all others go first.
    called: done when its turn has come, or None if it came at once; a caller that stops waiting may
    also set it. in_flight: whether the engine has the request.
    """

    __slots__ = ("background", "began", "called", "in_flight", "lane", "sequences")

    def __init__(self, lane: str, sequences: int, began: float, background: bool) -> None:
        self.lane = lane
        self.background = background
        self.sequences = sequences
        self.began = began  # when its wait began, and later its turn; by the clock
        self.in_flight = False
        self.called: asyncio.Future[None] | None = None


class FairQueue:
    """The fair queue before the engine: lanes take turns, and each lane is first in, first out.

    capacity: the most sequences that the engine may have at once; while it has fewer, the next
    request goes.
    """

    def __init__(
        self, capacity: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity = capacity
        self._clock = clock
        self._turns: Turns[Ticket] = Turns()
        self._sequences = 0  # in the engine
        self._taken_s: float | None = None  # that a request takes, times its sequences
        self._in_flight = Counts[str]()  # by lane; none is 0
        self.in_flight = 0
        _IN_FLIGHT.set_function(lambda: self.in_flight)
        _SLOTS.set_function(capacity)

    @property
    def room(self) -> int:
        """The number of further sequences that the engine may get now."""
        return max(self._capacity() - self._sequences, 0)

    @property
    def sequences(self) -> int:
        """The number of sequences that the engine has."""
        return self._sequences

    @property
    def lanes(self) -> dict[str, tuple[int, int]]:
        """By lane: how many requests wait, and how many the engine has."""
        waiting = self._turns.lengths()
        return {
            lane: (waiting.get(lane, 0), self._in_flight[lane])
            for lane in {**waiting, **self._in_flight}
        }

    @property
    def waiting(self) -> int:
        """Waiting requests, without those in the background."""
        return self._turns.length()

    async def turn(
        self,
        lane: str,
        sequences: int,
        within: float | None,
        background: bool = False,
        waits: Callable[[], None] | None = None,
    ) -> Ticket:
        """Wait for a turn, as join() describes. The caller must call leave() when it is over.
        waits: called if the turn does not come at once.
        """
        ticket = self.join(lane, sequences, within, background)
        if ticket.called:
            try:
                if waits:
                    waits()
                await ticket.called
            except BaseException:
                self.leave(ticket)
                raise
        return ticket

    def join(
        self,
        lane: str,
        sequences: int = 1,
        within: float | None = None,
        background: bool = False,
    ) -> Ticket:
        """Join the queue; the turn may come at once. The caller must call leave() in any case.

        within: seconds that the request can wait. Raises Overloaded if it would probably wait for
        longer, by the durations of earlier requests. background: whether it waits until no other
        request waits; background requests are first in, first out.
        """
        # A request that took more than half of the capacity would keep all others out until its
        # last sequence ends, even with few of them left. Its further sequences wait in vLLM.
        sequences = min(sequences, max(self._capacity() // 2, 1))
        ticket = Ticket(lane, sequences, self._clock(), background)
        if self.room and not self.waiting:
            self._go(ticket)
            return ticket
        if within is not None and (wait := self._expected_s(lane)) > within:
            _LATE.inc()
            raise Overloaded(
                f"the request would wait for about {wait:.0f} s, and "
                f"OPTION_PREDICT_TIMEOUT leaves it {max(within, 0):.0f} s",
                retry_after=min(math.ceil(wait - within), LONGEST_RETRY_S),
            )
        ticket.called = asyncio.get_running_loop().create_future()
        if background:
            self._turns.add(ticket, "", band=_BACKGROUND)
        else:
            self._turns.add(ticket, lane, band=_FIRST)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """End the ticket's turn, or its wait for one, and start the next turns."""
        if ticket.in_flight:
            self.in_flight -= 1
            self._in_flight[ticket.lane] -= 1
            if not self._in_flight[ticket.lane]:
                del self._in_flight[ticket.lane]
            self._sequences -= ticket.sequences
            taken = (self._clock() - ticket.began) * ticket.sequences
            if self._taken_s is None:
                self._taken_s = taken
            self._taken_s += (taken - self._taken_s) * _SMOOTHING
        else:
            self._turns.remove(ticket)
        while self.room and (next_one := self._turns.next(_waits)):
            assert next_one.called
            now = self._clock()
            if not next_one.background:
                _WAITED.observe(now - next_one.began)
            next_one.began = now
            self._go(next_one)
            next_one.called.set_result(None)

    def _go(self, ticket: Ticket) -> None:
        ticket.in_flight = True
        self.in_flight += 1
        self._in_flight[ticket.lane] += 1
        self._sequences += ticket.sequences

    def _expected_s(self, lane: str) -> float:
        """Return the seconds that one more request of this lane would wait."""
        waiting = self._turns.lengths()
        own = waiting.get(lane, 0)
        before = sum(min(count, own + 1) for count in waiting.values())
        return (before + 1) * (self._taken_s or 0) / self._capacity()


def _waits(ticket: Ticket) -> bool:
    """Whether it has not given up; if it has, it is about to be ended."""
    return bool(ticket.called and not ticket.called.done())
