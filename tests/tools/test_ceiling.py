# SPDX-License-Identifier: Apache-2.0
"""The load of `bench ceiling`, with correct and with faulty answers, and the report of `profile` on
samples.
"""

import asyncio
import contextlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.harness.closed_loop import Failed
from tools.ceiling.arms import rust
from tools.ceiling.load import Load
from tools.ceiling.profile import functions

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b'data: {"choices":[{"finish_reason":"length"}]}\n\n'


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def loaded(answer, then_close=False):
    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                writer.write(answer)
                if then_close:
                    writer.close()
                    return

    async def run():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            load = Load("/v1/completions", {"prompt": "a"}, 4)
            try:
                await load.load([server.sockets[0].getsockname()[1]], 2, 60)
            finally:
                await asyncio.sleep(0)  # the server's side of the connections also ends
            return load

    return asyncio.run(run())


def test_events_are_counted_however_they_are_cut():
    whole = b"data: {}\n\n" + LAST
    load = loaded(HEAD + chunk(whole[:15]) + chunk(whole[15:]) + b"0\r\n\r\n")
    assert (load.events, len(load.times)) == (8, 4)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (HEAD + chunk(b"data: {}\n\n") + b"0\r\n\r\n", "answer 200"),
        (b"HTTP/1.1 500 Oh\r\ncontent-length: 8\r\n\r\n" + b'"length"', "answer 500"),
        (HEAD + chunk(LAST), "a connection was cut"),
    ],
    ids=["no end", "an error", "cut short"],
)
def test_a_wrong_answer_ends_the_load(answer, why):
    with pytest.raises(Failed, match=why):
        loaded(answer, then_close=True)


def test_samples_are_counted_where_they_were_and_above():
    folded = "main (a.py:1);run (b.py:2);send (b.py:9) 3\nmain (a.py:1);run (b.py:4) 1\n"
    own, below, total = functions(folded)
    assert own == {"send (b.py": 3, "run (b.py": 1}
    assert below == {"main (a.py": 4, "run (b.py": 4, "send (b.py": 3}
    assert total == 4


def test_the_front_end_in_rust_is_the_asked_one_or_the_installed_one(tmp_path, monkeypatch):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert rust(None) is None
    (installed := tmp_path / "vllm-rs").touch(0o755)
    assert rust(None) == installed
    assert rust(Path("/bin/sh")) == Path("/bin/sh")
    with pytest.raises(SystemExit, match="--rust=nowhere"):
        rust(Path("nowhere"))
