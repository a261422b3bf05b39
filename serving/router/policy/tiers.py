# SPDX-License-Identifier: Apache-2.0
"""The cached part of a prompt in each of a replica's KV caches, and the cost per token.

The unit of cost is the time that the replica takes to compute one prompt token.
"""

import dataclasses
from typing import NamedTuple


class Reach(NamedTuple):
    """For each cache, how many of a prompt's first tokens can be had without computing them, from
    this cache or from those before it.
    """

    engine: int = 0
    memory: int = 0
    disk: int = 0
    shared: int = 0


class Held(NamedTuple):
    """A prompt's tokens that need not be computed, each counted in the cache that it comes from."""

    engine: int = 0
    memory: int = 0
    """LMCache's memory (L1)."""
    disk: int = 0
    shared: int = 0
    """The store that replicas share."""

    @property
    def tokens(self) -> int:
        """All of them."""
        return sum(self)

    @staticmethod
    def of(reach: Reach, tokens: int) -> "Held":
        """tokens: the prompt's."""
        if reach is NOWHERE:
            return NOTHING
        engine, memory, disk, shared = reach
        engine = min(engine, tokens)
        if not (memory or disk or shared):
            return Held(engine)
        memory = max(engine, min(memory, tokens))
        disk = max(memory, min(disk, tokens))
        shared = max(disk, min(shared, tokens))
        return Held(engine, memory - engine, disk - memory, shared - disk)


NOWHERE, NOTHING = Reach(), Held()
"""Hashes of a prompt that no cache has; making them costs more than comparing them."""


def described(held: Held) -> str:
    """For a person: `engine 4,096 memory 3,840`. An engine is named in any case."""
    counts = held._asdict().items()
    return " ".join(f"{name} {count:,}" for name, count in counts if count or name == "engine")


class Prices(NamedTuple):
    """The cost of loading a token, relative to computing it; in the engine it is free. A store that
    is slower than computing costs 1, because servers then compute.

    The defaults stand until a replica has measured its own. LMI's published run (46 documents of
    10,000 tokens) has its first token after 1.161 s computed, 0.438 s from memory and 0.741 s from
    NVMe: 0.38 and 0.64. A 70B model's 320 KiB a token at 20 GB/s against 25,000 tokens/s computed
    is 0.41; and at the 11 GB/s of a fast network, 0.74.
    """

    memory: float = 0.4
    disk: float = 0.65
    shared: float = 0.75

    def work(self, tokens: int, held: Held) -> int:
        """The cost of a prompt of this many tokens on a replica with these cached."""
        engine, memory, disk, shared = held
        left = tokens - engine
        if not (memory or disk or shared):
            return left
        cost = float(left)
        for count, price in zip((memory, disk, shared), self, strict=True):
            if count and price < 1.0:
                cost -= count * (1.0 - price)
        return round(cost)


DEFAULT_PRICES = Prices()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """The capacities of one replica's KV caches, in tokens.

    Each has copies of the contents of those before it, so a replica has the contents of its
    largest.
    """

    engine: int | None = None
    """None if the replica does not report it."""
    memory: int = 0
    disk: int = 0
    shared: int | None = None
    """None if its size is unknown."""
    store: str = ""
    """The name of the shared store and its model, the same on all replicas; "" without a store."""
    pool: str = ""
    """Replicas with the same name have the memory and the disk together; "" if they are the
    replica's own."""
