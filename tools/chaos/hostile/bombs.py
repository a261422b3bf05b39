# SPDX-License-Identifier: Apache-2.0
"""Files that harm who unpacks or decodes them without a limit."""

import functools
import gzip
import json
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


def folders(folder: Path) -> list[Path]:
    """Adapters whose files are hostile in themselves."""
    header = b"{" + b",".join(b'"%06x":[]' % n for n in range(2_000_000)) + b"}"
    weights = {
        "many-tensors": struct.pack("<Q", len(header)) + header,
        "no-length": struct.pack("<Q", 2**63) + b"{}",
        "deep": struct.pack("<Q", 2**20) + b"[" * 2**20,
    }
    found = []
    for name, content in weights.items():
        found.append(folder / name)
        found[-1].mkdir(parents=True)
        told = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
        (found[-1] / "adapter_config.json").write_text(json.dumps(told))
        (found[-1] / "adapter_model.safetensors").write_bytes(content)
    found.append(folder / "lists")
    found[-1].mkdir()
    (found[-1] / "adapter_config.json").write_bytes(b'{"a":[' + b"[]," * 10**6 + b"1]}")
    (found[-1] / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
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

    def names() -> Iterator[bytes]:
        for _ in range(300):
            yield header("name", 256 << 10, tarfile.GNUTYPE_LONGNAME)
            yield b"x" * (256 << 10)

    def records() -> Iterator[bytes]:
        data = b"".join(b"%d k%07d=v\n" % (len(b"NN k0000000=v\n"), n) for n in range(60_000))
        yield header("pax", len(data), tarfile.XHDTYPE)
        yield data.ljust(-(-len(data) // 512) * 512, b"\0")

    yield "names", names()
    yield "records", records()
    yield "pax", large_pax()
    yield "large", large_file()
    yield "negative", negative()
    yield "links", links()
    yield "members", members()
    yield "paths", paths()
    yield "broken", iter([b"no archive at all"])
