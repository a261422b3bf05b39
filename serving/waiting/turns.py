# SPDX-License-Identifier: Apache-2.0
"""The order of waiting items: bands one after the other, and within a band lanes in turn."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Lane(Generic[T]):
    """credit: total cost of its next items before the other lanes get their turn."""

    __slots__ = ("credit", "items")

    def __init__(self) -> None:
        self.credit = 0
        self.items: dict[T, int] = {}  # with their costs, the first to come first


class Turns(Generic[T]):
    """Deficit round robin (Shreedhar and Varghese, 1996) over the lanes of the first band that has
    any item that may go. In a lane the first comes first.

    There is no quantum to choose: each lane gets as much credit as the lane that lacks the least
    needs. If all costs are equal, lanes simply take turns. A lane that is empty keeps no credit.
    """

    def __init__(self) -> None:
        self._bands: dict[int, dict[str, _Lane[T]]] = {}  # no lane is empty
        self._places: dict[T, tuple[int, str]] = {}
        self._lengths = Counter[int]()  # by band

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        """All items, in the order of their arrival."""
        return iter(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def length(self, band: int = 0) -> int:
        """The number of items in a band."""
        return self._lengths.get(band, 0)

    def lengths(self, band: int = 0) -> dict[str, int]:
        """The number of items in each lane of a band."""
        return {name: len(lane.items) for name, lane in self._bands.get(band, {}).items()}

    def add(self, item: T, lane: str, cost: int = 1, band: int = 0) -> None:
        """Put an item at the end of a lane. band: the lowest goes first. cost: at least 1."""
        self._places[item] = band, lane
        self._lengths[band] += 1
        self._bands.setdefault(band, {}).setdefault(lane, _Lane()).items[item] = max(cost, 1)

    def remove(self, item: T) -> None:
        """Take an item out, if it is there."""
        if place := self._places.pop(item, None):
            band, name = place
            self._lengths[band] -= 1
            lanes = self._bands[band]
            del lanes[name].items[item]
            if not lanes[name].items:
                del lanes[name]
            if not lanes:
                del self._bands[band], self._lengths[band]

    def next(self, may: Callable[[T], bool]) -> T | None:
        """Remove the item whose turn it is, among those that may go."""
        for band in sorted(self._bands):
            if (item := self._turn(self._bands[band], may)) is not None:
                self.remove(item)
                return item
        return None

    def _turn(self, lanes: dict[str, _Lane[T]], may: Callable[[T], bool]) -> T | None:
        lacking: list[tuple[int, str, T]] = []
        for name, lane in lanes.items():
            item = next((it for it in lane.items if may(it)), None)
            if item is None:
                continue
            lack = lane.items[item] - lane.credit
            if lack <= 0:
                break
            lacking.append((lack, name, item))
        else:
            if not lacking:
                return None
            least, name, item = min(lacking, key=lambda it: it[0])  # of equals the first
            for _, other, _ in lacking:
                lanes[other].credit += least
        lane = lanes.pop(name)
        lane.credit -= lane.items[item]
        lanes[name] = lane  # at the end of the rotation
        return item

    def last(self, lane: str, band: int) -> T | None:
        """The item that makes room for one more of this lane and band: the newest of the longest
        lane in the last band, so that no lane keeps the others out. None if that is the new one.
        """
        if not self._bands:
            return None
        last = max(self._bands)
        lanes = self._bands[last]
        longest = max(lanes.values(), key=lambda it: len(it.items))
        own = len(lanes[lane].items) if lane in lanes else 0
        if band > last or (band == last and len(longest.items) <= own + 1):
            return None
        return next(reversed(longest.items))
