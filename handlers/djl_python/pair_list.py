# SPDX-License-Identifier: Apache-2.0
"""The containers of a request's or an answer's content and properties."""

from collections.abc import Iterable, Mapping
from typing import Any


class PairList:
    """Values with their keys, in order. A key may be None, and may come twice."""

    def __init__(
        self,
        keys: list[str | None] | None = None,
        values: list[Any] | None = None,
        pair_list: Iterable[tuple[str | None, Any]] | None = None,
        pair_map: Mapping[str | None, Any] | None = None,
    ) -> None:
        """Built from keys and values of equal number, or from pairs, or from a dict.

        Raises ValueError if the numbers of keys and values differ.
        """
        self.keys: list[str | None] = []
        self.values: list[Any] = []
        if keys and values:
            if len(keys) != len(values):
                raise ValueError(
                    f"{len(keys)} keys and {len(values)} values; there should be as many of each"
                )
            self.keys, self.values = keys, values
        elif pair_list or pair_map:
            for key, value in pair_list or (pair_map or {}).items():
                self.add(key, value)

    def add(
        self,
        key: str | None = None,
        value: Any = None,
        index: int | None = None,
        pair: tuple[str | None, Any] | None = None,
    ) -> None:
        """Add a value, at the end or before the one at an index, or else a pair. None is no value,
        and is not added.
        """
        if value is None and pair:
            key, value = pair
        if value is not None:
            at = len(self.keys) if index is None else index
            self.keys.insert(at, key)
            self.values.insert(at, value)

    def add_all(self, other: "PairList | None") -> None:
        if other:
            self.keys.extend(other.keys)
            self.values.extend(other.values)

    def get(self, key: str | None) -> Any:
        """The first value of this key, or None."""
        return self.values[self.keys.index(key)] if key in self.keys else None

    def key_at(self, index: int) -> str | None:
        return self.keys[index]

    def value_at(self, index: int) -> Any:
        return self.values[index]

    def get_keys(self) -> list[str | None]:
        return self.keys

    def get_values(self) -> list[Any]:
        return self.values

    def size(self) -> int:
        return len(self.keys)

    def is_empty(self) -> bool:
        return not self.keys


class Properties(dict[str, str]):
    """Properties by case-insensitive name, also headers.

    get, `in`, reading and setting an item ignore the case; a name keeps its first spelling.
    """

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(self._spelled(name))

    def __setitem__(self, name: str, value: str) -> None:
        super().__setitem__(self._spelled(name), value)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(self._spelled(name))

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(self._spelled(name), default)

    def _spelled(self, name: str) -> str:
        lower = name.lower()
        return next((key for key in self if key.lower() == lower), name)
