# SPDX-License-Identifier: Apache-2.0
"""Which replica gets a request: the four strategies, by HyperPod's names for them.

Nothing here does I/O or looks at a clock, so that scripts/dev simulate runs these very classes.
"""

import dataclasses
import hashlib
import math
import random
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from serving.router.policy.prefix_index import PrefixIndex
from serving.router.policy.routing_request import RoutingRequest
from serving.router.policy.tiers import DEFAULT_PRICES, NOTHING, NOWHERE, Held, Prices, Reach

# What waiting costs, in prompt tokens that could be computed in the time. The figures are those
# that did best in scripts/dev simulate; where others do as well, it says so.
UNCACHED = 2
"""For each prompt token to compute, and its price for each token to load: once for the waiting
time, and once for the evicted tokens. With 1, documents are computed on every replica in turn (2 to
8: alike).
"""
PER_REQUEST = 30
"""For each request in flight (10 to 300 give the same)."""
CONTEXT = 32
"""For this many prompt tokens of requests in flight, whose attention slows every step down."""
NEAR = 300
"""Costs that differ by less are taken for equal: the replica that was chosen longest ago gets the
request, which spaces arrivals as round-robin does.
"""
ADAPTER_LOAD = 2_000
"""For an adapter that must be loaded: some 0.1 s ..."""
AWAY = 500
"""... and more on another replica than rendezvous hashing assigns. So routers that do not know of
each other load an adapter on the same one. With 0, two of them load a tenth more, and with 1,000
adapters wait for their replica while others have nothing to do.
"""
PREFILL_RATE = 20_000.0
"""Prompt tokens that a replica is taken to compute in a second, until it was measured (10,000 to
40,000: a little worse). It matters where no stream shows when it has computed them.
"""
ADAPTERS = 64
"""Assumed adapter slots of a replica that does not report them."""
BOUND = 1.25
"""A session stays where it belongs while that replica has at most this many times the mean of
requests under way ("Consistent Hashing with Bounded Loads", Mirrokni, Thorup, Zadimoghaddam) ...
"""
BATCH = 8
"""... or fewer than these, which an engine serves together about as fast as one."""


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
    """Requests under way."""
    queued: int = 0
    """Their remaining work, in prompt tokens to compute."""
    context: int = 0
    """Prompt tokens of all requests under way."""
    prices: Prices = DEFAULT_PRICES
    """Of what it loads."""
    adapter_slots: int = ADAPTERS
    """Adapters that its engine keeps."""
    prefill_rate: float = PREFILL_RATE
    """Prompt tokens that its engine computes in a second."""
    # When what is queued will be computed, where that can only be guessed.
    _computed_at: float = dataclasses.field(default=0.0, init=False)
    _guessed: deque[tuple[float, Work]] = dataclasses.field(default_factory=deque, init=False)

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
        return work

    def computed(self, work: Work) -> None:
        """The request's prompt is computed; it may be said more than once."""
        self.queued -= work.left
        work.left = 0

    def end(self, work: Work) -> None:
        """The request is over."""
        self.computed(work)
        self.in_flight -= 1
        self.context -= work.tokens

    def settle(self, now: float) -> None:
        """Take for computed what should be by now."""
        while self._guessed and self._guessed[0][0] <= now:
            self.computed(self._guessed.popleft()[1])


class Choice(NamedTuple):
    """The replica that a strategy chose."""

    replica: Load
    held: Held = NOTHING
    """Prompt tokens that it is expected to have in its caches."""


class Policy(Protocol):
    """A strategy. The replicas it chooses among are those that can serve, at least one."""

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        """The replica for a request. now: seconds, of a clock that never goes back."""

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        """The request goes to the replica, whoever has chosen it."""

    def forget(self, replica: str) -> None:
        """The replica has started anew, or is gone."""


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._turn = random.randrange(1 << 16)  # several routers are not to march in step

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        self._turn += 1
        return Choice(replicas[self._turn % len(replicas)])

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        pass

    def forget(self, replica: str) -> None:
        pass


class _Cheapest:
    """The replica that can begin the answer first, by one measure for all: prompt tokens that have
    to be computed before, the request's own and those queued, and what is under way.
    """

    def __init__(self) -> None:
        self._chosen: dict[str, float] = {}
        self._adapters: dict[str, OrderedDict[str, None]] = {}

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        costs: list[tuple[float, Load, Held]] = []
        adapter = request.adapter
        home = _highest(adapter, replicas) if adapter else None
        for replica in replicas:
            replica.settle(now)
            held = Held.of(self.reach(request, replica.name, now), request.tokens)
            cost = (
                UNCACHED * replica.prices.work(request.tokens, held)
                + replica.queued
                + PER_REQUEST * replica.in_flight
                + replica.context / CONTEXT
            )
            if adapter and not self._has(replica, adapter):
                cost += ADAPTER_LOAD + (replica is not home) * AWAY
            costs.append((cost, replica, held))
        most = min([cost for cost, _, _ in costs]) + NEAR
        near = [entry for entry in costs if entry[0] <= most]
        _, replica, held = min(near, key=lambda entry: self._chosen.get(entry[1].name, 0.0))
        return Choice(replica, held)

    def reach(self, request: RoutingRequest, replica: str, now: float) -> Reach:
        """How far the replica's caches reach into the prompt, most likely."""
        return NOWHERE

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        self._chosen[replica] = now
        if request.adapter:
            used = self._adapters.setdefault(replica, OrderedDict())
            used[request.adapter] = None
            used.move_to_end(request.adapter)

    def forget(self, replica: str) -> None:
        self._chosen.pop(replica, None)
        self._adapters.pop(replica, None)

    def _has(self, replica: Load, adapter: str) -> bool:
        """Whether the replica has the adapter, most likely: it is of those that were used last."""
        used = self._adapters.get(replica.name, OrderedDict())
        while len(used) > replica.adapter_slots:
            used.popitem(last=False)
        return adapter in used


class PrefixAware(_Cheapest):
    """The cheapest, where what a replica was sent before counts as cached."""

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__()
        self.index = index

    def reach(self, request: RoutingRequest, replica: str, now: float) -> Reach:
        return self.index.reach(replica, request.chain, now)

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        super().learn(request, replica, now)
        self.index.insert(replica, request.chain, now)

    def forget(self, replica: str) -> None:
        super().forget(replica)
        self.index.forget(replica)


class Blocks(Protocol):
    """The reported contents of the replicas' KV caches: kv_index.KvIndex."""

    def follows(self, replica: str) -> bool:
        """Whether the replica's cache is known now."""

    def in_engine(self, replica: str, blocks: Mapping[int, Sequence[int]], now: float) -> int:
        """How many of the prompt's first tokens its engine has, or will have in a moment."""

    def in_memory(self, replica: str, blocks: Mapping[int, Sequence[int]]) -> int | None:
        """How many of them its memory tier has. None where it does not say."""

    def expect(self, replica: str, blocks: Mapping[int, Sequence[int]], now: float) -> None:
        """The replica is about to compute these blocks."""

    def forget(self, replica: str) -> None:
        """The replica has started anew, or is gone."""


class KvAware(PrefixAware):
    """The cheapest, where what a replica has in its caches by its own account counts as cached.

    If a request has no tokens, or a replica's cache is unknown, it falls back to PrefixAware, which
    therefore always learns. The same holds for unreported caches: disks and shared stores, and
    memory for requests with a tenant, salt or adapter.
    """

    def __init__(self, index: PrefixIndex, blocks: Blocks) -> None:
        super().__init__(index)
        self.blocks = blocks

    def reach(self, request: RoutingRequest, replica: str, now: float) -> Reach:
        sent = super().reach(request, replica, now)
        if request.blocks is None or not self.blocks.follows(replica):
            return sent
        memory = self.blocks.in_memory(replica, request.blocks) if request.plain else None
        return sent._replace(
            engine=self.blocks.in_engine(replica, request.blocks, now),
            memory=sent.memory if memory is None else memory,
        )

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        super().learn(request, replica, now)
        if request.blocks is not None:
            self.blocks.expect(replica, request.blocks, now)

    def forget(self, replica: str) -> None:
        super().forget(replica)
        self.blocks.forget(replica)


class Session(_Cheapest):
    """All requests of a session to one replica, unless that has much more to do than the others.

    By rendezvous hashing, so that routers agree without talking and a replica that comes or goes
    moves only its share. Requests without a session go to the cheapest.
    """

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        if not request.session:
            return super().choose(request, replicas, now)
        under_way = sum(replica.in_flight for replica in replicas)
        bound = max(BATCH, math.ceil(BOUND * (under_way + 1) / len(replicas)))
        free = [replica for replica in replicas if replica.in_flight < bound]
        return Choice(_highest(request.session, free))


def _highest(key: str, replicas: Sequence[Load]) -> Load:
    """The replica that something belongs to, by rendezvous hashing."""
    return max(replicas, key=lambda replica: _weight(key, replica.name))


def _weight(key: str, replica: str) -> bytes:
    # Not Python's hash: routers on other machines, and the next one here, are to agree.
    return hashlib.blake2b(f"{replica}\0{key}".encode(), digest_size=8).digest()
