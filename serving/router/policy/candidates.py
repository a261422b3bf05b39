# SPDX-License-Identifier: Apache-2.0
"""The replicas that a request can go to, and in a large fleet the few that are worth a look.

All that is asked of a fleet with a thousand replicas costs about as much as in one with ten.
"""

import copy
import hashlib
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, nlargest
from typing import Generic, Self, TypeVar, overload

from serving.router.policy.replica_load import Load

EXACT = 32
"""In a fleet of at most this number of replicas, the cost of each is computed."""
ALIKE = 300
"""Loads that differ by less take turns, as policies.NEAR has it."""
LOOKED_AT = 64
"""Replicas that are examined in the search for the least loaded ones, if not all are candidates."""
TOP = 8
"""Replicas of a key's order that are kept."""
MOST_KEYS = 10_000
"""Keys whose order is kept, some 3 MB."""

L = TypeVar("L", bound=Load)


class Board:
    """Replicas in the order of their load.

    A heap has the loads as they were listed. A load that has grown is noticed when it comes first;
    a load that has shrunk is reported by lighten().
    """

    def __init__(self, loads: Iterable[Load]) -> None:
        self._turns = itertools.count()
        self._listed: dict[Load, tuple[int, int]] = {}  # the beginning of its entry
        self._heap: list[tuple[int, int, Load]] = []
        self._lighter: dict[Load, None] = {}
        self._guesses: list[tuple[float, int, Load]] = []
        self._due: dict[Load, float] = {}  # the one entry of _guesses that counts
        self._freed: list[Load] = []  # the latest, without the first ones
        self._first = 0  # the number of those
        for load in loads:
            load.board = self
            self._list(load)
            if (at := load.settles_at) is not None:
                self.guess(load, at)

    def lighten(self, load: Load) -> None:
        """The replica has less to do than before."""
        self._lighter[load] = None
        if len(self._freed) >= len(self._listed):
            self._first += len(self._freed)
            self._freed.clear()
        self._freed.append(load)

    def freed(self, since: int) -> tuple[int, list[Load] | None]:
        """The number of times that a replica got lighter, and the replicas that did after the time
        `since`. None for all: they were too many to be kept.
        """
        start = since - self._first
        return self._first + len(self._freed), self._freed[start:] if start >= 0 else None

    def guess(self, load: Load, at: float) -> None:
        """The replica will have less to do at this time."""
        if at < self._due.get(load, math.inf):
            self._due[load] = at
            heappush(self._guesses, (at, next(self._turns), load))

    def least(self, count: int, among: "Candidates[L]", now: float) -> list[Load]:
        """The candidates with the least load, at most `count`. Among about equal loads, those that
        had no turn for longest come first.
        """
        while self._guesses and self._guesses[0][0] <= now:
            at, _, load = heappop(self._guesses)
            if self._due.get(load) == at:
                del self._due[load]
                load.settle(now)
                if (following := load.settles_at) is not None:
                    self.guess(load, following)
        for load in self._lighter:
            if load in self._listed and _rank(load) < self._listed[load][0]:
                self._list(load)
        self._lighter.clear()
        found: list[Load] = []
        seen: list[Load] = []
        all_of_them = len(among) == len(self._listed)
        while self._heap and len(found) < count and len(seen) < LOOKED_AT:
            rank, turn, load = heappop(self._heap)
            if self._listed[load][1] != turn:
                continue  # it has a newer entry
            if _rank(load) > rank:
                self._list(load)
                continue
            seen.append(load)
            if all_of_them or among.named(load.name):
                found.append(load)
        for load in seen:
            self._list(load)
        if len(self._heap) > 2 * len(self._listed) + LOOKED_AT:
            self._heap = [(*entry, load) for load, entry in self._listed.items()]
            heapify(self._heap)
        return found

    def _list(self, load: Load) -> None:
        entry = self._listed[load] = _rank(load), next(self._turns)
        heappush(self._heap, (*entry, load))


def _rank(load: Load) -> int:
    return int(load.waiting // ALIKE)


class Homes:
    """The order of replicas for a key, by rendezvous hashing: so routers agree without talking, and
    a replica that comes or goes moves only its share of the keys.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._tops: dict[str, list[str]] = {}

    def order(self, key: str) -> Iterator[str]:
        """All replicas' names in the order of preference for this key."""
        if (top := self._tops.get(key)) is None:
            if len(self._tops) >= MOST_KEYS:
                self._tops.clear()
            top = self._tops[key] = nlargest(TOP, self._names, key=lambda it: _weight(key, it))
        yield from top
        if len(self._names) > TOP:
            ordered = sorted(self._names, key=lambda it: _weight(key, it), reverse=True)
            yield from ordered[TOP:]


def _weight(key: str, replica: str) -> bytes:
    # Not Python's hash: routers on other machines, and the next one here, are to agree.
    return hashlib.blake2b(f"{replica}\0{key}".encode(), digest_size=8).digest()


class Candidates(Sequence[L], Generic[L]):
    """The replicas that one kind of request can go to, kept while they stay the same."""

    def __init__(
        self, loads: Sequence[L], homes: Homes | None = None, board: Board | None = None
    ) -> None:
        """homes: of the fleet that these are of, or of others. board: the fleet's."""
        self._all = loads
        self._names = {it.name: it for it in loads}
        self._left: Sequence[L] | None = loads  # None if they are not listed yet
        self._without: frozenset[str] = frozenset()
        self._homes = homes or Homes([*self._names])
        self._board = board
        # those that may have room, of the fleet's board, as it was after so many changes
        self._roomy: dict[str, L] = {}
        self._looked = -1
        # the mean of requests under way, and for how many questions it is good
        self._mean, self._good_for = 0.0, 0

    @classmethod
    def of(cls, loads: Sequence[L]) -> "Candidates[L]":
        """The same."""
        return loads if isinstance(loads, Candidates) else cls(loads)

    def without(self, tried: Sequence[Load]) -> Self:
        """All but these."""
        if not tried or not (gone := {it.name for it in tried} & self._names.keys()):
            return self
        left = copy.copy(self)
        left._without, left._left = self._without | gone, None
        left._roomy, left._looked = {}, -1
        return left

    def __len__(self) -> int:
        return len(self._all) - len(self._without)

    def __iter__(self) -> Iterator[L]:
        return iter(self._listed)

    @overload
    def __getitem__(self, place: int) -> L: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[L]: ...
    def __getitem__(self, place: int | slice) -> L | Sequence[L]:
        return self._listed[place]

    @property
    def _listed(self) -> Sequence[L]:
        if self._left is None:
            self._left = [it for it in self._all if it.name not in self._without]
        return self._left

    def named(self, name: str) -> L | None:
        """The one of this name."""
        return None if name in self._without else self._names.get(name)

    def order(self, key: str) -> Iterator[L]:
        """Them in the order for a key, its home first."""
        for name in self._homes.order(key):
            if it := self.named(name):
                yield it

    def least(self, count: int, now: float) -> Iterator[L]:
        """So many with the least load, or about as little."""
        if self._board is None:
            self._board = Board(self._all)
        found = self._board.least(count, self, now)
        for load in found:
            if it := self.named(load.name):
                yield it
        if len(found) < count:  # they are few in their fleet
            start = random.randrange(len(self))
            some = [self[(start + n) % len(self)] for n in range(min(LOOKED_AT, len(self)))]
            yield from sorted(some, key=lambda it: it.waiting)[:count]

    def has_room(self, requests: int) -> bool:
        """Whether they can take this number of requests more.

        In a large fleet, only replicas are looked at that had room, or have become lighter since.
        """
        if self._board is None:
            return sum([it.room for it in self]) >= requests
        self._looked, freed = self._board.freed(self._looked)
        if freed is None:
            self._roomy = {it.name: it for it in self}
        else:
            self._roomy |= {it.name: own for it in freed if (own := self.named(it.name))}
        found: float = 0
        full = []
        for name, it in self._roomy.items():
            if not it.room:
                full.append(name)
            found += it.room
            if found >= requests:
                break
        for name in full:
            del self._roomy[name]
        return found >= requests

    @property
    def in_flight(self) -> float:
        """The mean number of requests in flight at each, as of a few choices ago."""
        if self._good_for == 0:
            self._mean = sum([it.in_flight for it in self]) / len(self)
            self._good_for = (len(self) - 1) // EXACT
        else:
            self._good_for -= 1
        return self._mean
