# SPDX-License-Identifier: Apache-2.0
"""What a custom handler returns: an answer, or a piece of one that is streamed."""

import datetime
import io
import json
from typing import Any, Self

from . import np_util
from .pair_list import PairList, Properties


class Output:
    """An answer. The server reads code, properties (the headers), body and last.

    last: whether nothing follows this piece of a stream.
    """

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties = Properties()
        self.content = PairList()
        self.last = False

    @property
    def body(self) -> bytes:
        """The content of the name "data", or the first, as LMI sends it."""
        if self.content.is_empty():
            return b""
        body: bytes = self.content.get("data") or self.content.value_at(0)
        return body

    def set_code(self, code: int) -> Self:
        self.code = code
        return self

    def set_message(self, message: str) -> Self:
        self.message = message
        return self

    def add_property(self, key: str, val: Any) -> Self:
        """Set a header of the answer."""
        self.properties[key] = str(val)
        return self

    def error(self, error: str, code: int = 424, message: str = "prediction failure") -> Self:
        """Make this the answer to a request that failed. code: the HTTP status."""
        self.code = code
        self.message = message
        self.content = PairList()  # what was added before it failed
        self.add_property("Content-Type", "application/json")
        return self.add_as_json({"code": code, "message": message, "error": error})

    def add(self, value: Any, key: str | None = None, batch_index: int | None = None) -> Self:
        """Add text or bytes as they are, anything else as JSON.

        batch_index: of no meaning here; an Input is one request.
        """
        self.content.add(key, encoded(value))
        return self

    def add_as_json(self, val: Any, key: str | None = None, batch_index: int | None = None) -> Self:
        """Raises TypeError or ValueError when it cannot be JSON."""
        return self.add(dumped(val), key)

    def add_as_numpy(
        self, np_list: Any, key: str | None = None, batch_index: int | None = None
    ) -> Self:
        return self.add(np_util.to_nd_list(np_list), key)

    def add_as_npz(
        self, np_list: Any, key: str | None = None, batch_index: int | None = None
    ) -> Self:
        import numpy as np

        file = io.BytesIO()
        np.savez(file, *np_list)
        return self.add(file.getvalue(), key)


def encoded(value: Any) -> bytes:
    """Text and bytes as they are, anything else as JSON."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if hasattr(value, "model_dump_json"):
        value = value.model_dump_json()
    return (value if isinstance(value, str) else dumped(value)).encode()


def dumped(value: Any, indent: int | None = None) -> str:
    """A value in JSON. Raises TypeError or ValueError when it has no place there."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy's and PyTorch's arrays and numbers
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")
