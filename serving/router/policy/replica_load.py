# SPDX-License-Identifier: Apache-2.0
"""The requests in flight at one replica, and their cost for the next request."""

import dataclasses
from collections import deque
from typing import Protocol

from serving.router.policy.tiers import DEFAULT_PRICES, Held, Prices

PER_REQUEST = 30
"""For each request in flight (10 to 300 give the same)."""
CONTEXT = 32
"""For this many prompt tokens of requests in flight, whose attention slows every step down."""
PREFILL_RATE = 20_000.0
"""Prompt tokens that a replica is taken to compute in a second, until it was measured (10,000 to
40,000: a little worse). It matters where no stream shows when it has computed them.
"""
ADAPTERS = 64
"""Assumed adapter slots of a replica that does not report them."""


class Board(Protocol):
    """Lists replicas by their load: candidates.Board."""

    def lighten(self, load: "Load") -> None:
        """The replica has less to do than before."""

    def guess(self, load: "Load", at: float) -> None:
        """The replica will have less to do at this time."""


@dataclasses.dataclass(slots=True, eq=False)
class Work:
    """The cost of one request on its replica."""

    tokens: int
    """Its prompt's."""
    left: int
    """The remaining work until its answer begins, in prompt tokens to compute."""


Share = tuple[int, int, int]
"""One process's part in a replica's Load: in_flight, queued, context."""


@dataclasses.dataclass(slots=True, eq=False)
class Load:
    """The facts that strategies know of one replica."""

    name: str
    in_flight: int = 0
    """Requests in flight."""
    queued: int = 0
    """Their remaining work, in prompt tokens to compute."""
    context: int = 0
    """Prompt tokens of all requests in flight."""
    prices: Prices = DEFAULT_PRICES
    """The prices of loads from its tiers."""
    adapter_slots: int = ADAPTERS
    """Adapters that its engine keeps."""
    prefill_rate: float = PREFILL_RATE
    """Prompt tokens that its engine computes in a second."""
    # Guessed times at which queued prompts will be computed.
    _computed_at: float = dataclasses.field(default=0.0, init=False)
    _guessed: deque[tuple[float, Work]] = dataclasses.field(default_factory=deque, init=False)
    board: "Board | None" = dataclasses.field(default=None, init=False)
    """The board that lists it by its load."""

    @property
    def waiting(self) -> float:
        """The cost of a request here because of the requests before it."""
        return self.queued + PER_REQUEST * self.in_flight + self.context / CONTEXT

    @property
    def settles_at(self) -> float | None:
        """When the first guess comes true; None without one."""
        return self._guessed[0][0] if self._guessed else None

    def begin(self, tokens: int, held: Held, streamed: bool, now: float) -> Work:
        """A request goes to the replica, which holds these of its prompt's tokens. streamed: its
        answer begins when its prompt is computed; for others this is a guess.
        """
        work = Work(tokens, self.prices.work(tokens, held))
        self.in_flight += 1
        self.queued += work.left
        self.context += tokens
        if not streamed:
            self._computed_at = max(self._computed_at, now) + work.left / self.prefill_rate
            self._guessed.append((self._computed_at, work))
            if self.board:
                self.board.guess(self, self._computed_at)
        return work

    def computed(self, work: Work) -> None:
        """The request's prompt is computed; it may be said more than once."""
        self.queued -= work.left
        work.left = 0
        if self.board:
            self.board.lighten(self)

    def end(self, work: Work) -> None:
        """The request is over."""
        self.in_flight -= 1
        self.context -= work.tokens
        self.computed(work)

    def settle(self, now: float) -> None:
        """Count prompts as computed that should be by now."""
        while self._guessed and self._guessed[0][0] <= now:
            self.computed(self._guessed.popleft()[1])
