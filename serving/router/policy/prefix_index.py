# SPDX-License-Identifier: Apache-2.0
"""What each replica was sent before: hashes of prompts, about as many as its KV caches hold."""

from collections import OrderedDict
from collections.abc import Sequence

from serving.router.policy.hash_chain import leading, links
from serving.router.policy.tiers import Capacity, Held, Reach

CHUNK = 512
"""Bytes of a prompt in one link of a chain, some 128 tokens."""
BYTES_PER_TOKEN = 4
"""Of text and its JSON, roughly, for tokenizers of present models."""
TOKENS = CHUNK // BYTES_PER_TOKEN
"""Of one link."""
TTL_S = 1800.0
"""A prompt that was not sent for so long is taken for evicted from an engine, and from a shared
store: others use them too, unseen. Memory and disk are a replica's own, and larger.
"""
DEFAULT_TOKENS = 500_000
"""What a replica is taken to keep in its engine's KV cache where it does not say."""
DEFAULT_SHARED_TOKENS = 8_000_000
"""What a shared store is taken to keep where its size is unknown."""
MOST_LINKS = 250_000
"""Of one cache, some 25 MB: 32 million tokens."""


def chain(prompt: bytes | memoryview, seed: object) -> list[int]:
    """A link for each whole chunk of the prompt. seed: what else has to be equal."""
    return links(prompt, CHUNK, hash(seed))


class _Caches:
    """The links that one replica was sent, by the fastest cache that most likely has them.

    Every cache drops what was least recently used and has copies of what is in faster ones. So by
    their last use the first links are in the engine, those beyond its size in memory alone, and
    those beyond the memory's size on the disk alone.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._levels: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(3)]
        self.resize(capacity)

    def resize(self, capacity: Capacity) -> None:
        engine = _count(DEFAULT_TOKENS if capacity.engine is None else capacity.engine)
        memory = max(engine, _count(capacity.memory))
        disk = max(memory, _count(capacity.disk))
        sizes = engine, memory - engine, disk - memory
        # What each drops goes to the next one that has room at all.
        below: OrderedDict[int, float] | None = None
        overflows = []
        for level, size in zip(reversed(self._levels), reversed(sizes), strict=True):
            overflows.append((level, size, below))
            below = level if size else below
        self._overflows = overflows[::-1]
        self._memory, self._disk = bool(capacity.memory), bool(capacity.disk)

    def insert(self, chain: Sequence[int], until: float) -> None:
        engine, *others = self._levels
        others = [level for level in others if level]
        for link in reversed(chain):
            engine[link] = until
            engine.move_to_end(link)
            for level in others:
                level.pop(link, None)
        for level, size, below in self._overflows:
            for _ in range(len(level) - size):
                link, last = level.popitem(last=False)
                if below is not None:
                    below[link] = last

    def held(self) -> tuple[int, int, int]:
        """How many links each cache has; memory and disk have those of the caches before, too."""
        engine, memory, disk = map(len, self._levels)
        in_memory = engine + memory if self._memory else 0
        return engine, in_memory, engine + memory + disk if self._disk else 0

    def reach(self, chain: Sequence[int], now: float) -> tuple[int, int, int]:
        """How many of the chain's first links are in the engine, memory or disk."""
        # A link's predecessors are always used no earlier than itself, so that whatever is there
        # is there with all before it.
        engine, memory, disk = self._levels
        in_engine = leading(chain, lambda link: engine.get(link, 0.0) <= now)
        if not (self._memory or self._disk):
            return in_engine, 0, 0
        in_memory = on_disk = 0
        if self._memory:
            in_memory = leading(chain, lambda link: link not in engine and link not in memory)
        if self._disk:
            on_disk = leading(
                chain,
                lambda link: link not in engine and link not in memory and link not in disk,
            )
        return in_engine, in_memory, on_disk


class _Store:
    """The links that were sent to replicas with one shared store."""

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.until: OrderedDict[int, float] = OrderedDict()

    def insert(self, chain: Sequence[int], until: float) -> None:
        for link in reversed(chain):
            self.until[link] = until
            self.until.move_to_end(link)
        size = _count(DEFAULT_SHARED_TOKENS if self.capacity is None else self.capacity)
        while len(self.until) > size:
            self.until.popitem(last=False)


class PrefixIndex:
    """The prompts that each replica was sent, and most likely still has in one of its caches."""

    def __init__(self) -> None:
        self._capacity: dict[str, Capacity] = {}
        self._caches: dict[str, _Caches] = {}
        self._stores: dict[str, _Store] = {}

    def reach(self, replica: str, chain: Sequence[int], now: float) -> Reach:
        """How far the replica's caches reach into a prompt with this chain."""
        engine = memory = disk = shared = 0
        if caches := self._caches.get(replica):
            engine, memory, disk = caches.reach(chain, now)
        capacity = self._capacity.get(replica)
        if capacity and (store := self._stores.get(capacity.store)):
            until = store.until
            shared = leading(chain, lambda link: until.get(link, 0.0) <= now)
        return Reach(engine * TOKENS, memory * TOKENS, disk * TOKENS, shared * TOKENS)

    def held(self, replica: str) -> Held:
        """About how many tokens of what it was sent the replica still has, by cache."""
        engine = memory = disk = 0
        if caches := self._caches.get(replica):
            engine, memory, disk = caches.held()
        capacity = self._capacity.get(replica)
        store = self._stores.get(capacity.store) if capacity else None
        shared = len(store.until) if store else 0
        return Held(engine * TOKENS, memory * TOKENS, disk * TOKENS, shared * TOKENS)

    def insert(self, replica: str, chain: Sequence[int], now: float) -> None:
        """The replica is sent a prompt with this chain now (seconds of any one clock)."""
        capacity = self._capacity.get(replica) or Capacity()
        if replica not in self._caches:
            self._caches[replica] = _Caches(capacity)
        self._caches[replica].insert(chain, now + TTL_S)
        if capacity.store:
            self._stores.setdefault(capacity.store, _Store()).insert(chain, now + TTL_S)

    def resize(self, replica: str, capacity: Capacity) -> None:
        """The replica's KV caches hold so much."""
        self._capacity[replica] = capacity
        if caches := self._caches.get(replica):
            caches.resize(capacity)
        if capacity.store:
            self._stores.setdefault(capacity.store, _Store()).capacity = capacity.shared

    def forget(self, replica: str) -> None:
        """The replica has started anew, or is gone. A shared store outlives it, while another
        replica has it.
        """
        self._caches.pop(replica, None)
        self._capacity.pop(replica, None)
        used = {capacity.store for capacity in self._capacity.values()}
        for store in self._stores.keys() - used:
            del self._stores[store]


def _count(tokens: int) -> int:
    """How many links that is."""
    return min(tokens // TOKENS, MOST_LINKS)
