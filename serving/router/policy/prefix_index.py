# SPDX-License-Identifier: Apache-2.0
"""Remembers the prompts sent to each replica: hashes, about as many as its KV caches hold."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

from serving.router.policy.hash_chain import leading, links
from serving.router.policy.tiers import NOWHERE, Capacity, Held, Reach

CHUNK = 512
"""Bytes of a prompt in one link of a chain, some 128 tokens."""
BYTES_PER_TOKEN = 4
"""Rough bytes per token of text and its JSON, for tokenizers of present models."""
TOKENS = CHUNK // BYTES_PER_TOKEN
"""Of one link."""
TTL_S = 1800.0
"""A prompt that was not sent for so long is taken for evicted from an engine, and from a shared
store: others use them too, unseen. Memory and disk are a replica's own, and larger.
"""
DEFAULT_TOKENS = 500_000
"""Assumed capacity of an engine's KV cache without a report."""
DEFAULT_SHARED_TOKENS = 8_000_000
"""Assumed capacity of a shared store of unknown size."""
MOST_LINKS = 250_000
"""Maximum of one cache, 32 million tokens: some 25 MB, and 80 MB if each prompt has a single
block.
"""


def chain(prompt: bytes | memoryview, seed: object) -> list[int]:
    """A link for each whole chunk of the prompt. seed: further values that must be equal."""
    return links(prompt, CHUNK, hash(seed))


class _Run:
    """Links of a chain, one after the other, that were last used together."""

    __slots__ = ("before", "level", "links", "start", "until")

    def __init__(self, links: tuple[int, ...], start: int, before: "_Run | None") -> None:
        """start: how many links of its chain are before it, which end in the run `before`."""
        self.links = links
        self.start = start
        self.before = before
        self.level = 0
        self.until = 0.0


class _Caches:
    """The links that one replica was sent, or all that share a store, by the fastest cache that
    most likely has them.

    Every cache evicts the least recently used blocks, and has copies of the blocks in faster ones.
    So by their last use the first links are in the engine, those beyond its size in memory alone,
    and those beyond the memory's size on the disk alone.

    A prompt's links are kept as a few runs: one for each time that its chain grew or branched.
    Those that share a run are always used together, so that a prompt that comes again costs a step
    for each run and not for each link. Of a chain the first run is always used last.
    """

    def __init__(self, *sizes: int) -> None:
        """sizes: how many links each cache has room for that are in no faster one."""
        self.counts = [0] * len(sizes)
        """How many there are of them."""
        self._sizes = sizes
        self._runs: dict[int, _Run] = {}  # by each of their links
        self._levels: list[OrderedDict[_Run, None]] = [OrderedDict() for _ in sizes]

    def resize(self, *sizes: int) -> None:
        self._sizes = sizes
        # The slowest first: what it has was used before all that is about to come into it.
        for level in reversed(range(len(sizes))):
            self._shrink(level)

    def insert(self, chain: Sequence[int], until: float) -> None:
        known, run = self._known(chain)
        if run and known < run.start + len(run.links):
            run = self._split(run, known)
        if known < len(chain):
            run = _Run(tuple(chain[known:]), known, run)
            self._runs.update(dict.fromkeys(run.links, run))
            self._add(run, 0)
        while run:
            run.until = until
            if run.level:
                self._remove(run)
                self._add(run, 0)
            self._levels[0].move_to_end(run)
            run = run.before
        for level in range(len(self._sizes)):
            self._shrink(level)

    def _known(self, chain: Sequence[int]) -> tuple[int, _Run | None]:
        """How many of the chain's first links there are, and the run of the last of them."""
        runs = self._runs
        known = leading(chain, lambda link: link not in runs)
        return known, runs[chain[known - 1]] if known else None

    def _split(self, run: _Run, end: int) -> _Run:
        """Make two of a run, the first up to this link of the chain. Returns that."""
        count = end - run.start
        first = _Run(run.links[:count], run.start, run.before)
        first.level, first.until = run.level, run.until
        run.links, run.start, run.before = run.links[count:], end, first
        self._runs.update(dict.fromkeys(first.links, first))
        self._levels[run.level][first] = None
        return first

    def _shrink(self, level: int) -> None:
        while (surplus := self.counts[level] - self._sizes[level]) > 0:
            self._drop(level, surplus)

    def _drop(self, level: int, surplus: int) -> None:
        """Drop up to so many links of the run that was used least recently. Evicted blocks move to
        the next cache with any capacity.
        """
        run = next(iter(self._levels[level]))
        if surplus < len(run.links):
            first = self._split(run, run.start + len(run.links) - surplus)
            self._levels[level].move_to_end(first, last=False)
        self._remove(run)
        below = next((it for it in range(level + 1, len(self._sizes)) if self._sizes[it]), None)
        if below is not None:
            self._add(run, below)
            return
        for link in run.links:
            self._runs.pop(link, None)

    def _add(self, run: _Run, level: int) -> None:
        run.level = level
        self._levels[level][run] = None
        self.counts[level] += len(run.links)

    def _remove(self, run: _Run) -> None:
        del self._levels[run.level][run]
        self.counts[run.level] -= len(run.links)

    def reach(self, chain: Sequence[int], now: float) -> tuple[int, int, int]:
        """How many of the chain's first links are in the engine, in memory and on the disk."""
        known, run = self._known(chain)
        engine = memory = known
        while run and (run.level or run.until <= now):
            engine = run.start
            if run.level > 1:
                memory = run.start
            run = run.before
        return engine, memory, known


class PrefixIndex:
    """The prompts that each replica was sent, and most likely still has in one of its caches."""

    def __init__(self) -> None:
        self._capacity: dict[str, Capacity] = {}
        self._caches: dict[str, _Caches] = {}
        self._stores: dict[str, _Caches] = {}
        self._pools: dict[str, _Caches] = {}

    def reach(self, replica: str, chain: Sequence[int], now: float) -> Reach:
        """How far the replica's caches reach into a prompt with this chain."""
        if not chain:
            return NOWHERE
        engine = memory = disk = shared = 0
        capacity = self._capacity.get(replica, _UNKNOWN)
        if caches := self._caches.get(replica):
            engine, memory, disk = caches.reach(chain, now)
        if pool := self._pools.get(capacity.pool):
            _, memory, disk = pool.reach(chain, now)
        memory, disk = _where_any(capacity, memory, disk)
        if store := self._stores.get(capacity.store):
            shared, *_ = store.reach(chain, now)
        return Reach(engine * TOKENS, memory * TOKENS, disk * TOKENS, shared * TOKENS)

    def held(self, replica: str) -> Held:
        """Approximate number of sent tokens that the replica still has, by cache."""
        engine = memory = disk = shared = 0
        capacity = self._capacity.get(replica, _UNKNOWN)
        if caches := self._caches.get(replica):
            engine, memory, disk = accumulate(caches.counts)
        if pool := self._pools.get(capacity.pool):
            _, memory, disk = accumulate(pool.counts)
        memory, disk = _where_any(capacity, memory, disk)
        if store := self._stores.get(capacity.store):
            shared = sum(store.counts)
        return Held(engine * TOKENS, memory * TOKENS, disk * TOKENS, shared * TOKENS)

    def insert(self, replica: str, chain: Sequence[int], now: float) -> None:
        """The replica is sent a prompt with this chain now (seconds of any one clock)."""
        if not chain:
            return
        capacity = self._capacity.get(replica, _UNKNOWN)
        if replica not in self._caches:
            self._caches[replica] = _Caches(*_sizes(capacity))
        self._caches[replica].insert(chain, now + TTL_S)
        if capacity.store:
            self._stores[capacity.store].insert(chain, now + TTL_S)
        if capacity.pool:
            self._pools[capacity.pool].insert(chain, now + TTL_S)

    def resize(self, replica: str, capacity: Capacity) -> None:
        """Set the capacities of the replica's KV caches."""
        self._capacity[replica] = capacity
        if caches := self._caches.get(replica):
            caches.resize(*_sizes(capacity))
        if capacity.store:
            shared = DEFAULT_SHARED_TOKENS if capacity.shared is None else capacity.shared
            self._stores.setdefault(capacity.store, _Caches(0)).resize(_count(shared))
        if capacity.pool:
            pool = self._pools.setdefault(capacity.pool, _Caches(0, 0, 0))
            pool.resize(0, *_tier_sizes(capacity, 0))

    def forget(self, replica: str) -> None:
        """The replica has started anew, or is gone. Its shared caches outlive it, while another
        replica has them.
        """
        self._caches.pop(replica, None)
        self._capacity.pop(replica, None)
        used = self._capacity.values()
        for store in self._stores.keys() - {capacity.store for capacity in used}:
            del self._stores[store]
        for pool in self._pools.keys() - {capacity.pool for capacity in used}:
            del self._pools[pool]


def _count(tokens: int) -> int:
    """How many links that is."""
    return min(tokens // TOKENS, MOST_LINKS)


_UNKNOWN = Capacity()


def _sizes(capacity: Capacity) -> tuple[int, int, int]:
    """How many links there are in engine, memory and disk that are in no faster one of them."""
    engine = _count(DEFAULT_TOKENS if capacity.engine is None else capacity.engine)
    return engine, *((0, 0) if capacity.pool else _tier_sizes(capacity, engine))


def _tier_sizes(capacity: Capacity, faster: int) -> tuple[int, int]:
    """How many links there are in memory and disk that are in no faster cache. faster: the links
    of the engine.
    """
    memory = max(faster, _count(capacity.memory))
    disk = max(memory, _count(capacity.disk))
    return memory - faster, disk - memory


def _where_any(capacity: Capacity, memory: int, disk: int) -> tuple[int, int]:
    """The contents of memory and disk, if the replica has any."""
    return memory if capacity.memory else 0, disk if capacity.disk else 0
