# SPDX-License-Identifier: Apache-2.0
"""vLLM's models of requests. The parameters of equal requests are read once.

Reading takes a tenth of a short request's CPU time, and most clients change only the prompt.
"""

from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter
from vllm.utils import random_uuid

from serving.engine.texts.prompts import SHORT

REMEMBERED = 256
"""Most sets of parameters that are remembered."""


class RequestModels:
    """Makes vLLM's models of the requests of a path.

    kind: vLLM's model of a request. key: the prompt's. is_plain: whether the model has a prompt as
    it came, whatever the parameters are.
    """

    def __init__(self, kind: Any, key: str, is_plain: Callable[[Any], bool]) -> None:
        self._validate = TypeAdapter(kind).validate_python
        self._key = key
        self._is_plain = is_plain
        self._known: dict[str, Any] = {}
        """Parameters, as a text → vLLM's model of them, without a prompt."""

    def of(self, values: dict[str, Any], size: int) -> Any:
        """Return vLLM's model of a request. size: the bytes of the request as it came. Raises
        vLLM's errors.
        """
        prompt = values.get(self._key)
        parameters = {name: it for name, it in values.items() if name != self._key}
        if not (
            size <= SHORT
            and "request_id" not in parameters  # each request has its own
            and all(map(_is_fixed, parameters.values()))
            and self._is_plain(prompt)
        ):
            return self._validate(values, from_attributes=True)  # as FastAPI does
        name = repr(parameters)  # in JSON, infinity and null would be equal
        if not (known := self._known.get(name)):
            if len(self._known) == REMEMBERED:
                self._known.clear()
            found = self._validate(values, from_attributes=True)
            known = self._known[name] = found.model_copy(update={self._key: None})
        return known.model_copy(update={self._key: prompt, "request_id": random_uuid()})


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


def _is_fixed(value: Any) -> bool:
    """Whether it cannot be changed, so that requests can share it."""
    return value is None or isinstance(value, str | int | float)
