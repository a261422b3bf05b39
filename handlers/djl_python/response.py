# SPDX-License-Identifier: Apache-2.0
"""The argument of an output formatter: the engine's whole answer."""

from collections.abc import Collection, Mapping
from typing import Any

from .outputs import dumped

_OF_ROLLING_BATCH = ("sequences", "best_sequence_index", "prompt_tokens_details", "finished")
_ROLLING = (
    "; LMI's rolling batch has it, and this is vLLM's answer in OpenAI's shape: its texts are in "
    "choices"
)


class Response(dict[str, Any]):
    """An answer in OpenAI's shape, read and written as vLLM's objects are, or as a dict.

    Attributes are the dict's items, on every level, so attributes that are set are also sent. If a
    name is also a method of dict (items, keys, get, copy …), reading the attribute gives the
    method, which serialisation needs. Setting it sets the item, which answer["items"] reads.
    """

    def __init__(self, answer: Mapping[str, Any] | None = None) -> None:
        super().__init__((name, _built(value)) for name, value in (answer or {}).items())

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            hint = _ROLLING if name in _OF_ROLLING_BATCH else ""
            raise AttributeError(
                f"the answer has no {name!r} here{hint}", name=name, obj=self
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"the answer has no {name!r} here", name=name, obj=self)
        del self[name]

    def copy(self) -> "Response":
        """A shallow copy: deeper levels are shared."""
        copy = Response()
        copy.update(self)
        return copy

    def model_dump(
        self,
        *,
        mode: str = "json",
        exclude: Collection[str] = (),
        exclude_none: bool = False,
        exclude_unset: bool = False,
        exclude_defaults: bool = False,
        by_alias: bool = False,
    ) -> dict[str, Any]:
        """A plain dict. exclude: names on this level, exclude_none: on all.

        The others are pydantic's and do nothing: an answer has only what the engine sent.
        """
        kept = {name: value for name, value in self.items() if name not in exclude}
        plain: dict[str, Any] = _plain(kept, exclude_none)
        return plain

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        """The result of model_dump as JSON. Raises TypeError or ValueError for values that JSON
        cannot represent.
        """
        return dumped(self.model_dump(**options), indent)


def _built(value: Any) -> Any:
    if isinstance(value, dict):
        return Response(value)
    if isinstance(value, list):
        return [_built(item) for item in value]
    return value


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, dict):
        return {
            name: _plain(item, exclude_none)
            for name, item in value.items()
            if not (exclude_none and item is None)
        }
    if isinstance(value, list):
        return [_plain(item, exclude_none) for item in value]
    return value
