# SPDX-License-Identifier: Apache-2.0
"""Which replica gets a request: the four strategies, by HyperPod's names for them.

Nothing here does I/O or looks at a clock, so that scripts/dev simulate runs these very classes.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple, Protocol

from serving.router.policy.candidates import EXACT, Candidates
from serving.router.policy.prefix_index import PrefixIndex
from serving.router.policy.replica_load import Load
from serving.router.policy.routing_request import RoutingRequest
from serving.router.policy.tiers import NOTHING, NOWHERE, Held, Reach

# Costs of waiting, in prompt tokens that could be computed in the time. The figures are those
# that did best in scripts/dev simulate; equally good ones are named.
UNCACHED = 2
"""Cost of each prompt token to compute, relative to a token to load. A computed token counts once
for the waiting time and once for the tokens that it evicts. With 1, documents are computed on every
replica in turn; 2 to 8 give equal results.
"""
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
MOST_ADAPTERS = 1_000
"""Adapters that one replica is taken to have, at most: clients can make names up."""
LEAST, HOLDERS, REACHES, SOME = 4, 4, 8, 8
"""A fleet of more than candidates.EXACT replicas is measured at LEAST replicas with the least load
and at HOLDERS replicas with the adapter. It is also measured at HOLDERS replicas for each of up to
REACHES lengths of the prompt's known part, each about half of the one before. Holders are the least
loaded of SOME.
"""
BOUND = 1.25
"""A session stays where it belongs while that replica has at most this many times the mean of
requests under way ("Consistent Hashing with Bounded Loads", Mirrokni, Thorup, Zadimoghaddam) ...
"""
BATCH = 8
"""... or fewer than these, which an engine serves together about as fast as one."""


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
        """Forget a replica that has restarted or left."""


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


def cost_of(request: RoutingRequest, replica: Load, held: Held) -> float:
    """The cost of a request at a replica that holds these of its tokens, without adapters."""
    return UNCACHED * replica.prices.work(request.tokens, held) + replica.waiting


def in_time(request: RoutingRequest, replica: Load, held: Held, now: float) -> bool:
    """Whether a replica that holds these of a request's tokens is expected to meet the request's
    objective for the first token. True without an objective, or without a forecast.
    """
    if request.within is None:
        return True
    forecast = replica.forecast(request.tokens, held, now)
    return forecast is None or forecast <= request.within


class _Cheapest:
    """The replica that can begin the answer first, by one measure for all: prompt tokens that must
    be computed before, the request's own and those queued, and the requests under way.

    Among many replicas only those are measured that can be the cheapest: some that have most of the
    prompt, or the adapter, and those with the least load. For a request with an objective for the
    first token, only those count that are expected to meet it, if there are any.
    """

    exact = EXACT
    """In a fleet of at most this number of replicas, all are measured."""

    def __init__(self) -> None:
        self._chosen: dict[str, float] = {}
        self._adapters: dict[str, OrderedDict[str, None]] = {}
        self._having: dict[str, dict[str, None]] = {}  # the same by adapter

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        all_of_them = Candidates.of(replicas)
        adapter = request.adapter
        home = next(all_of_them.order(adapter)) if adapter else None
        measured: Iterable[Load] = all_of_them
        if len(all_of_them) > self.exact:
            measured = self._likely(request, all_of_them, home, now)
        costs = self.costs(request, measured, home, now)
        if request.within is not None:
            costs = [it for it in costs if in_time(request, *it[1:], now)] or costs
        most = min([cost for cost, _, _ in costs]) + NEAR
        near = [entry for entry in costs if entry[0] <= most]
        _, replica, held = min(near, key=lambda entry: self._chosen.get(entry[1].name, 0.0))
        return Choice(replica, held)

    def at(self, request: RoutingRequest, replica: Load, now: float) -> Choice:
        """The replica as a choice, with the tokens that it holds."""
        replica.settle(now)
        return Choice(replica, Held.of(self.reach(request, replica.name, now), request.tokens))

    def costs(
        self, request: RoutingRequest, replicas: Iterable[Load], home: Load | None, now: float
    ) -> list[tuple[float, Load, Held]]:
        """The cost of the request at each, and its tokens that each has. home: the replica that its
        adapter belongs to.
        """
        adapter = request.adapter
        found = []
        for replica in replicas:
            replica.settle(now)
            held = Held.of(self.reach(request, replica.name, now), request.tokens)
            cost = cost_of(request, replica, held)
            if adapter and not self._has(replica, adapter):
                cost += ADAPTER_LOAD + (replica is not home) * AWAY
            found.append((cost, replica, held))
        return found

    def _likely(
        self, request: RoutingRequest, replicas: Candidates[Load], home: Load | None, now: float
    ) -> Iterable[Load]:
        """A few replicas, most likely with the cheapest."""
        found = {it.name: it for it in replicas.least(LEAST, now)}
        having = [self._having.get(request.adapter, ())] if home else []
        for names in chain(islice(self.holders(request), REACHES), having):
            held = [it for name in _some(names) if (it := replicas.named(name))]
            if len(held) > HOLDERS:
                held = sorted(held, key=attrgetter("waiting"))[:HOLDERS]
            found |= {it.name: it for it in held}
        if home:
            found[home.name] = home
        return found.values()

    def holders(self, request: RoutingRequest) -> Iterator[Collection[str]]:
        """The names of replicas that have a part of the prompt, those with the largest part
        first.
        """
        return iter(())

    def reach(self, request: RoutingRequest, replica: str, now: float) -> Reach:
        """How far the replica's caches reach into the prompt, most likely."""
        return NOWHERE

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        self._chosen[replica] = now
        if request.adapter:
            used = self._adapters.setdefault(replica, OrderedDict())
            used[request.adapter] = None
            used.move_to_end(request.adapter)
            self._having.setdefault(request.adapter, {})[replica] = None
            if len(used) > MOST_ADAPTERS:
                self._unload(used.popitem(last=False)[0], replica)

    def forget(self, replica: str) -> None:
        self._chosen.pop(replica, None)
        for adapter in self._adapters.pop(replica, ()):
            self._unload(adapter, replica)

    def _unload(self, adapter: str, replica: str) -> None:
        having = self._having[adapter]
        del having[replica]
        if not having:
            del self._having[adapter]

    def _has(self, replica: Load, adapter: str) -> bool:
        """Whether the replica most likely has the adapter: it is one of those used last."""
        used = self._adapters.get(replica.name, OrderedDict())
        while len(used) > replica.adapter_slots:
            self._unload(used.popitem(last=False)[0], replica.name)
        return adapter in used


def _some(names: Collection[str]) -> Sequence[str]:
    """A few of the names, not always the same."""
    every = [*names]
    if len(every) <= SOME:
        return every
    start = random.randrange(len(every))
    return [*every[start : start + SOME], *every[: max(start + SOME - len(every), 0)]]


class PrefixAware(_Cheapest):
    """The cheapest replica, if the prompts that a replica was sent before count as cached."""

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__()
        self.index = index

    def holders(self, request: RoutingRequest) -> Iterator[Collection[str]]:
        return self.index.holders(request.chain)

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
        """Number of these tokens in the replica's memory tier, or None if it does not report
        them.
        """

    def holders(self, blocks: Mapping[int, Sequence[int]]) -> Iterator[Collection[str]]:
        """The replicas whose engines have a part of the prompt, those with the largest part
        first.
        """

    def expect(self, replica: str, blocks: Mapping[int, Sequence[int]], now: float) -> None:
        """The replica is about to compute these blocks."""

    def forget(self, replica: str) -> None:
        """Forget a replica that has restarted or left."""


class KvAware(PrefixAware):
    """The cheapest replica, by the replicas' own reports of their caches.

    If a request has no tokens, or a replica's cache is unknown, it falls back to PrefixAware, which
    therefore always learns. The same holds for unreported caches: disks and shared stores, and
    memory for requests with a tenant, salt or adapter.
    """

    def __init__(self, index: PrefixIndex, blocks: Blocks) -> None:
        super().__init__(index)
        self.blocks = blocks

    def holders(self, request: RoutingRequest) -> Iterator[Collection[str]]:
        sent = super().holders(request)
        if request.blocks is None:
            return sent
        reported = self.blocks.holders(request.blocks)
        return chain(islice(reported, 1), islice(sent, 1), reported, sent)

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
        all_of_them = Candidates.of(replicas)
        mean = all_of_them.in_flight + 1 / len(all_of_them)
        bound = max(BATCH, math.ceil(BOUND * mean))
        free = (it for it in all_of_them.order(request.session) if it.in_flight < bound)
        # In a large fleet the mean is of a moment ago, so that all can have more by now.
        return Choice(next(free, None) or next(all_of_them.order(request.session)))
