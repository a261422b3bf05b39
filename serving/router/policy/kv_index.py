# SPDX-License-Identifier: Apache-2.0
"""Which replica has which blocks in its engine's prefix cache and in memory, by its KV events.

The engine's own hashes are not computed here: they depend on its version and options. Events
contain the tokens, so each block gets a key that is computed here. Keys are chained, as the
engine's hashes are: each is a hash of the preceding key and the block's tokens. The first key also
covers the salt, the adapter and the media. The engine's hash only identifies the block when it is
evicted.

LMCache reports changes of its memory (L1) in the same stream, with its chunks as blocks. Its events
(0.5.6) have neither a salt nor an adapter, so they count for requests without either. The contents
of disks and shared stores are not reported.
"""

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Annotated, Any, NamedTuple

import msgspec

from serving.kv_cache.salt import digest
from serving.router.policy.hash_chain import leading, links

TTL_S = 2.0
"""How long a request's blocks count as cached before the engine has reported them."""
MOST_BLOCKS = 1 << 20
"""Blocks of one rank; no engine has as many. Requests can make vLLM report blocks again that it
has already (kv_cache_report_mode); it does not report their eviction as often.
"""
MOST_ADAPTERS = 10_000
MOST_REMOVED = 1 << 16
"""Chunks that have left memory and whose keys are kept: those after them may come again first."""

_GPU = (None, "GPU")  # vLLM on CPUs says GPU too
_CPU = "CPU"
_WHOLE = (None, "full_attention", "mla_attention", "sink_full_attention")

Hash = int | Annotated[bytes, msgspec.Meta(max_length=64)]
Blocks = Mapping[int, Sequence[int]]
"""A prompt's keys, one for each full block, by the size of blocks in tokens."""


class BlockStored(msgspec.Struct, tag=True):
    """Blocks have entered the cache."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    extra_keys: list[list[Any] | None] | None = None
    """For each block, the values that keep it apart besides its tokens."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks were evicted."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache was emptied."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
"""vLLM's events, as far as they are read here."""


class Position(NamedTuple):
    """The last batch of events that was applied."""

    number: int
    content: int
    """A hash of the batch's contents."""


def seed(*extra_keys: str) -> int:
    """The start of a chain. extra_keys: the first block's, as the engine has them."""
    return hash(("seed", *extra_keys))


PLAIN = seed()
"""The start of the chain of a request without adapter, tenant and salt."""


def request_seed(inner: str | None, tenant: str | None, salt: str | None) -> int:
    """The seed of a request's chain.

    inner: the engine's name of the request's adapter. tenant: None if tenants are not
    distinguished, "" if the header is missing. salt: the body's cache_salt.
    """
    return seed(*(key for key in (inner, digest(tenant, salt, inner)) if key))


def chain(tokens: Sequence[int], block_size: int, start: int) -> list[int]:
    """The keys of the full blocks of these tokens, after the key `start`. Raises OverflowError for
    an invalid token.
    """
    data = array("i", tokens)
    return links(data.tobytes(), block_size * data.itemsize, start)


class _Engines:
    """The blocks in all engines' prefix caches. Each key is there once, with a number whose bits
    are the engines that have the block.
    """

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self._replicas: list[str | None] = []  # of each bit

    def add(self, replica: str) -> int:
        """A new engine, of this replica. Its bit."""
        if None not in self._replicas:
            self._replicas.append(None)
        place = self._replicas.index(None)
        self._replicas[place] = replica
        return 1 << place

    def remove(self, bit: int) -> None:
        """The engine of this bit, which has no blocks any more, is gone."""
        self._replicas[bit.bit_length() - 1] = None

    def store(self, key: int, bit: int) -> None:
        """An engine has a block."""
        # The number itself if it is the only one: this saves an object.
        self.holders[key] = others | bit if (others := self.holders.get(key)) else bit

    def evict(self, key: int, bit: int) -> None:
        """An engine no longer has a block."""
        if left := self.holders.get(key, 0) & ~bit:
            self.holders[key] = left
        else:
            self.holders.pop(key, None)

    def replicas(self, bits: int) -> Iterator[str]:
        """The replicas of these engines."""
        while bits:
            place = (bits & -bits).bit_length() - 1
            if replica := self._replicas[place]:
                yield replica
            bits &= bits - 1


class _Engine:
    """The blocks in the prefix cache of one rank's engine."""

    def __init__(self, replica: str, engines: _Engines) -> None:
        self._engines = engines
        self.bit = engines.add(replica)
        self.size: int | None = None
        """Tokens of a block, None before the first."""
        self._keys: dict[Hash, int] = {}
        # The engine does not merge equal blocks that requests compute at the same time: it reports
        # each, and the eviction of each.
        self._more: dict[Hash, int] = {}
        self._group: int | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def store(self, event: BlockStored) -> bool:
        """Add the event's blocks. Whether they count."""
        if event.kv_cache_spec_kind not in _WHOLE:
            return False
        group = event.group_idx or 0
        if self._group is None:
            self._group = group  # of several groups with all tokens one is enough
        if group != self._group or not _is_sound(event, self.size):
            return False
        extra_keys = event.extra_keys or [None]
        # Blocks with media have other keys than texts; requests with media are not looked up.
        media = (n for n, keys in enumerate(extra_keys) if not _texts(keys))
        usable = next(media, len(event.block_hashes))
        if not usable:
            return False
        start: int | None = seed(*(extra_keys[0] or ()))
        if event.parent_block_hash is not None:
            start = self._keys.get(event.parent_block_hash)
        if start is None:  # a chain whose first block is not known cannot be compared
            return False
        self.size = event.block_size
        if len(self._keys) >= MOST_BLOCKS:
            self.clear()
        keys = chain(event.token_ids, event.block_size, start)
        for hashed, key in zip(event.block_hashes[:usable], keys, strict=False):
            if hashed in self._keys:
                self._more[hashed] = self._more.get(hashed, 0) + 1
            else:
                self._keys[hashed] = key
                self._engines.store(key, self.bit)
        return True

    def remove(self, event: BlockRemoved) -> None:
        if (event.group_idx or 0) != self._group:
            return
        for hashed in event.block_hashes:
            if more := self._more.pop(hashed, 0):
                if more > 1:
                    self._more[hashed] = more - 1
            elif (key := self._keys.pop(hashed, None)) is not None:
                self._engines.evict(key, self.bit)

    def clear(self) -> None:
        for key in self._keys.values():
            self._engines.evict(key, self.bit)
        self._keys.clear()
        self._more.clear()


class _Memory:
    """The chunks in LMCache's memory, as one rank reports them."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.size: int | None = None
        """Tokens of a chunk, None before the first."""
        self._keys: dict[Hash, int] = {}
        self._removed: OrderedDict[Hash, int] = OrderedDict()

    def store(self, event: BlockStored) -> None:
        """Add the event's chunks. LMCache may report one again that is there."""
        if event.lora_name or event.extra_keys or not _is_sound(event, self.size):
            return
        start: int | None = PLAIN
        if (parent := event.parent_block_hash) is not None:
            start = self._keys.get(parent, self._removed.get(parent))
        if start is None:
            return
        self.size = event.block_size
        if len(self._keys) >= MOST_BLOCKS:
            self.clear()
        keys = chain(event.token_ids, event.block_size, start)
        for hashed, key in zip(event.block_hashes, keys, strict=True):
            self._removed.pop(hashed, None)
            self._keys[hashed] = key
            self.held.add(key)

    def remove(self, event: BlockRemoved) -> None:
        for hashed in event.block_hashes:
            if (key := self._keys.pop(hashed, None)) is not None:
                self.held.discard(key)
                self._removed[hashed] = key
        while len(self._removed) > MOST_REMOVED:
            self._removed.popitem(last=False)

    def clear(self) -> None:
        self.held.clear()
        self._keys.clear()
        self._removed.clear()


class _Rank:
    """The reported blocks of one rank of a replica."""

    def __init__(self, replica: str, engines: _Engines) -> None:
        self.engine = _Engine(replica, engines)
        self.memory = _Memory()


class _Expected:
    """Blocks that a replica is about to compute."""

    def __init__(self) -> None:
        self.until: dict[int, float] = {}
        """How long each of them counts as cached."""
        self._queue: deque[tuple[float, Sequence[int]]] = deque()

    def add(self, keys: Sequence[int], now: float) -> None:
        while self._queue and self._queue[0][0] <= now:
            for key in self._queue.popleft()[1]:
                if self.until.get(key, math.inf) <= now:
                    del self.until[key]
        self._queue.append((now + TTL_S, keys))
        self.until.update(dict.fromkeys(keys, now + TTL_S))


class KvIndex:
    """The contents of all replicas' KV caches."""

    def __init__(self) -> None:
        self.followed: set[str] = set()
        """The replicas whose caches are known now."""
        self.positions: dict[tuple[str, int], Position] = {}
        """How far the events of each replica's ranks were applied."""
        self._engines = _Engines()
        self._ranks: dict[str, dict[int, _Rank]] = {}
        self._expected: dict[str, _Expected] = {}
        self._inner: dict[str, str] = {}

    @property
    def sizes(self) -> set[int]:
        """Tokens of a block or chunk, of all that replicas have reported."""
        ranks = (rank for ranks in self._ranks.values() for rank in ranks.values())
        sizes = {size for rank in ranks for size in (rank.engine.size, rank.memory.size)}
        return {size for size in sizes if size}

    def follows(self, replica: str) -> bool:
        """Whether the replica's cache is known now."""
        return replica in self.followed

    def held(self, replica: str) -> tuple[int, int]:
        """Tokens that are in the replica's engine and in its memory; the largest rank's."""
        ranks = self._ranks.get(replica, {}).values()
        return (
            max((len(it.engine) * (it.engine.size or 0) for it in ranks), default=0),
            max((len(it.memory.held) * (it.memory.size or 0) for it in ranks), default=0),
        )

    def in_engine(self, replica: str, blocks: Blocks, now: float) -> int:
        """How many of a prompt's first tokens the replica's engine has, or will have in a moment.
        blocks: by their size, the keys of the prompt's.

        An engine evicts a block only after those that follow it, so bisection finds the first that
        is missing.
        """
        expected = self._expected.get(replica)
        until = expected.until if expected else {}
        return max(
            self._first_missing(chain, bit, until, now) * size
            for size, chain, bit in self._engines_of(replica, blocks)
        )

    def holders(self, blocks: Blocks) -> Iterator[Collection[str]]:
        """The replicas whose engines have a part of the prompt: those with the largest part, and
        those with half of it, a quarter, and so on, each group once.
        """
        holders = self._engines.holders
        for chain in blocks.values():
            known = leading(chain, lambda key: key not in holders)
            before = 0
            while known:
                if (engines := holders.get(chain[known - 1], 0)) != before:
                    yield {*self._engines.replicas(engines)}
                before = engines
                known //= 2

    def in_memory(self, replica: str, blocks: Blocks) -> int | None:
        """The number of a prompt's first tokens in the replica's memory tier; the prompt must have
        no tenant, salt and adapter. None if the replica does not report its memory.
        """
        reports = [it.memory for it in self._ranks.get(replica, {}).values() if it.memory.size]
        if not reports:
            return None
        # Memory evicts chunks in any order.
        return max(
            _leading(blocks.get(it.size or 0, ()), it.held) * (it.size or 0) for it in reports
        )

    def expect(self, replica: str, blocks: Blocks, now: float) -> None:
        """The replica is about to compute these blocks."""
        for _, chain, bit in self._engines_of(replica, blocks):
            cached = self._first_missing(chain, bit, {}, now)
            if cached < len(chain):
                self._expected.setdefault(replica, _Expected()).add(chain[cached:], now)

    def inner(self, adapter: str) -> str:
        """The engines' name of this adapter, from its latest event; before any event, its own
        name.
        """
        return self._inner.get(adapter, adapter)

    def apply(self, replica: str, rank: int, event: Event) -> None:
        """Apply an event of one of the replica's data parallel ranks. Raises OverflowError for an
        event with an invalid token.
        """
        ranks = self._ranks.setdefault(replica, {})
        if (known := ranks.get(rank)) is None:
            known = ranks[rank] = _Rank(replica, self._engines)
        match event:
            case BlockStored(medium=medium) if medium in _GPU:
                if known.engine.store(event):
                    self._name(event.lora_name)
            case BlockStored(medium=medium) if medium == _CPU:
                known.memory.store(event)
            case BlockRemoved(medium=medium) if medium in _GPU:
                known.engine.remove(event)
            case BlockRemoved(medium=medium) if medium == _CPU:
                known.memory.remove(event)
            case AllBlocksCleared():  # the engine's own
                known.engine.clear()

    def forget(self, replica: str) -> None:
        """The replica has restarted, or is gone."""
        self.followed.discard(replica)
        self._expected.pop(replica, None)
        for rank in [*self._ranks.get(replica, ())]:
            self.forget_rank(replica, rank)
        self._ranks.pop(replica, None)
        for key in [key for key in self.positions if key[0] == replica]:
            del self.positions[key]

    def forget_rank(self, replica: str, rank: int) -> None:
        """One rank of the replica has restarted, or its events cannot be continued."""
        if gone := self._ranks.get(replica, {}).pop(rank, None):
            gone.engine.clear()
            self._engines.remove(gone.engine.bit)
        self.positions.pop((replica, rank), None)

    def _engines_of(self, replica: str, blocks: Blocks) -> Iterator[tuple[int, Sequence[int], int]]:
        """For each of the replica's engines the size of its blocks, the prompt's keys of that size,
        and the engine's bit. Before its first report, a rank has blocks of any size.
        """
        found = False
        for rank in self._ranks.get(replica, {}).values():
            if size := rank.engine.size:
                found = True
                yield size, blocks.get(size, ()), rank.engine.bit
        if not found:
            size = min(blocks, default=0)
            yield size, blocks.get(size, ()), 0

    def _first_missing(
        self, chain: Sequence[int], bit: int, until: Mapping[int, float], now: float
    ) -> int:
        holders = self._engines.holders

        def missing(key: int) -> bool:
            return not holders.get(key, 0) & bit and until.get(key, 0.0) <= now

        return leading(chain, missing)

    def _name(self, inner: str | None) -> None:
        if not inner:
            return
        if len(self._inner) >= MOST_ADAPTERS:
            self._inner.clear()
        self._inner[inner.rpartition("@")[0] or inner] = inner


def _leading(chain: Sequence[int], held: Set[int]) -> int:
    return next((n for n, key in enumerate(chain) if key not in held), len(chain))


def _is_sound(event: BlockStored, size: int | None) -> bool:
    """Whether an event has as many tokens as it says, in blocks of the size of those before."""
    return (
        event.block_size >= 1
        and size in (None, event.block_size)
        and len(event.token_ids) == event.block_size * len(event.block_hashes)
    )


def _texts(keys: list[Any] | None) -> bool:
    return all(isinstance(key, str) for key in keys or ())
