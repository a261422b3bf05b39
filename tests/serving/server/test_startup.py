# SPDX-License-Identifier: Apache-2.0
import asyncio
import ctypes
import dataclasses
import json
import logging
import mmap
import os
from pathlib import Path

import pytest
import yaml

from lmi_config.facts.layers import KvLayers
from lmi_config.options.settings import read
from lmi_config.plan import kv_tiers, plan
from serving import folders
from serving.engine.base import EngineError
from serving.kv_cache import disk
from serving.server.cache import write_tiers
from serving.server.startup import _beside, _register_adapters, read_ahead, tiers_info
from tests.fake_engine import FakeEngine
from tests.lmi_config.examples import DISK, PARTS, machine, model
from tests.lmi_config.facts.test_model import safetensors
from tests.serving.lora.test_registry import tensors, write


def cached(path):
    """The share of a file in memory, by mincore(2)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        found = (ctypes.c_ubyte * (len(pages) // mmap.PAGESIZE))()
        start, length = ctypes.c_char.from_buffer(pages), ctypes.c_size_t(len(pages))
        assert ctypes.CDLL(None).mincore(ctypes.byref(start), length, found) == 0
        del start
        return sum(page & 1 for page in found) / len(found)


def test_weights_are_read_from_the_disk_ahead(tmp_path):
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(32 * 1024**2)  # a hole in a file is not in memory
    assert cached(weights) == 0
    read_ahead(tmp_path)
    assert cached(weights) == 1


AUTO = {"OPTION_LMCACHE_AUTO_CONFIG": "true"}
FINGERPRINT = "0" * 16


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "HOME", tmp_path / "slipway")
    return tmp_path / "slipway"


def tiers(path, environ=AUTO, file=None):
    here = machine(disk=dataclasses.replace(DISK, path=str(path)))
    found = plan.make(read(environ), here, model(2), None, environ, PARTS, file).tiers
    assert isinstance(found, kv_tiers.Tiers)
    return found


def test_the_decision_can_be_given_back(home, tmp_path):
    """The next plan finds the same disk tier, with the same size."""
    decided = tiers(tmp_path / "kv")
    first = disk.claim(decided.disk, FINGERPRINT)
    write_tiers(decided, 8080)
    given = {"OPTION_LMCACHE_CONFIG_FILE": str(home / "8080/lmcache.yaml")}
    file = yaml.safe_load(Path(given["OPTION_LMCACHE_CONFIG_FILE"]).read_text())
    again = tiers(kv_tiers.disk_path(read(given), given, file), given, file)
    assert (again.l1, again.disk, again.chunk_size) == (decided.l1, decided.disk, 128)
    assert disk.claim(again.disk, FINGERPRINT).path == first.path


@pytest.mark.parametrize(
    ("environ", "more", "told"),
    [
        ({}, {}, ("off", "full", "not_asked")),
        (AUTO, {}, ("on", "full", "")),
        (AUTO, {"kept": KvLayers(full=32, state=True)}, ("off", "state", "attention")),
        (
            {**AUTO, "OPTION_MAX_MODEL_LEN": "8192"},
            {"weight_bytes": 2**36},
            ("off", "full", "no_room"),
        ),
    ],
)
def test_a_series_tells_whether_there_are_tiers_and_why_not(environ, more, told):
    made = plan.make(read(environ), machine(), model(2, **more), None, environ, PARTS)
    assert tiers_info(made) == told
    if told[0] == "on":
        assert tiers_info(made.without_tiers("it ended")) == ("off", "full", "failed")


def test_servers_on_one_machine_keep_their_decisions_apart(home, tmp_path):
    write_tiers(tiers(tmp_path / "one"), 8080)
    write_tiers(tiers(tmp_path / "two"), 8081)
    assert "/one" in (home / "8080/lmcache.yaml").read_text()
    assert "/two" in (home / "8081/lmcache.yaml").read_text()


def test_a_decision_that_cannot_be_written_down_is_a_warning(home, tmp_path, caplog):
    for folder in (home, home.with_name(f"slipway-{os.geteuid()}")):
        folder.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        write_tiers(tiers(tmp_path / "kv"), 8080)
    assert "the file with the KV cache tiers cannot be written" in caplog.text


@pytest.mark.anyio
async def test_a_start_that_fails_leaves_no_work_behind():
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # a process that is waited for behaves so
            ended.append("work")

    async def fail():
        async with _beside(work()) as task:
            await asyncio.sleep(0)
            assert not task.done()
            raise EngineError("no such model")

    with pytest.raises(EngineError):
        await fail()
    assert ended == ["work"]


def test_what_runs_is_what_was_planned(tmp_path):
    """The options are the planned ones with folders filled in. Without a cache server, its option
    is left out.
    """
    here = machine(disk=dataclasses.replace(DISK, path=str(tmp_path)))
    planned = plan.make(read(AUTO), here, model(2), None, AUTO, PARTS)
    assert planned.engine("/folder", None) == {**planned.options, "model": "/folder"}
    without = planned.without_tiers("it did not start").engine("/folder", None)
    assert {**planned.options, "model": "/folder"}.keys() - without.keys() == {"kv_transfer_config"}


@pytest.mark.anyio
@pytest.mark.parametrize("named", ["adapters", "tuned"])
async def test_adapters_beside_the_options_are_registered(tmp_path, caplog, named):
    """The weights may be elsewhere, and the folder may have another name."""
    deployment, weights = tmp_path / "model", tmp_path / "weights"
    write(deployment / named / "one")
    (deployment / named / ".cache" / "huggingface").mkdir(
        parents=True
    )  # as `hf download` leaves it
    write(weights / "adapters" / "two")
    layer = {"model.layers.0.self_attn.q_proj.weight": ("BF16", [16, 8])}
    (weights / "model.safetensors").write_bytes(safetensors(layer))
    (weights / "config.json").write_text("{}")
    lines = ["option.enable_lora=true", f"option.model_id={weights}"]
    if named != "adapters":
        lines.append(f"option.adapters={named}")
    (deployment / "serving.properties").write_text("\n".join(lines))
    settings = read({"SERVING_MODEL_STORE": str(deployment)})
    made = plan.make(settings, machine(), model(2), None, {}, PARTS)
    adapters = await _register_adapters(made, weights, FakeEngine())
    assert adapters
    assert [it.name for it in adapters.listed()] == ["one"]
    assert not caplog.records
    write(deployment / "later")  # the folder of the options is a root
    await adapters.register("later", str(deployment / "later"))
    without = dataclasses.replace(made, settings=dataclasses.replace(settings, adapters="gone"))
    await _register_adapters(without, weights, FakeEngine())
    if named != "adapters":
        told = "serving.properties: option.adapters: there is no folder"
        assert caplog.messages[-1].startswith(told)


@pytest.mark.anyio
async def test_adapters_of_lora_modules_are_in_the_registry(tmp_path):
    """vLLM's option, in both its forms. vLLM itself does not get it."""
    weights = tmp_path / "weights"
    layer = {"model.layers.0.self_attn.q_proj.weight": ("BF16", [16, 8])}
    write(weights)
    (weights / "model.safetensors").write_bytes(safetensors(layer))
    (weights / "config.json").write_text("{}")
    one, two = write(tmp_path / "a" / "one"), write(tmp_path / "b" / "two")
    asked = json.dumps([{"name": "first", "path": str(one), "base_model_name": "m"}])
    environ = {"OPTION_ENABLE_LORA": "true", "OPTION_MODEL_ID": str(weights)}
    made = plan.make(
        read(environ | {"SM_VLLM_LORA_MODULES": asked}), machine(), model(2), None, {}, PARTS
    )
    assert "lora_modules" not in made.options
    adapters = await _register_adapters(made, weights, FakeEngine())
    assert adapters
    assert [(it.name, it.src) for it in adapters.listed()] == [("first", str(one))]
    await adapters.unregister("first")
    assert not adapters.listed()
    written = read(environ | {"OPTION_LORA_MODULES": f"second={two}"})
    adapters = await _register_adapters(
        plan.make(written, machine(), model(2), None, {}, PARTS), weights, FakeEngine()
    )
    assert adapters
    assert [it.name for it in adapters.listed()] == ["second"]
    bad = write(tmp_path / "bad", shapes=tensors(rank=64), r=64)
    written = read(environ | {"OPTION_LORA_MODULES": f"bad={bad}"})
    with pytest.raises(EngineError, match=r"OPTION_LORA_MODULES.*adapter bad cannot be used"):
        await _register_adapters(
            plan.make(written, machine(), model(2), None, {}, PARTS), weights, FakeEngine()
        )
