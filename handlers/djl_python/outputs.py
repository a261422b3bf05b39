# SPDX-License-Identifier: Apache-2.0
"""The result of a custom handler: an answer, or a chunk of a stream."""

import datetime
import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from . import np_util
from .pair_list import PairList, Properties

FAILED = 424
"""LMI's status for any failure in Python."""


class Encoded(bytearray):
    """The result of Output.binary_encode(), which has further fields beside the content.

    fields: by LMI's names: data, last, code and error.
    """

    def __init__(self, fields: Mapping[str, Any], encoded: bytes | bytearray) -> None:
        super().__init__(encoded)
        self.fields = {name: None if it is None else str(it) for name, it in fields.items()}


def in_json_lines(token_texts: Any) -> str:
    """Return a step of a stream in LMI's default format."""
    return json.dumps({"outputs": token_texts}) + "\n"


class Output:
    """An answer. The server reads code, properties (the headers), body, last, and stream_content.

    last: whether this is the last piece of a stream.
    """

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties = Properties()
        self.content = PairList()
        self.last = False
        self.stream_content: Iterator[Any] | None = None
        self.stream_output_formatter: Callable[[Any], Any] | None = None
        self.finalize_function: Callable[..., Any] | None = None
        self.finalize_args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        keys, values = self.content.get_keys(), self.content.get_values()
        kinds = {key: type(value).__name__ for key, value in zip(keys, values, strict=True)}
        told = {"code": self.code, "message": self.message}
        return json.dumps(told | {"properties": self.properties, "content": kinds}, indent=2)

    @property
    def body(self) -> bytes:
        """The content with the name "data", or the first content, as in LMI."""
        if self.content.is_empty():
            return b""
        body: bytes = self.content.get("data") or self.content.value_at(0)
        return body

    def get_properties(self) -> dict[str, str]:
        return self.properties

    def get_property(self, key: str) -> Any:
        """The header of this name, in any case, or None."""
        return self.properties.get(key)

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

    def error(
        self, error: str, code: int = FAILED, message: str = "invoke handler failure"
    ) -> Self:
        """Make this the answer to a request that failed. code: the HTTP status."""
        self.code = code
        self.message = message
        self.content = PairList()  # drops content that was added before the failure
        self.add_property("Content-Type", "application/json")
        return self.add_as_json({"code": code, "message": message, "error": error})

    def add(self, value: Any, key: str | None = None, batch_index: int | None = None) -> Self:
        """Add text or bytes as they are, anything else as JSON.

        batch_index: of no meaning here; an Input is one request.
        """
        if isinstance(value, Encoded):
            value = self._told(value.fields)
        self.content.add(key, encoded(value))
        return self

    def add_stream_content(
        self,
        stream_content: Iterator[Any],
        output_formatter: Callable[[Any], Any] | None = in_json_lines,
    ) -> Self:
        """Stream the items of an iterator as the answer. output_formatter formats each item; None
        leaves them unchanged.
        """
        self.stream_content = iter(stream_content)
        self.stream_output_formatter = output_formatter
        return self

    def finalize(self, finalize_function: Callable[..., Any], *args: Any) -> Self:
        """Set a function that is called after the answer has been sent."""
        self.finalize_function, self.finalize_args = finalize_function, args
        return self

    def execute_finalize(self) -> Any:
        if self.finalize_function:
            return self.finalize_function(*self.finalize_args)
        return None

    @staticmethod
    def binary_encode(data: Mapping[str, Any]) -> Encoded:
        """Encode an answer, or a piece of one, for add(): its data, whether it is the last, its
        code and its error. The bytes are a count of 2 bytes, then keys and values, each preceded by
        its length in 4 bytes, big-endian.
        """
        message = bytearray(len(data).to_bytes(2, "big"))
        for name, value in data.items():
            Output.write_utf8(message, name)
            Output.write_utf8(message, str(value))
        return Encoded(data, message)

    @staticmethod
    def write_utf8(msg: bytearray, val: str | None) -> None:
        """Append a text, with its length before it. None has the length -1."""
        text = b"" if val is None else val.encode()
        length = -1 if val is None else len(text)
        msg += length.to_bytes(4, "big", signed=True) + text

    def send(self, cl_socket: Any) -> None:
        """Raises NotImplementedError: there is no such connection here."""
        raise NotImplementedError("Output.send: the server sends what handle returns")

    def _told(self, fields: Mapping[str, str | None]) -> str:
        """Apply the fields of binary_encode(). Returns the content."""
        self.last = (fields.get("last") or "").lower() == "true"
        error = fields.get("error")
        if code := fields.get("code"):
            self.code = int(code)
        elif error:
            self.code = FAILED
        data = fields.get("data") or ""
        if error and not data.strip():
            return dumped({"code": self.code, "error": error}) + "\n"
        return data

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
    """Return text and bytes unchanged, and other values as JSON."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if hasattr(value, "model_dump_json"):
        value = value.model_dump_json()
    return (value if isinstance(value, str) else dumped(value)).encode()


def dumped(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON. Raises TypeError or ValueError if JSON cannot represent it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy's and PyTorch's arrays and numbers
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")
