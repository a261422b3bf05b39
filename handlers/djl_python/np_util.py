# SPDX-License-Identifier: Apache-2.0
"""Lists of arrays in bytes: NumPy's own files, and DJL's NDList.

An NDList is a count, then each array. An array begins with the text NDAR, a version, and a byte
that is set if a name follows. Then come the name, the names of storage and type, the shape, and a
layout letter for each dimension. A byte for the byte order, the length of the data, and the data
follow. Numbers are big-endian; lengths of texts have 2 bytes, extents 8, all others 4.
"""

import io
import zipfile
from typing import Any

from . import absent

__getattr__ = absent.looked_up("np_util")

_MAGIC = "NDAR"
_VERSION = 3
_MOST_DIMENSIONS = 32


def from_nd_list(encoded: bytes) -> list[Any]:
    """Return the arrays of an NDList, an .npz or an .npy file. Raises ValueError for other data."""
    import numpy as np

    stream = io.BytesIO(encoded)
    try:
        if encoded.startswith(b"PK"):
            with np.load(stream) as archive:
                return [archive[name] for name in archive.files]
        if encoded.startswith(b"\x93NUMPY"):
            return [np.load(stream)]
        return [_array(stream) for _ in range(_number(stream))]
    except (TypeError, zipfile.BadZipFile) as error:  # an unknown type, a broken .npz
        raise ValueError(str(error)) from None


def _array(stream: io.BytesIO) -> Any:
    import numpy as np

    if _text(stream) != _MAGIC or _number(stream) != _VERSION:
        raise ValueError(f"the body should be an NDList of version {_VERSION}")
    if stream.read(1) == b"\1":
        _text(stream)  # its name
    _text(stream)  # its storage
    kind = _text(stream).lower().replace("boolean", "bool")
    dimensions = _number(stream)
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(
            f"an array has {dimensions} dimensions; it may have at most {_MOST_DIMENSIONS}"
        )
    shape = [_number(stream, 8) for _ in range(dimensions)]
    stream.read(2 * _number(stream))  # its layout
    order: Any = stream.read(1).decode()
    data = stream.read(_number(stream))
    return np.frombuffer(data, np.dtype(kind).newbyteorder(order)).reshape(shape)


def _number(stream: io.BytesIO, size: int = 4) -> int:
    return int.from_bytes(stream.read(size), "big")


def _text(stream: io.BytesIO) -> str:
    return stream.read(_number(stream, 2)).decode()


def to_nd_list(np_list: Any) -> bytes:
    """Return an NDList of one or several arrays."""
    import numpy as np

    arrays = np_list if isinstance(np_list, list | tuple) else [np_list]
    parts = [_packed(len(arrays))]
    for array in map(np.asarray, arrays):
        kind = array.dtype.name.upper().replace("BOOL", "BOOLEAN")
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        parts += [_packed_text(_MAGIC), _packed(_VERSION), b"\0", _packed_text("default")]
        parts += [_packed_text(kind), _packed(array.ndim)]
        parts += [_packed(extent, 8) for extent in array.shape]
        parts += [_packed(array.ndim), "?".encode("utf-16-be") * array.ndim]
        parts += [b"<", _packed(len(data)), data]
    return b"".join(parts)


def _packed(number: int, size: int = 4) -> bytes:
    return number.to_bytes(size, "big")


def _packed_text(text: str) -> bytes:
    return _packed(len(text), 2) + text.encode()
