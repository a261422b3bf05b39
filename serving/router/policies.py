"""Which replica gets a request: the four strategies, by HyperPod's names for them.

Nothing here does I/O or looks at a clock, so that scripts/simulate_routing runs these very classes.
"""

import dataclasses
import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from serving.router.prefix_index import BYTES_PER_TOKEN, CHUNK, PrefixIndex

PER_REQUEST = 30
"""What a request under way costs those beside it, in prompt tokens that could be computed in the
time. scripts/simulate_routing shows little difference between 10 and 100.
"""
ADAPTER_LOAD = 2_000
"""What it costs to load a LoRA adapter, in the same unit: some 0.1 s."""
ADAPTERS = 64
"""Adapters that a replica is taken to have loaded: those it was asked for last."""
BOUND = 1.25
"""A session stays where it belongs while that replica has at most this many times the mean of
requests under way ("Consistent Hashing with Bounded Loads", Mirrokni, Thorup, Zadimoghaddam) ...
"""
BATCH = 8
"""... or fewer than these, which an engine serves together about as fast as one."""


@dataclasses.dataclass(slots=True, eq=False)
class Load:
    """What strategies know of one replica.

    in_flight: requests under way. queued: prompt tokens still to be computed, as far as they were
    expected to be: those of requests whose answer has not begun.
    """

    name: str
    in_flight: int = 0
    queued: int = 0


@dataclasses.dataclass(slots=True, kw_only=True)
class Asked:
    """What strategies know of one request.

    tokens: its prompt's, about. chain: its prompt's hashes, as prefix_index.chain() makes them.
    blocks: the hashes of its tokens, one for each `block_size` of them, where it was tokenised.
    adapter: the LoRA adapter, or "". salt: what keeps its KV cache apart from others', where it
    says so. session: what its session is called, or "".
    """

    tokens: int = 0
    chain: Sequence[int] = ()
    blocks: Sequence[int] | None = None
    block_size: int = 1
    adapter: str = ""
    salt: str | None = None
    session: str = ""


class Choice(NamedTuple):
    """cached: the prompt tokens that the replica is expected to have in its cache."""

    replica: Load
    cached: int


class Policy(Protocol):
    """A strategy. The replicas it chooses among are those that can serve, at least one."""

    def choose(self, asked: Asked, replicas: Sequence[Load], now: float) -> Choice:
        """The replica for a request. now: seconds, of a clock that never goes back."""

    def learn(self, asked: Asked, replica: str, now: float) -> None:
        """The request goes to the replica, whoever has chosen it."""

    def forget(self, replica: str) -> None:
        """The replica has started anew, or is gone."""


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._turn = random.randrange(1 << 16)  # several routers are not to march in step

    def choose(self, asked: Asked, replicas: Sequence[Load], now: float) -> Choice:
        self._turn += 1
        return Choice(replicas[self._turn % len(replicas)], 0)

    def learn(self, asked: Asked, replica: str, now: float) -> None:
        pass

    def forget(self, replica: str) -> None:
        pass


class _Cheapest:
    """The replica that can begin the answer first, by one measure for all: prompt tokens that have
    to be computed before, the request's own and those queued, and the requests under way.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, OrderedDict[str, None]] = {}

    def choose(self, asked: Asked, replicas: Sequence[Load], now: float) -> Choice:
        best: list[Choice] = []
        least = math.inf
        for replica in replicas:
            cached = min(self.cached(asked, replica.name, now), asked.tokens)
            cost = asked.tokens - cached + replica.queued + PER_REQUEST * replica.in_flight
            if asked.adapter and asked.adapter not in self._loaded(replica.name):
                cost += ADAPTER_LOAD
            if cost < least:
                least, best = cost, []
            if cost == least:
                best.append(Choice(replica, cached))
        return random.choice(best) if len(best) > 1 else best[0]

    def cached(self, asked: Asked, replica: str, now: float) -> int:
        """Prompt tokens of the request that the replica has in its cache, most likely."""
        return 0

    def learn(self, asked: Asked, replica: str, now: float) -> None:
        if asked.adapter:
            loaded = self._adapters.setdefault(replica, OrderedDict())
            loaded[asked.adapter] = None
            loaded.move_to_end(asked.adapter)
            if len(loaded) > ADAPTERS:
                loaded.popitem(last=False)

    def forget(self, replica: str) -> None:
        self._adapters.pop(replica, None)

    def _loaded(self, replica: str) -> Collection[str]:
        return self._adapters.get(replica, ())


class PrefixAware(_Cheapest):
    """The cheapest, where what a replica was sent before counts as cached."""

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__()
        self.index = index

    def cached(self, asked: Asked, replica: str, now: float) -> int:
        return self.index.matched(replica, asked.chain, now) * CHUNK // BYTES_PER_TOKEN

    def learn(self, asked: Asked, replica: str, now: float) -> None:
        super().learn(asked, replica, now)
        self.index.insert(replica, asked.chain, now)

    def forget(self, replica: str) -> None:
        super().forget(replica)
        self.index.forget(replica)


class Blocks(Protocol):
    """What replicas have in their KV caches, as they tell it themselves: kv_index.KvIndex."""

    def follows(self, replica: str) -> bool:
        """Whether the replica's cache is known now."""

    def matched(self, replica: str, chain: Sequence[int], now: float) -> int:
        """How many of the chain's first blocks the replica has, or will have in a moment."""

    def expect(self, replica: str, chain: Sequence[int], now: float) -> None:
        """The replica is about to compute these blocks."""

    def forget(self, replica: str) -> None:
        """The replica has started anew, or is gone."""


class KvAware(PrefixAware):
    """The cheapest, where what a replica has in its cache counts as cached.

    Where a request has no tokens, or a replica's cache is not known, it is as PrefixAware, which
    therefore learns all along.
    """

    def __init__(self, index: PrefixIndex, blocks: Blocks) -> None:
        super().__init__(index)
        self.blocks = blocks

    def cached(self, asked: Asked, replica: str, now: float) -> int:
        if asked.blocks is None or not self.blocks.follows(replica):
            return super().cached(asked, replica, now)
        return self.blocks.matched(replica, asked.blocks, now) * asked.block_size

    def learn(self, asked: Asked, replica: str, now: float) -> None:
        super().learn(asked, replica, now)
        if asked.blocks is not None:
            self.blocks.expect(replica, asked.blocks, now)

    def forget(self, replica: str) -> None:
        super().forget(replica)
        self.blocks.forget(replica)


class Session(_Cheapest):
    """All requests of a session to one replica, unless that has much more to do than the others.

    By rendezvous hashing, so that routers agree without talking and a replica that comes or goes
    moves only its share. Requests without a session go to the cheapest.
    """

    def choose(self, asked: Asked, replicas: Sequence[Load], now: float) -> Choice:
        if not asked.session:
            return super().choose(asked, replicas, now)
        under_way = sum(replica.in_flight for replica in replicas)
        bound = max(BATCH, math.ceil(BOUND * (under_way + 1) / len(replicas)))
        free = [replica for replica in replicas if replica.in_flight < bound]
        return Choice(max(free, key=lambda replica: _weight(asked.session, replica.name)), 0)


def _weight(session: str, replica: str) -> bytes:
    # Not Python's hash: routers on other machines, and the next one here, are to agree.
    return hashlib.blake2b(f"{replica}\0{session}".encode(), digest_size=8).digest()
