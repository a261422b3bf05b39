# SPDX-License-Identifier: Apache-2.0
"""The routing strategies that are compared: ours, simple ones, and other routers' published rules.

tools/routing_sim/README.md says whose they are.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

from serving.router.policy import policies
from serving.router.policy.kv_index import KvIndex
from serving.router.policy.policies import Choice, Policy, Session
from serving.router.policy.prefix_index import PrefixIndex, covered
from serving.router.policy.replica_load import Load
from serving.router.policy.routing_request import RoutingRequest
from serving.router.policy.tiers import Held
from tools.routing_sim.model import Prompt


class Plain:
    """A strategy that remembers nothing: the one measure of a replica, random among equals."""

    def measure(self, request: Prompt, replica: Load, now: float) -> float:
        return 0.0

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        assert isinstance(request, Prompt)
        measures = [self.measure(request, replica, now) for replica in replicas]
        least = min(measures)
        equals = [it for it, measure in zip(replicas, measures, strict=True) if measure == least]
        return Choice(random.choice(equals))

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        pass

    def forget(self, replica: str) -> None:
        pass


class LeastRequests(Plain):
    def measure(self, request: Prompt, replica: Load, now: float) -> float:
        return replica.in_flight


class Indexed(Plain):
    """Their strategy with our index: their trees find nearly the same prefixes."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index

    def cached(self, request: RoutingRequest, replica: Load, now: float) -> int:
        return self.index.reach(replica.name, request.chain, now).engine

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        self.index.insert(replica, request.chain, now)

    def forget(self, replica: str) -> None:
        self.index.forget(replica)


class LoadAware(Indexed):
    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        self._mean = sum(replica.in_flight for replica in replicas) / len(replicas)
        return super().choose(request, replicas, now)

    def measure(self, request: Prompt, replica: Load, now: float) -> float:
        load = (replica.in_flight - self._mean) / max(1.0, self._mean)
        return load - self.cached(request, replica, now) / request.tokens


class Product(Indexed):
    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        def measure(replica: Load) -> int:
            uncached = request.tokens - self.cached(request, replica, now)
            return (uncached + replica.queued) * (replica.in_flight + 1)

        best = min(replicas, key=measure)
        return Choice(best, Held(self.cached(request, best, now)))


class CacheAware(Indexed):
    def __init__(self, index: PrefixIndex) -> None:
        super().__init__(index)
        self._inserted: Counter[str] = Counter()

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        least = min(replicas, key=lambda replica: replica.in_flight)
        most = max(replica.in_flight for replica in replicas)
        if most - least.in_flight > 64 and most > 1.5 * least.in_flight:
            return Choice(least)
        best = max(replicas, key=lambda replica: self.cached(request, replica, now))
        if self.cached(request, best, now) > 0.3 * request.tokens:
            return Choice(best)
        return Choice(min(replicas, key=lambda replica: self._inserted[replica.name]))

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        known = self.index.reach(replica, request.chain, now).engine
        self._inserted[replica] += covered(len(request.chain)) - known
        super().learn(request, replica, now)


class TheirPrefixAware(Plain):
    """A trie of text, as a set of replicas for each hash of all up to there."""

    def __init__(self) -> None:
        self._sent: dict[int, set[str]] = defaultdict(set)

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        assert isinstance(request, Prompt)
        last = list(replicas)
        for link in request.fine:
            sent = self._sent.get(link, ())
            found = [replica for replica in last if replica.name in sent]
            if not found:
                break
            last = found
        return Choice(random.choice(last))

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        assert isinstance(request, Prompt)
        for link in request.fine:
            self._sent[link].add(replica)


class TheirKvAware(Plain):
    """Falls back to their session ring, or to the fewest requests of the last 60 s. The engines'
    contents represent LMCache's.
    """

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        self._sent: dict[str, deque[float]] = defaultdict(deque)
        self._ring = Session()

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        owner, matched = None, 0
        for replica in replicas:
            tokens = self._index.in_engine(replica.name, request.blocks or {}, now)
            if tokens >= 256:  # their chunk; the first who has one is all they look at
                owner, matched = replica, tokens // 256 * 256
                break
        if owner and matched >= request.tokens - 2000:
            return Choice(owner)
        if request.session:
            still = [Load(replica.name) for replica in replicas]  # a ring does not look at load
            name = self._ring.choose(request, still, now).replica.name
            return Choice(next(replica for replica in replicas if replica.name == name))
        return Choice(min(replicas, key=lambda replica: self._recent(replica.name, now)))

    def _recent(self, replica: str, now: float) -> int:
        sent = self._sent[replica]
        while sent and sent[0] < now - 60:
            sent.popleft()
        return len(sent)

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        self._sent[replica].append(now)


ARMS: dict[str, Callable[[PrefixIndex, KvIndex], Policy]] = {
    "roundrobin": lambda index, blocks: policies.RoundRobin(),
    "session": lambda index, blocks: policies.Session(),
    "prefixaware": lambda index, blocks: policies.PrefixAware(index),
    "kvaware": policies.KvAware,
    "random": lambda index, blocks: Plain(),
    "least requests": lambda index, blocks: LeastRequests(),
    "their prefixaware": lambda index, blocks: TheirPrefixAware(),
    "their kvaware": lambda index, blocks: TheirKvAware(blocks),
    "cache_aware": lambda index, blocks: CacheAware(index),
    "product": lambda index, blocks: Product(index),
    "loadaware": lambda index, blocks: LoadAware(index),
}
BASE, OURS = "roundrobin", ("prefixaware", "kvaware")
WITH_EVENTS = ("kvaware", "their kvaware")
