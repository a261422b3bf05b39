# SPDX-License-Identifier: Apache-2.0
"""A model's files, and hosts that do not answer, for all tests of sources."""

import contextlib
import socket
from pathlib import Path

WEIGHTS = bytes(range(256)) * 1000
MODEL = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS, "empty.txt": b""}
NOT_NEEDED = {".gitattributes": b"a", "pytorch_model.bin": b"b", "original/weights.pth": b"c"}


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def ignore(note: str) -> None:
    pass


@contextlib.contextmanager
def silent():
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def closed():
    """An address without a listener."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"
