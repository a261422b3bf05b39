# SPDX-License-Identifier: Apache-2.0
"""The argument of a custom handler: one request."""

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from . import absent, np_util
from .pair_list import PairList, Properties

__getattr__ = absent.looked_up("inputs")


class Input:
    """A request: its properties (its headers and the model's options) and its body.

    key in its methods: the name of a part of the content. Ours has one part, "data".
    """

    def __init__(
        self, properties: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> None:
        """body: None or empty for a request without content."""
        self.properties = Properties(properties or {})
        self.content = PairList()
        self.function_name: str | None = None
        if body:
            self.content.add("data", body)

    def __str__(self) -> str:
        """Return its properties and its content. They are a request's, so never log them."""
        contents = [f"{key}: {self.get_data(key)}" for key in self.content.get_keys()]
        return "\n".join([f"properties: {dict(self.properties)}", *contents])

    def get_batches(self) -> list["Input"]:
        """Return the requests in this one: only itself, because the engine batches requests."""
        return [self]

    def is_batch(self) -> bool:
        return False

    def get_batch_size(self) -> int:
        return 1

    def get_function_name(self) -> str | None:
        """The name of the function that the request is for: `handle`."""
        return self.function_name

    def get_properties(self) -> dict[str, str]:
        return self.properties

    def get_property(self, key: str, default: Any = None) -> Any:
        """The property of this name, in any case, or the default."""
        return self.properties.get(key, default)

    def contains_property(self, key: str) -> bool:
        return key in self.properties

    def get_content(self) -> PairList:
        return self.content

    def contains_key(self, key: str) -> bool:
        return self.content.get(key) is not None

    def is_empty(self) -> bool:
        return self.content.is_empty()

    def get_data(self, key: str | None = None) -> Any:
        """The content, decoded by its Content-Type; None if there is none."""
        if self.is_empty():
            return None
        content_type = self.get_property("Content-Type", "")
        for start, read in (
            ("tensor/ndlist", self.get_as_numpy),
            ("tensor/npz", self.get_as_npz),
            ("application/json", self.get_as_json),
            ("text/", self.get_as_string),
            ("image/", self.get_as_image),
        ):
            if content_type.startswith(start):
                return read(key)
        return self.get_as_bytes(key)

    def get_as_bytes(self, key: str | None = None) -> Any:
        """The content, or None. Raises KeyError when it has no such part."""
        if self.is_empty():
            return None
        if key and not self.contains_key(key):
            raise KeyError(f"the request has no content of the name {key}")
        return self.content.get(key or "data") or self.content.value_at(0)

    def get_as_string(self, key: str | None = None) -> str:
        """Raises UnicodeDecodeError, a ValueError, when the content is not UTF-8."""
        return self._bytes(key).decode()

    def get_as_json(self, key: str | None = None) -> Any:
        """Raises ValueError when the content is not JSON."""
        return json.loads(self._bytes(key))

    def get_as_csv(self, key: str | None = None) -> list[dict[str, str]]:
        """The rows by the names in the first line."""
        return list(csv.DictReader(io.StringIO(self.get_as_string(key))))

    def get_as_image(self, key: str | None = None) -> Any:
        """A PIL.Image. Raises PIL.UnidentifiedImageError, an OSError, when it is not one."""
        from PIL import Image

        return Image.open(io.BytesIO(self._bytes(key)))

    def get_as_numpy(self, key: str | None = None) -> list[Any]:
        """The arrays. Raises ValueError when the content has none."""
        return np_util.from_nd_list(self._bytes(key))

    def get_as_npz(self, key: str | None = None) -> list[Any]:
        """The arrays of an .npz file. Raises ValueError when the content is not one."""
        return np_util.from_nd_list(self._bytes(key))

    def read(self, conn: Any) -> None:
        """Raises NotImplementedError: there is no such connection here."""
        raise NotImplementedError("Input.read: what LMI's server sends is not sent here")

    def _bytes(self, key: str | None) -> bytes:
        return self.get_as_bytes(key) or b""
