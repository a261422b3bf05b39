# SPDX-License-Identifier: Apache-2.0
"""vLLM's models of requests. Equal parameters are read once, as most clients change only the
prompt.
"""

import copy
import enum
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter
from vllm.utils import random_uuid

from serving.engine.texts.prompts import SHORT, TextParams

REMEMBERED = 256
"""Most sets of parameters that are remembered."""


class Known:
    """The results for equal parameters. model: vLLM's of them, without a prompt. text: those of a
    text, once is_compared; None if vLLM makes another prompt of it (Generation).
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.is_compared = False
        self.text: TextParams | None = None
        self._most: int | None = None
        self._sampling: Any = None
        self._changeable: list[str] = []

    def sampling(self, most: int, make: Callable[[], Any]) -> Any:
        """Return vLLM's parameters of sampling, which a request may change. most: of tokens. make:
        makes them for the first request with as many.
        """
        if most != self._most:
            self._most, self._sampling = most, make()
            self._changeable = _changeable(self._sampling)
        found = copy.copy(self._sampling)
        for name in self._changeable:
            setattr(found, name, copy.copy(getattr(found, name)))
        return found


class RequestModels:
    """Makes vLLM's models of the requests of a path.

    kind: vLLM's model of a request. key: of the prompt. is_plain: whether the model has a prompt as
    it came, whatever the parameters are.
    """

    def __init__(self, kind: Any, key: str, is_plain: Callable[[Any], bool]) -> None:
        self._validate = TypeAdapter(kind).validate_python
        self.key = key
        self._is_plain = is_plain
        self._known: dict[str, Known] = {}
        """By the parameters as a text."""

    def of(self, values: dict[str, Any], size: int) -> tuple[Any, Known | None]:
        """Return vLLM's model of a request, and the results for its parameters if they are known.
        size: the bytes of the request as it came. Raises vLLM's errors.
        """
        prompt = values.get(self.key)
        parameters = {name: it for name, it in values.items() if name != self.key}
        if not (
            size <= SHORT
            and "request_id" not in parameters  # each request has its own
            and all(map(_is_fixed, parameters.values()))
            and self._is_plain(prompt)
        ):
            return self._validate(values, from_attributes=True), None  # as FastAPI does
        name = repr(parameters)  # in JSON, infinity and null would be equal
        if known := self._known.get(name):
            own = {self.key: prompt, "request_id": random_uuid()}
            return known.model.model_copy(update=own), known
        found = self._validate(values, from_attributes=True)
        if len(self._known) == REMEMBERED:
            self._known.clear()
        self._known[name] = Known(found.model_copy(update={self.key: None}))
        return found, None


def is_text(value: Any) -> bool:
    """Whether it is a text that is not empty, without half of a surrogate pair."""
    try:
        return bool(value.encode())
    except (AttributeError, UnicodeEncodeError):
        return False


def are_texts(messages: Any) -> bool:
    """Whether it is a list of messages that only have a usual role and a text."""
    return isinstance(messages, list) and all(
        isinstance(it, dict)
        and it.keys() == {"role", "content"}
        and it["role"] in ("system", "user", "assistant")
        and is_text(it["content"])
        for it in messages
    )


def _changeable(params: Any) -> list[str]:
    """The fields whose values can be changed."""
    fields = {it: getattr(params, it) for it in params.__struct_fields__}
    return [it for it, value in fields.items() if not _is_fixed(value)]


def _is_fixed(value: Any) -> bool:
    """Whether it cannot be changed, so that requests can share it."""
    return value is None or isinstance(value, str | int | float | enum.Enum)
