# SPDX-License-Identifier: Apache-2.0
"""A start whose weights are still fetched."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from lmi_config.facts.model import Shards
from lmi_config.options.settings import read
from lmi_config.plan import plan
from serving import folders
from serving.engine.base import EngineError
from serving.engine.weights import loader
from serving.lifecycle import Step
from serving.server import fetching
from serving.sources.arriving import Unfetched, wait
from serving.sources.source import SourceError
from tests.lmi_config.examples import PARTS, machine, model

SIZES = {"model-1-of-2.safetensors": 3, "model-2-of-2.safetensors": 3}
ENVIRON = {"OPTION_MODEL_ID": "s3://bucket/model", "OPTION_MAX_MODEL_LEN": "8192"}

pytestmark = pytest.mark.anyio


class Slow:
    """A source whose weights come when `gate` is open. fault: of the fetch, then."""

    def __init__(self, folder: Path, fault: str = "", waits: bool = True) -> None:
        self.folder = folder
        self.gate = threading.Event()
        self.fault = fault
        self.waits = waits
        if not waits:
            self.gate.set()

    def fetch(self, note, early=None):
        note("fetching it")
        if early and self.waits:
            early.begin(self.folder)
        assert self.gate.wait(20)
        if self.fault:
            raise SourceError("s3://bucket/model", self.fault, "start again")
        for name, size in SIZES.items():
            part = self.folder / f"{name}.0a1b"
            part.write_bytes(bytes(size))
            part.rename(self.folder / name)
        note("fetched it")
        return self.folder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "HOME", tmp_path / "slipway")
    return tmp_path / "slipway"


@pytest.fixture
def notes():
    return []


async def fetched(source, notes, to_fetch=6):
    facts = model(2, shards=Shards(SIZES))
    made = plan.make(*(read(ENVIRON), machine(), facts, None, ENVIRON, PARTS), to_fetch=to_fetch)
    return await fetching.fetch(source, made, lambda *it: notes.append(it))


async def test_a_start_goes_on_while_weights_arrive(tmp_path, notes, home):
    source = Slow(tmp_path)
    found = await fetched(source, notes)
    assert found.folder == tmp_path
    arriving = found.options["model_loader_extra_config"]["arriving"]
    assert found.options["load_format"] == loader.FORMAT
    assert arriving["files"] == SIZES
    assert Path(arriving["sign"]).parent == home / "8080"
    source.gate.set()
    for name, size in SIZES.items():
        await asyncio.to_thread(wait, tmp_path / name, size, Path(arriving["sign"]))
    async with found.blamed():
        await found.whole()
    assert [*(home / "8080").iterdir()] == []
    assert notes == [(Step.FETCHING, "fetching it")], "the step has been another one since"


async def test_weights_that_are_there_are_not_waited_for(tmp_path, notes):
    found = await fetched(Slow(tmp_path, waits=False), notes)
    assert (found.folder, found.options) == (tmp_path, {})
    await found.whole()
    assert notes == [(Step.FETCHING, "fetching it"), (Step.FETCHING, "fetched it")]


async def test_a_fetch_that_fails_first_ends_the_start(tmp_path, notes):
    with pytest.raises(EngineError, match="'s3://bucket/model': access is denied; start again"):
        await fetched(Slow(tmp_path, "access is denied", waits=False), notes)


async def test_a_fetch_that_fails_later_is_the_reason_for_all(tmp_path, notes):
    source = Slow(tmp_path, "an object changed")
    found = await fetched(source, notes)
    sign = Path(found.options["model_loader_extra_config"]["arriving"]["sign"])
    source.gate.set()
    name, size = next(iter(SIZES.items()))
    reason = "'s3://bucket/model': an object changed; start again"

    async def engine():
        with pytest.raises(Unfetched, match=reason):
            await asyncio.to_thread(wait, tmp_path / name, size, sign)
        raise EngineError("the engine's core has ended")

    with pytest.raises(EngineError, match=reason):
        async with found.blamed():
            await engine()
    with pytest.raises(EngineError, match=reason):
        await found.whole()
    with pytest.raises(EngineError, match=reason):
        async with found.blamed():
            raise AssertionError("vLLM is not started any more")


async def test_an_engine_that_fails_by_itself_says_so(tmp_path, notes):
    source = Slow(tmp_path)
    found = await fetched(source, notes)
    with pytest.raises(EngineError, match="out of memory"):
        async with found.blamed():
            raise EngineError("out of memory")
    source.gate.set()
    await found.whole()


async def test_without_a_place_for_the_sign_all_is_fetched_first(tmp_path, notes, home, caplog):
    for folder in (home, home.with_name(f"slipway-{os.geteuid()}")):
        folder.write_text("no folder")
    source = Slow(tmp_path)
    source.gate.set()
    found = await fetched(source, notes)
    assert (found.options, caplog.messages[0].partition(":")[0]) == (
        {},
        "the weights are fetched before vLLM starts",
    )
