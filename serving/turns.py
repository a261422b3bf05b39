"""Whose turn it is at the engine: what is more than it works on at once waits here.

The engine has a queue of its own, first come, first served, in which a flood of requests for one
adapter would stand before everybody else's. So it is asked for little more than it works on, and
adapters take turns at what becomes free. What a request costs is not known before it has ended
(tokens to generate weigh more than those of the prompt), so each turn counts the same.
"""

import asyncio
import math
import time
from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from serving.errors import Overloaded

QUEUED = Gauge(
    "slipway_requests_queued", "Requests that wait for the engine, or for room for their adapter."
)
_IN_FLIGHT = Gauge("slipway_requests_in_flight", "Requests that the engine has been given.")
_REFUSED = Counter(
    "slipway_requests_refused",
    "Requests told at once to come again: the queue is full, or they would wait for too long.",
    ["reason"],
)
_WAITED = Histogram(
    "slipway_request_wait_seconds",
    "How long those requests waited for the engine that had to.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
_FULL, _LATE = _REFUSED.labels("queue_full"), _REFUSED.labels("too_late")

_SMOOTHING = 0.1  # the weight of the last request in what requests take
_LONGEST_RETRY_S = 30


class Turn:
    """A request's turn at the engine. `came` is done when it has come, or None where it came at
    once; whoever gives up waiting may set it.
    """

    __slots__ = ("began", "came", "going", "lane", "sequences")

    def __init__(self, lane: str, sequences: int, began: float) -> None:
        self.lane = lane
        self.sequences = sequences
        self.began = began  # to wait, and then to go; by the clock
        self.going = False
        self.came: asyncio.Future[None] | None = None


class Turns:
    """Turns at the engine, taken by lanes in rotation and in each lane in order of arrival.

    share: sequences that the engine may be asked for at once; a request with more of them goes
    alone. limit: requests that may wait.
    """

    def __init__(
        self, share: Callable[[], int], limit: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self._limit = limit
        self._clock = clock
        self._lanes: dict[str, dict[Turn, None]] = {}  # the next one's first; none is empty
        self._sequences = 0  # in the engine
        self._taken_s: float | None = None  # what a request takes, times its sequences
        self.waiting = 0
        self.going = 0
        _IN_FLIGHT.set_function(lambda: self.going)

    def ask(
        self, lane: str, sequences: int = 1, within: float | None = None, refusable: bool = True
    ) -> Turn:
        """Take a turn, now or when it comes; end() has to be called in any case.

        within: seconds that the request can wait. Raises Overloaded where it would wait for longer,
        by what requests took so far, or where the queue is full; not where it is not refusable.
        """
        turn = Turn(lane, sequences, self._clock())
        if not self._lanes and self._fits(turn):
            self._go(turn)
            return turn
        if refusable:
            self.require_place(self.waiting)
            if within is not None and (wait := self._expected_s(lane)) > within:
                _LATE.inc()
                raise Overloaded(
                    f"the request would wait for about {wait:.0f} s, and "
                    f"OPTION_PREDICT_TIMEOUT leaves it {within:g} s",
                    retry_after=min(math.ceil(wait - within), _LONGEST_RETRY_S),
                )
        turn.came = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(lane, {})[turn] = None
        self.waiting += 1
        return turn

    def require_place(self, waiting: int) -> None:
        """Raise Overloaded where no more than these requests may wait."""
        if waiting >= self._limit:
            _FULL.inc()
            raise Overloaded(
                f"{self._limit} requests are waiting; SERVING_JOB_QUEUE_SIZE sets the limit"
            )

    def end(self, turn: Turn) -> None:
        """End a turn that has come, or the wait for it."""
        if turn.going:
            self.going -= 1
            self._sequences -= turn.sequences
            taken = (self._clock() - turn.began) * turn.sequences
            if self._taken_s is None:
                self._taken_s = taken
            self._taken_s += (taken - self._taken_s) * _SMOOTHING
        else:
            self._leave(turn)
        while self._lanes:
            lane = next(iter(self._lanes))
            turn = next(iter(self._lanes[lane]))
            if not self._fits(turn):
                break
            self._leave(turn)
            assert turn.came
            if turn.came.done():  # it has given up, and is about to be ended
                continue
            if lane in self._lanes:
                self._lanes[lane] = self._lanes.pop(lane)  # to the end of the rotation
            now = self._clock()
            _WAITED.observe(now - turn.began)
            turn.began = now
            self._go(turn)
            turn.came.set_result(None)

    def _fits(self, turn: Turn) -> bool:
        return not self.going or self._sequences + turn.sequences <= self._share()

    def _go(self, turn: Turn) -> None:
        turn.going = True
        self.going += 1
        self._sequences += turn.sequences

    def _leave(self, turn: Turn) -> None:
        lane = self._lanes.get(turn.lane, {})
        if turn in lane:
            del lane[turn]
            self.waiting -= 1
            if not lane:
                del self._lanes[turn.lane]

    def _expected_s(self, lane: str) -> float:
        """Seconds that one more request of this lane would wait."""
        own = len(self._lanes.get(lane, ()))
        before = sum(min(len(waiting), own + 1) for waiting in self._lanes.values())
        return (before + 1) * (self._taken_s or 0) / self._share()
