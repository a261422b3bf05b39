# SPDX-License-Identifier: Apache-2.0
"""Tiers behind the simulated engines: each one's memory (L1), and a store that all share (L2)."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from tools.routing_sim.model import BLOCK, Profile, Tier

CHUNK = 2
"""Blocks of the tiers: 256 tokens, LMCache's chunks."""
BACKLOG_S = 5.0
"""KV that would wait longer to be written is not stored."""


class Link:
    """One transfer after the other."""

    def __init__(self) -> None:
        self._free = 0.0

    def wait(self, now: float) -> float:
        return max(0.0, self._free - now)

    def take(self, now: float, seconds: float) -> float:
        """When a transfer that begins as soon as it can is over."""
        self._free = max(self._free, now) + seconds
        return self._free


class Chunks:
    """Chunks by their last block's link, from the least recently used on; and since when each can
    be read.
    """

    def __init__(self, tokens: int) -> None:
        self._most = tokens // (CHUNK * BLOCK)
        self._since: OrderedDict[int, float] = OrderedDict()

    def has(self, link: int, now: float) -> bool:
        return self._since.get(link, now + 1) <= now

    def since(self, link: int) -> float:
        """When a link became readable, 0 if it is not in this tier."""
        return self._since.get(link, 0.0)

    def add(self, links: Sequence[int], since: float) -> None:
        """Existing ones are only marked as used. The first of them go last, since the others are of
        no use without them.
        """
        for link in reversed(links):
            self._since.setdefault(link, since)
            self._since.move_to_end(link)
        while len(self._since) > self._most:
            self._since.popitem(last=False)

    def __contains__(self, link: int) -> bool:
        return link in self._since


class Shared:
    """The L2 of a fleet: its chunks, and its one link each way if it has a link."""

    def __init__(self, tier: Tier) -> None:
        self.tier, self.chunks = tier, Chunks(tier.tokens)
        self._reads, self._writes = Link(), Link()

    def stored_at(self, links: Sequence[int], tokens: int) -> float:
        """When all of a prompt's blocks are here; at once where some never will be."""
        ends = links[CHUNK - 1 : tokens // BLOCK : CHUNK]
        return max((self.chunks.since(link) for link in ends), default=0.0)

    def links(self) -> tuple[Link, Link]:
        """A replica's: to read and to write."""
        return (self._reads, self._writes) if self.tier.one_link else (Link(), Link())


class Loaded(NamedTuple):
    """Tokens that come from each tier, and when the last is there."""

    l1: int
    l2: int
    at: float


class Tiers:
    """The tiers behind one replica's engine."""

    def __init__(self, l1: Tier, l2: Shared | None, engine: Profile) -> None:
        self._l1, self._l2, self._rate = l1, l2, engine.rate
        self._chunk_bytes = engine.kv_bytes * CHUNK * BLOCK
        self._memory, self._bus = Chunks(l1.tokens), Link()
        if l2:
            self._reads, self._writes = l2.links()

    def load(self, links: Sequence[int], start: int, tokens: int, now: float) -> Loaded | None:
        """Begin to load the cached blocks after `start` tokens; the last of the request's tokens is
        always computed. None if no block is cached.
        """
        ends = links[CHUNK - 1 : (tokens - 1) // BLOCK : CHUNK]
        first = start // (CHUNK * BLOCK)
        near = [self._memory.has(link, now) for link in ends]
        last = first
        while last < len(ends) and (near[last] or self._stored(ends[last], now)):
            last += 1
        far = [place for place in range(first, last) if not near[place]]
        if far and self._l2:
            seconds = self._l2.tier.latency_s + len(far) * self._chunk_bytes / self._l2.tier.rate
            computing = (last - far[0]) * CHUNK * BLOCK / self._rate
            if self._reads.wait(now) + seconds > computing:  # the product's gate
                last, far = far[0], []
        if last == first:
            return None
        at = now
        if far and self._l2:
            at = self._reads.take(now, seconds)
            self._l2.chunks.add([ends[place] for place in far], now)
        if count := last - first - len(far):
            seconds = self._l1.latency_s + count * self._chunk_bytes / self._l1.rate
            at = max(at, self._bus.take(now, seconds))
        self._memory.add(ends[first:last], at)
        end = last * CHUNK * BLOCK
        of_l2 = len(far) * CHUNK * BLOCK
        return Loaded(end - start - of_l2, of_l2, at)

    def store(self, links: Sequence[int], tokens: int, now: float) -> None:
        """The engine has these blocks of a prompt. tokens: length of the prompt."""
        ends = links[CHUNK - 1 : tokens // BLOCK : CHUNK]
        self._memory.add(ends, now)
        if not self._l2:
            return
        new = [link for link in ends if link not in self._l2.chunks]
        if new and self._writes.wait(now) < BACKLOG_S:
            seconds = len(new) * self._chunk_bytes / self._l2.tier.rate
            self._l2.chunks.add(new, self._writes.take(now, seconds))

    def _stored(self, link: int, now: float) -> bool:
        return self._l2 is not None and self._l2.chunks.has(link, now)
