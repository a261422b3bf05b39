# SPDX-License-Identifier: Apache-2.0
"""Remembers the prompts sent to each replica: hashes, about as many as its KV caches hold."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from serving.router.policy.hash_chain import leading, links
from serving.router.policy.tiers import NOWHERE, Capacity, Held, Reach

BYTES_PER_TOKEN = 4
"""Rough bytes per token of text and its JSON, for tokenizers of present models."""
CHUNK = 512
"""Bytes of a prompt in each of the first links of its chain, some 128 tokens."""
TTL_S = 1800.0
"""Seconds without a request after which a prompt counts as evicted from an engine and from a shared
store. Other clients of the store evict, too, unseen by this router. A replica's memory and disk
tiers are its own, and larger.
"""
DEFAULT_TOKENS = 500_000
"""Assumed capacity of an engine's KV cache without a report."""
DEFAULT_SHARED_TOKENS = 8_000_000
"""Assumed capacity of a shared store of unknown size."""
MOST_TOKENS = 32_000_000
"""Maximum of one cache: at most 250,000 links, of short prompts, some 30 MB if no other cache has
them.
"""
LEVELS = 3
"""An engine, its memory, its disk."""


class Width(NamedTuple):
    """The size of a chain's links, in bytes of the prompt, from one byte and link on."""

    begin: int
    first: int
    size: int


WIDTHS = Width(0, 0, CHUNK), Width(8_192, 16, 2_048), Width(65_536, 44, 8_192)
"""A chain of 256 KB has 67 links instead of 500. The known part of a prompt is less than one link
shorter than the sent part: by a quarter at most, and from 64 KiB on by an eighth.
"""
NEAR, MIDDLE, FAR = WIDTHS


def chain(prompt: bytes | memoryview, seed: object) -> list[int]:
    """A link for each whole piece of the prompt. seed: further values that must be equal.

    Pieces begin at fixed places, so equal beginnings have equal links.
    """
    whole = memoryview(prompt)
    found = links(whole[: MIDDLE.begin], NEAR.size, hash(seed))
    if len(whole) > MIDDLE.begin:
        found += links(whole[MIDDLE.begin : FAR.begin], MIDDLE.size, found[-1])
    if len(whole) > FAR.begin:
        found += links(whole[FAR.begin :], FAR.size, found[-1])
    return found


def covered(links: int) -> int:
    """Tokens of a prompt that its first links cover."""
    it = FAR if links >= FAR.first else MIDDLE if links >= MIDDLE.first else NEAR
    return (it.begin + (links - it.first) * it.size) // BYTES_PER_TOKEN


def within(tokens: int) -> int:
    """The number of first links that cover at most this number of tokens of a prompt."""
    size = tokens * BYTES_PER_TOKEN
    it = FAR if size >= FAR.begin else MIDDLE if size >= MIDDLE.begin else NEAR
    return it.first + (size - it.begin) // it.size


class _Run:
    """Links of a chain, one after the other, that were always sent together."""

    __slots__ = ("before", "holders", "links", "start")

    def __init__(self, links: tuple[int, ...], start: int, before: "_Run | None") -> None:
        """start: how many links of its chain are before it, which end in the run `before`."""
        self.links = links
        self.start = start
        self.before = before
        self.holders: dict[_Caches, _Part] = {}
        """The caches that have a part of the run."""

    def tokens(self, begin: int, end: int) -> int:
        """Tokens of its links between these."""
        return covered(self.start + end) - covered(self.start + begin)


class _Part:
    """The part of a run in the caches of one replica."""

    __slots__ = ("ends", "until")

    def __init__(self, ends: list[int], until: float) -> None:
        self.ends = ends
        """For each cache, how many of the run's first links are in this one or in faster ones."""
        self.until = until


Path = Sequence[tuple[_Run, int]]
"""The runs of a prompt that any cache has, the last one first, and how many of the run's links the
prompt has.
"""


class _Caches:
    """The runs that one replica was sent, or all that share a store, by the fastest cache that most
    likely has them.

    Every cache evicts the least recently used blocks, and has copies of the blocks in faster ones.
    So by their last use the first runs are in the engine, those beyond its size in memory alone,
    and those beyond the memory's size on the disk alone. The first run of a chain is always used
    last.
    """

    def __init__(self, replica: str, *sizes: int) -> None:
        """replica: whose they are, or "". sizes: for each cache, the tokens that it has room for
        and no faster one has.
        """
        self.replica = replica
        self.counts = [0] * LEVELS
        """How many there are of them."""
        self.sizes = sizes
        self._levels: list[OrderedDict[_Run, None]] = [OrderedDict() for _ in range(LEVELS)]

    @property
    def runs(self) -> Iterator[_Run]:
        """All that it has a part of, some more than once."""
        for level in self._levels:
            yield from level

    def use(self, path: Path, until: float) -> None:
        """A prompt of these whole runs was sent."""
        front = self._levels[0]
        for run, count in path:
            part = run.holders.get(self)
            if part is None:
                part = run.holders[self] = _Part([0] * LEVELS, until)
            part.until = until
            if part.ends[0] < count:
                self._put(run, part, [count] * LEVELS)
            front.move_to_end(run)

    def shrink(self) -> Iterator[_Run]:
        """Evict the surplus over each cache's size. Yields the runs that have left all its
        caches.
        """
        for level in range(LEVELS):
            while (surplus := self.counts[level] - self.sizes[level]) > 0:
                yield from self._drop(level, surplus)

    def _drop(self, level: int, surplus: int) -> Iterator[_Run]:
        """Drop about so many tokens of the run that was used least recently. Evicted blocks move to
        the next cache with any capacity.
        """
        run = next(iter(self._levels[level]))
        part = run.holders[self]
        ends = [*part.ends]
        least = ends[level - 1] if level else 0
        kept = within(max(covered(run.start + ends[level]) - surplus, 0)) - run.start
        ends[level] = max(kept, least)
        for below in range(level + 1, LEVELS):
            if self.sizes[below]:
                break
            ends[below] = ends[level]
        self._put(run, part, ends)
        if not ends[-1]:
            yield run

    def _put(self, run: _Run, part: _Part, ends: list[int]) -> None:
        """Change how many of the run's first links there are."""
        before = begin = 0
        for level, (old, new) in enumerate(zip(part.ends, ends, strict=True)):
            self.counts[level] += run.tokens(begin, new) - run.tokens(before, old)
            if new == begin:
                self._levels[level].pop(run, None)
            elif old == before:
                self._levels[level][run] = None
            before, begin = old, new
        part.ends = ends
        if not ends[-1]:
            del run.holders[self]

    def divide(self, run: _Run, first: _Run, part: _Part) -> None:
        """The run's first links are a separate run from now on."""
        size = len(first.links)
        first.holders[self] = _Part([min(end, size) for end in part.ends], part.until)
        part.ends = [max(end - size, 0) for end in part.ends]
        if not part.ends[-1]:
            del run.holders[self]
        before = begin = 0
        for level, own in enumerate(self._levels):
            had, has = part.ends[level], first.holders[self].ends[level]
            if had == before:
                own.pop(run, None)
            if has > begin:
                # Before a run there are always those that were used no earlier.
                ahead: _Run | None = first
                while ahead:
                    if ahead is first or ahead in own:
                        own[ahead] = None
                        own.move_to_end(ahead)
                    ahead = ahead.before
            before, begin = had, has

    def reach(self, path: Path, now: float) -> tuple[int, int, int]:
        """How many of a prompt's first links are in the engine, in memory and on the disk."""
        memory = disk = 0
        for run, count in path:
            if (part := run.holders.get(self)) is None:
                continue
            engine_end, memory_end, disk_end = part.ends
            disk = disk or run.start + min(disk_end, count)
            if memory_end:
                memory = memory or run.start + min(memory_end, count)
            if engine_end and part.until > now:
                return run.start + min(engine_end, count), memory, disk
        return 0, memory, disk


class PrefixIndex:
    """The prompts that each replica was sent, and most likely still has in one of its caches.

    All caches share one tree of prompts, so a link is there once, however many replicas have it. A
    prompt's links are kept as a few runs: one for each time that a chain grew or branched. So a
    prompt that comes again costs a step for each run, and not for each link.
    """

    def __init__(self) -> None:
        self._capacity: dict[str, Capacity] = {}
        self._caches: dict[str, _Caches] = {}
        self._stores: dict[str, _Caches] = {}
        self._pools: dict[str, _Caches] = {}
        self._runs: dict[int, _Run] = {}  # by each of their links
        self._last: tuple[Sequence[int], Path] = (), ()  # the chain that was looked up last

    @property
    def links(self) -> int:
        """How many there are, of all caches."""
        return len(self._runs)

    def reach(self, replica: str, chain: Sequence[int], now: float) -> Reach:
        """How far the replica's caches reach into a prompt with this chain."""
        if not chain or not (path := self._path(chain)):
            return NOWHERE
        engine = memory = disk = shared = 0
        capacity = self._capacity.get(replica, _UNKNOWN)
        if caches := self._caches.get(replica):
            engine, memory, disk = caches.reach(path, now)
        if not (capacity.memory or capacity.disk or capacity.store):
            return Reach(covered(engine)) if engine else NOWHERE
        if pool := self._pools.get(capacity.pool):
            _, memory, disk = pool.reach(path, now)
        memory, disk = _where_any(capacity, memory, disk)
        if store := self._stores.get(capacity.store):
            shared, *_ = store.reach(path, now)
        return Reach(covered(engine), covered(memory), covered(disk), covered(shared))

    def holders(self, chain: Sequence[int]) -> Iterator[list[str]]:
        """The replicas that have a part of a prompt: first those with the largest part, then all
        with at least half as much, and so on.

        A replica with a run has all runs before it. So each replica is in a group whose members
        have at least half of its part.
        """
        groups: list[tuple[int, _Run]] = []  # each larger than those before
        for run, count in self._path(chain):
            if not groups or len(run.holders) > len(groups[-1][1].holders):
                groups.append((covered(run.start + count), run))
        while groups:
            (most, run), *groups = groups
            yield [caches.replica for caches in run.holders if caches.replica]
            while len(groups) > 1 and 2 * groups[1][0] >= most:
                del groups[0]

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
        return Held(engine, memory, disk, shared)

    def insert(self, replica: str, chain: Sequence[int], now: float) -> None:
        """The replica is sent a prompt with this chain now (seconds of any one clock)."""
        if not chain:
            return
        capacity = self._capacity.get(replica, _UNKNOWN)
        if replica not in self._caches:
            self._caches[replica] = _Caches(replica, *_sizes(capacity))
        path = self._whole(chain)
        every = [self._caches[replica]]
        if capacity.store:
            every.append(self._stores[capacity.store])
        if capacity.pool:
            every.append(self._pools[capacity.pool])
        for caches in every:
            caches.use(path, now + TTL_S)
        for caches in every:
            self._shrink(caches)

    def resize(self, replica: str, capacity: Capacity) -> None:
        """Set the capacities of the replica's KV caches."""
        self._capacity[replica] = capacity
        if caches := self._caches.get(replica):
            self._resize(caches, _sizes(capacity))
        if capacity.store:
            shared = DEFAULT_SHARED_TOKENS if capacity.shared is None else capacity.shared
            store = self._stores.setdefault(capacity.store, _Caches("", 0, 0, 0))
            self._resize(store, (_bounded(shared), 0, 0))
        if capacity.pool:
            pool = self._pools.setdefault(capacity.pool, _Caches("", 0, 0, 0))
            self._resize(pool, (0, *_tier_sizes(capacity, 0)))

    def forget(self, replica: str) -> None:
        """Forget a replica that has restarted or left. Its shared caches remain while another
        replica has them.
        """
        self._capacity.pop(replica, None)
        if caches := self._caches.pop(replica, None):
            self._remove(caches)
        used = self._capacity.values()
        for name in self._stores.keys() - {capacity.store for capacity in used}:
            self._remove(self._stores.pop(name))
        for name in self._pools.keys() - {capacity.pool for capacity in used}:
            self._remove(self._pools.pop(name))

    def _path(self, chain: Sequence[int]) -> Path:
        """A prompt's runs that any cache has."""
        if self._last[0] is not chain:
            runs = self._runs
            known = leading(chain, lambda link: link not in runs)
            run = runs[chain[known - 1]] if known else None
            path = []
            while run:
                path.append((run, known - run.start))
                known = run.start
                run = run.before
            self._last = chain, path
        return self._last[1]

    def _whole(self, chain: Sequence[int]) -> Path:
        """All runs of a prompt. They are made if missing, and end with the prompt."""
        path = [*self._path(chain)]
        self._last = (), ()
        known = 0
        if path:
            run, count = path[0]
            if count < len(run.links):
                run = self._split(run, count)
                path[0] = run, count
            known = run.start + count
        if known < len(chain):
            before = path[0][0] if path else None
            new = _Run(tuple(chain[known:]), known, before)
            self._runs.update(dict.fromkeys(new.links, new))
            path.insert(0, (new, len(new.links)))
        return path

    def _split(self, run: _Run, count: int) -> _Run:
        """Make two of a run. Returns the first one, which has this number of links."""
        first = _Run(run.links[:count], run.start, run.before)
        run.links, run.start, run.before = run.links[count:], run.start + count, first
        self._runs.update(dict.fromkeys(first.links, first))
        for caches, part in [*run.holders.items()]:
            caches.divide(run, first, part)
        self._clean(run)
        return first

    def _shrink(self, caches: _Caches) -> None:
        for run in caches.shrink():
            self._clean(run)

    def _resize(self, caches: _Caches, sizes: tuple[int, ...]) -> None:
        if caches.sizes != sizes:
            caches.sizes = sizes
            self._last = (), ()
            self._shrink(caches)

    def _remove(self, caches: _Caches) -> None:
        self._last = (), ()
        for run in caches.runs:
            if run.holders.pop(caches, None):
                self._clean(run)

    def _clean(self, run: _Run) -> None:
        """Drop a run that no cache has."""
        if not run.holders:
            for link in run.links:
                self._runs.pop(link, None)


_UNKNOWN = Capacity()


def _bounded(tokens: int) -> int:
    return min(tokens, MOST_TOKENS)


def _sizes(capacity: Capacity) -> tuple[int, int, int]:
    """How many tokens there are in engine, memory and disk that are in no faster one of them."""
    engine = _bounded(DEFAULT_TOKENS if capacity.engine is None else capacity.engine)
    return engine, *((0, 0) if capacity.pool else _tier_sizes(capacity, engine))


def _tier_sizes(capacity: Capacity, faster: int) -> tuple[int, int]:
    """How many tokens there are in memory and disk that are in no faster cache. faster: the tokens
    of the engine.
    """
    memory = max(faster, _bounded(capacity.memory))
    disk = max(memory, _bounded(capacity.disk))
    return memory - faster, disk - memory


def _where_any(capacity: Capacity, memory: int, disk: int) -> tuple[int, int]:
    """The contents of memory and disk, if the replica has any."""
    return memory if capacity.memory else 0, disk if capacity.disk else 0
