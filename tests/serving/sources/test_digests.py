# SPDX-License-Identifier: Apache-2.0
"""Digests: the changes that they notice, and the files that they do not read twice."""

import hashlib
import os
from pathlib import Path

import pytest

from serving.sources import digests
from serving.sources.digests import Digests, of_model

SIZE = 40 * 2**20


def model(folder: Path, *changed: int, header=b"{}") -> Path:
    """A model of zeros, except for bytes at these places of its data."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + SIZE)
        for place in changed:
            file.seek(8 + len(header) + place)
            file.write(b"x")
    return folder


@pytest.mark.parametrize("limit", [SIZE // 2, None])
def test_samples_and_headers_of_large_files_are_read(tmp_path, monkeypatch, limit):
    if limit:
        monkeypatch.setattr(digests, "WHOLE", limit)
    whole = limit is not None

    def digest(folder: Path) -> str:
        return of_model({"a": folder / "model.safetensors"}, whole=whole)

    first = digest(model(tmp_path / "a"))
    assert digest(model(tmp_path / "b", 17 * 2**20 - 100)) != first  # in the second sample
    assert digest(model(tmp_path / "c", 8 * 2**20)) == first  # between two
    long = b"{" + b" " * 2**21 + b"}"
    other = long[:-2] + b"\n}"
    assert digest(model(tmp_path / "d", header=long)) != digest(model(tmp_path / "e", header=other))


def test_what_has_not_changed_is_not_read_again(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**12))  # as if it were written long ago
    known = Digests()
    first = known.of(path)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert known.of(path) == first
    monkeypatch.undo()
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(b"two")
    os.utime(path, ns=times)
    assert known.of(path) != first
