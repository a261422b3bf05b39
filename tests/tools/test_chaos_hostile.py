# SPDX-License-Identifier: Apache-2.0
"""Hostile clients of scripts/dev chaos, against a real server with the tests' engine."""

import ast
import asyncio
import random

import pytest

from tests.serving.conftest import running
from tools.chaos.hostile import clients
from tools.chaos.hostile.bombs import png
from tools.chaos.hostile.clients import ATTACKS, Hostile
from tools.chaos.hostile.code import hostile_code
from tools.chaos.ledger import End, Ledger
from tools.chaos.watch import Target, pings, watch

pytestmark = pytest.mark.anyio


@pytest.fixture
async def served(anyio_backend):
    async with running(max_request_size=64 * 1024**2) as it:
        yield it


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(clients, "PATIENCE_S", 5)
    monkeypatch.setattr(clients, "HELD_S", 0.05)


def target_of(served):
    return Target("server", int(served.url.rpartition(":")[2]), limit=200)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda it: it.__name__)
async def test_an_attack_ends_and_harms_nobody(served, tmp_path, attack):
    ledger = Ledger()
    served.engine.gate.set()
    archive = tmp_path / "broken.tar.gz"
    archive.write_bytes(b"no archive")
    it = Hostile(
        target_of(served), random.Random(attack.__name__), ledger, [archive], [tmp_path / "code"]
    )
    await attack(it)
    assert ledger.good, ledger.text()
    assert ledger.total(End.EXPLAINED, End.DROPPED)
    assert (await served.client.get("/ping")).status_code == 200


async def test_what_is_no_documented_answer_is_told(served):
    ledger = Ledger()
    it = Hostile(target_of(served), random.Random(0), ledger, [], [])
    it.judge("made up", 500, b"Internal Server Error", frozenset())
    it.judge("made up", 200, b"{}", frozenset())
    it.judge("made up", 400, b'{"code":400,"error":"no"}', frozenset())
    assert ledger.ends["hostile: made up", End.UNEXPLAINED] == 2
    assert ledger.ends["hostile: made up", End.EXPLAINED] == 1


async def test_a_ping_that_fails_is_told(served):
    target = target_of(served)
    watching = asyncio.create_task(watch(target))
    while not target.pings:
        await asyncio.sleep(0.01)
    assert target.failures == []
    served.server.stop()
    await served.task
    while not target.failures:
        await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.wait([watching])
    text, problems = pings([target], Target("bystander", 0, 0, [0.001]))
    assert text.splitlines()[1].startswith("server ")
    assert problems[-1].startswith("/ping of server was not answered with 200")


def test_hostile_code_is_code(tmp_path):
    found = hostile_code(tmp_path)
    assert len(found) > 5
    for folder in found:
        ast.parse((folder / "model.py").read_text())


def test_a_picture_is_small_to_send_and_large_to_decode():
    from io import BytesIO

    from PIL import Image

    found = png(2000)
    assert len(found) < 2000
    assert Image.open(BytesIO(found)).size == (2000, 2000)
