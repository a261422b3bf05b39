# SPDX-License-Identifier: Apache-2.0
"""Decodes a request's body by its Content-Type, and encodes an answer's by the client's Accept."""

import contextlib
import csv
import io
from collections.abc import Iterable
from typing import Any

from .inputs import Input
from .outputs import Output

_CSV_HEADERS = ("question", "context", "inputs")


def decode(
    inputs: Input,
    content_type: str | None,
    key: str | None = None,
    require_csv_headers: bool = True,
) -> Any:
    """Return the decoded content of a request. Raises ValueError if its body does not have the
    type content_type.

    JSON may be any value, and a CSV without headers is an array. All other content is
    {"inputs": …}.
    """
    if not content_type:
        return _guessed(inputs, key)
    if "application/json" in content_type:
        return inputs.get_as_json(key)
    if "text/csv" in content_type:
        return decode_csv(inputs, require_csv_headers, key)
    if "text/plain" in content_type:
        return {"inputs": [inputs.get_as_string(key)]}
    if content_type.startswith("image/"):
        return {"inputs": inputs.get_as_image(key)}
    if "tensor/npz" in content_type:
        return {"inputs": inputs.get_as_npz(key)}
    if content_type.startswith(("tensor/ndlist", "application/x-npy")):
        return {"inputs": inputs.get_as_numpy(key)}
    if "application/x-www-form-urlencoded" in content_type:
        return {"inputs": inputs.get_as_string(key)}
    return {"inputs": inputs.get_as_bytes(key)}  # audio among them


def _guessed(inputs: Input, key: str | None) -> Any:
    with contextlib.suppress(ValueError):
        return inputs.get_as_json(key)
    with contextlib.suppress(UnicodeDecodeError):
        return {"inputs": inputs.get_as_string(key)}
    return {"inputs": inputs.get_as_bytes(key)}


def decode_csv(inputs: Input, require_headers: bool = True, key: str | None = None) -> Any:
    """Return the column `inputs`, or the rows; without headers an array of numbers.

    Raises ValueError if no header names the key, and for a value that is not a number.
    """
    text = inputs.get_as_string(key)
    if not require_headers:
        return _numbers(text)
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or not rows[0].keys() & set(_CSV_HEADERS):
        raise ValueError(
            f"the CSV needs a header with one of {', '.join(_CSV_HEADERS)}, and a row below it"
        )
    return {"inputs": [row["inputs"] for row in rows] if "inputs" in rows[0] else rows}


def _numbers(text: str) -> Any:
    import numpy as np

    numbers = np.genfromtxt(io.StringIO(text), delimiter=",")
    if np.isnan(numbers).any():
        raise ValueError("every value of the CSV should be a number")
    return numbers


def encode(
    outputs: Output, prediction: Any, content_type: str | None, key: str | None = None
) -> None:
    """Add a prediction to outputs, in content_type, or in JSON if that type cannot be written."""
    content_type = content_type or ""
    if "application/json" in content_type:
        _add_json(outputs, prediction, key)
    elif "text/csv" in content_type:
        outputs.add(encode_csv(prediction), key)
        outputs.add_property("Content-Type", "text/csv")
    elif "tensor/npz" in content_type:
        outputs.add_as_npz(prediction, key)
        outputs.add_property("Content-Type", "tensor/npz")
    elif content_type.startswith(("tensor/", "application/x-npy", "application/octet-stream")):
        outputs.add_as_numpy(prediction, key)
        outputs.add_property("Content-Type", "tensor/ndlist")
    else:
        _add_json(outputs, prediction, key)


def _add_json(outputs: Output, prediction: Any, key: str | None) -> None:
    outputs.add_as_json(prediction, key)
    outputs.add_property("Content-Type", "application/json")


def encode_csv(content: Iterable[dict[str, Any]]) -> str:
    """Rows in CSV, with the first one's keys as the header."""
    rows = list(content)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, rows[0] if rows else ())
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
