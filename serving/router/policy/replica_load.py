# SPDX-License-Identifier: Apache-2.0
"""The requests in flight at one replica, and their cost for the next request."""

import dataclasses
import math
from typing import Protocol

from serving.router.forecast.first_token import FirstToken
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
    slots: int = 0
    """Requests that it serves at once; 0 if it does not report them."""
    refuses: bool = False
    """Whether it took no connection, or answered 503, since it was last asked or answered."""
    first_token: FirstToken = dataclasses.field(default_factory=FirstToken, init=False)
    """The learnt times of its answers."""
    # Guessed times at which queued prompts will be computed.
    _guessed: dict[Work, float] = dataclasses.field(default_factory=dict, init=False)
    board: "Board | None" = dataclasses.field(default=None, init=False)
    """The board that lists it by its load."""

    @property
    def waiting(self) -> float:
        """The cost of a request here because of the requests before it."""
        return self.queued + PER_REQUEST * self.in_flight + self.context / CONTEXT

    @property
    def room(self) -> float:
        """The number of requests that it can take more at once; one that does not say is never
        full.
        """
        if self.refuses:
            return 0
        return max(self.slots - self.in_flight, 0) if self.slots else math.inf

    def refuse(self, refuses: bool) -> None:
        """Set whether it refuses requests."""
        before, self.refuses = self.refuses, refuses
        if before and not refuses and self.board:
            self.board.lighten(self)

    @property
    def settles_at(self) -> float | None:
        """When the first guess comes true; None without one."""
        return next(iter(self._guessed.values()), None)

    def begin(self, tokens: int, held: Held, streamed: bool, now: float) -> Work:
        """A request goes to the replica, which holds these of its prompt's tokens. streamed: its
        answer begins when its prompt is computed; for others this is a guess.
        """
        work = Work(tokens, self.prices.work(tokens, held))
        self.in_flight += 1
        self.queued += work.left
        self.context += tokens
        if not streamed:
            self._guessed[work] = now + self.queued / self.prefill_rate
            if self.board:
                self.board.guess(self, self._guessed[work])
        return work

    def forecast(self, tokens: int, held: Held, now: float) -> float | None:
        """Seconds to the first token of a request that would come here now, None if unknown. As
        begin().
        """
        return self.first_token.forecast(self.queued + self.prices.work(tokens, held), now)

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
        self._guessed.pop(work, None)
        self.computed(work)

    def settle(self, now: float) -> None:
        """Count prompts as computed that should be by now."""
        guessed = self._guessed
        while guessed and next(iter(guessed.values())) <= now:
            work = next(iter(guessed))
            del guessed[work]
            self.computed(work)
