# SPDX-License-Identifier: Apache-2.0
"""Files that are read again when they change: through servers, over HTTP and as processes."""

import asyncio
import json
import logging
import sys

import httpx
import pytest

from serving import follow
from serving.access import keys
from tests.serving.conftest import running
from tests.support.harness.process import Program
from tests.support.harness.wait import until, until_async

pytestmark = pytest.mark.anyio

ADMIN = "admin-key-of-this-test"


def of(*names: str) -> bytes:
    """A file of keys; each key equals its name."""
    rows = [{"name": it, "sha256": keys.digest(it.encode()), "admin": True} for it in names]
    return json.dumps({"keys": rows}).encode()


def failures(metrics: str, what: str) -> float:
    start = f'slipway_follow_failures_total{{what="{what}"}} '
    return next((float(it[len(start) :]) for it in metrics.splitlines() if it.startswith(start)), 0)


ODD_FILES = {
    "an alias within itself": b"keys: &a [*a]",
    "nested": b"keys: " + b"[" * 5000,
    "no UTF-8": b"\xff\xfe\xff",
    "empty": b"",
    "too large": b"keys: []\n#" + b" " * (4 * 2**20),
    "a number without end": b"keys: " + b"1:" * 200_000 + b"1",
}


async def test_odd_keys_leave_those_that_were_there_and_end_no_following(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "LOOK_S", 0.02)
    file = tmp_path / "keys"
    file.write_bytes(of("one"))
    async with running(api_keys_file=str(file)) as it:

        async def may(name: str) -> bool:
            answer = await it.client.get("/metrics", headers={"x-api-key": name})
            return answer.status_code == 200

        async def count() -> float:
            answer = await it.client.get("/metrics", headers={"x-api-key": "one"})
            return failures(answer.text, "keys")

        for odd in ODD_FILES.values():
            before = await count()
            file.write_bytes(odd)

            async def more(before: float = before) -> bool:
                return await count() > before

            await until_async(more, 20)
            assert await may("one")
        file.write_bytes(of("one", "two"))
        await until_async(lambda: may("two"), 20)


def test_the_router_outlives_an_odd_file_of_keys(tmp_path):
    """The file is still followed: a key that is removed afterwards is refused."""
    file = tmp_path / "keys"
    file.write_bytes(of("one", "two"))
    program = Program(
        *(sys.executable, "-m", "serving", "route", "http://127.0.0.1:1"),
        environ={
            "OPTION_API_KEYS_FILE": str(file),
            "OPTION_ROUTER_SECRET": "0" * 32,
            "SERVING_PORT": "{port}",
        },
        log=tmp_path / "log",
    )
    with program:
        until(program.listens)

        def status(name: str) -> int:
            return httpx.get(f"{program.url}/metrics", headers={"x-api-key": name}).status_code

        until(lambda: status("two") == 200)
        file.write_bytes(ODD_FILES["an alias within itself"])
        until(lambda: "keys stay as they were" in (tmp_path / "log").read_text())
        file.write_bytes(of("one"))
        until(lambda: status("two") == 401)
        assert status("one") == 200


async def test_an_unforeseen_end_is_told_counted_and_begun_anew(monkeypatch, caplog):
    monkeypatch.setattr(follow, "AGAIN_S", 0.01)
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise LookupError("of nobody's making")
        await asyncio.Event().wait()

    task = asyncio.create_task(follow.kept("keys", work))
    await until_async(lambda: begun == 3)
    task.cancel()
    told = [it for it in caplog.records if it.levelno == logging.ERROR]
    assert len(told) == 2
    assert all(it.exc_info and it.exc_info[0] is LookupError for it in told)
