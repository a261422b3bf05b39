# SPDX-License-Identifier: Apache-2.0
"""The containers of a request's or an answer's content and properties."""

from typing import Any


class PairList:
    """Values with their keys, in order. A key may be None, and may come twice."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.values: list[Any] = []

    def add(self, key: str | None = None, value: Any = None) -> None:
        self.keys.append(key)
        self.values.append(value)

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
    """Properties by name, in any case: headers are among them.

    get, `in`, reading and setting an item go by it; a name keeps the spelling it came with first.
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
