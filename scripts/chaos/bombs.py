# SPDX-License-Identifier: Apache-2.0
"""Files that harm who unpacks or decodes them without a limit."""

import functools
import gzip
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def png(side: int) -> bytes:
    """A black square: some bytes for each thousand pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    rows = zlib.compress(bytes((side + 7) // 8 + 1) * side, 9)
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", rows), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bombs(folder: Path) -> list[Path]:
    """Archives that no server should unpack."""
    folder.mkdir()
    found = []
    for name, data in _archives():
        path = folder / f"{name}.tar.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            for piece in data:
                file.write(piece)
        found.append(path)
    return found


def _archives() -> Iterator[tuple[str, Iterator[bytes]]]:
    mib = bytes(1 << 20)

    def header(name: str, size: int, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
        found = tarfile.TarInfo(name)
        found.size, found.type, found.linkname = max(size, 0), kind, link
        block = bytearray(found.tobuf(tarfile.GNU_FORMAT))
        if size < 0:  # in base 256, as GNU tar has large ones
            block[124:136] = b"\xff" + size.to_bytes(11, "big", signed=True)
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
        return bytes(block)

    def large_pax() -> Iterator[bytes]:
        yield header("pax", 300 << 20, tarfile.XHDTYPE)
        yield from (mib for _ in range(300))

    def large_file() -> Iterator[bytes]:
        yield header("adapter_model.safetensors", 400 << 20)
        yield from (mib for _ in range(400))

    def negative() -> Iterator[bytes]:
        yield header("folder", -(1 << 30), tarfile.DIRTYPE)
        yield from large_file()

    def links() -> Iterator[bytes]:
        yield header("adapter_config.json", 0, tarfile.SYMTYPE, "/etc/passwd")

    def members() -> Iterator[bytes]:
        for n in range(20_000):
            yield header(f"{n}", 0)

    def paths() -> Iterator[bytes]:
        yield header("../../../../tmp/hostile-was-here", 512)
        yield bytes(512)

    yield "pax", large_pax()
    yield "large", large_file()
    yield "negative", negative()
    yield "links", links()
    yield "members", members()
    yield "paths", paths()
    yield "broken", iter([b"no archive at all"])
