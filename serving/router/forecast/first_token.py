# SPDX-License-Identifier: Apache-2.0
"""Forecasts of the time to the first token of a request's answer, and how good they are.

A replica takes a base time, and then a time for each prompt token that it must compute before the
answer: those that are queued, and the request's own that no cache has. Both times are learnt from
the streams that pass the router.
"""

import math
from collections import deque
from typing import NamedTuple

FADES = 0.95
"""Each answer multiplies the weight of the earlier ones by this factor, so about 20 count."""
LEAST = 10
"""A replica's answers that a forecast needs."""
MEMORY_S = 60.0
"""The learner forgets a replica after this many seconds without an answer. So a replica that was
avoided because it was slow is tried again.
"""
SHORTEST_S = 0.001
"""Shorter times count as this one, in weights and ratios."""
RATIOS = 200
"""The latest forecasts decide whether forecasts are trusted: this number at most, half of it at
least.
"""
LOOKED_AT = 20
"""After this many further forecasts, the decision is made again."""
TRUSTED = 0.7, 1.4
"""Forecasts are trusted while the quartiles of forecast ÷ measured are within these."""


class Awaited(NamedTuple):
    """The first token of a request's answer. since: when the request was sent, in seconds. tokens:
    to compute before. forecast: seconds, None if unknown.
    """

    since: float
    tokens: float
    forecast: float | None


class FirstToken:
    """Learns the time to the first token at one replica, as base + rate * tokens.

    Weighted least squares with exponential forgetting: five sums. A weight is 1 / forecast², so
    relative errors count, and a few long times do not hide many short ones.
    """

    __slots__ = ("_answers", "_at", "_n", "_x", "_xx", "_xy", "_y", "base", "rate")

    def __init__(self) -> None:
        self.base = 0.0
        """Seconds."""
        self.rate = 0.0
        """Seconds for each token."""
        self._forget()
        self._at = -math.inf

    def _forget(self) -> None:
        self._answers = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def forecast(self, tokens: float, now: float) -> float | None:
        """Seconds to the first token. None while too little is known. tokens: to compute before
        it.
        """
        if self._answers < LEAST or now - self._at > MEMORY_S:
            return None
        return self.base + self.rate * tokens

    def awaited(self, tokens: float, now: float) -> Awaited:
        """A request is sent. tokens: to compute before its first token, its own included."""
        return Awaited(now, tokens, self.forecast(tokens, now))

    def learn(self, awaited: Awaited, now: float) -> float | None:
        """A first token has come. Returns forecast ÷ measured, None without a forecast."""
        tokens, seconds = awaited.tokens, now - awaited.since
        if now - self._at > MEMORY_S:
            self._forget()
        expected = self.forecast(tokens, now) or seconds
        weight = max(expected, SHORTEST_S) ** -2
        self._at = now
        self._answers += 1
        self._n = FADES * self._n + weight
        self._x = FADES * self._x + weight * tokens
        self._y = FADES * self._y + weight * seconds
        self._xx = FADES * self._xx + weight * tokens * tokens
        self._xy = FADES * self._xy + weight * tokens * seconds
        spread = self._n * self._xx - self._x * self._x
        self.rate = 0.0
        if spread > 1e-6 * self._n * self._xx:  # else all had as many tokens
            self.rate = max((self._n * self._xy - self._x * self._y) / spread, 0.0)
        self.base = (self._y - self.rate * self._x) / self._n
        if self.base < 0:
            self.base, self.rate = 0.0, self._xy / self._xx
        if awaited.forecast is None:
            return None
        return awaited.forecast / max(seconds, SHORTEST_S)


class Quartiles(NamedTuple):
    """The quartiles of forecast ÷ measured."""

    first: float
    median: float
    third: float


class Accuracy:
    """How good the latest forecasts of a router's process were."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=RATIOS)
        self._new = 0
        self.trusted = False
        """Whether they are good enough to choose replicas by them."""

    def add(self, ratio: float) -> None:
        """Note a forecast ÷ measured."""
        self._ratios.append(ratio)
        self._new += 1
        if self._new >= LOOKED_AT and 2 * len(self._ratios) >= RATIOS:
            self._new = 0
            low, high = TRUSTED
            found = self.quartiles
            self.trusted = low <= found.first and found.third <= high

    @property
    def quartiles(self) -> Quartiles:
        """The quartiles of the latest forecasts. There must be one."""
        ratios = sorted(self._ratios)
        return Quartiles(*(ratios[len(ratios) * n // 4] for n in (1, 2, 3)))
