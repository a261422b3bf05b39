# SPDX-License-Identifier: Apache-2.0
"""A model.py whose handle brings its own engine: ours is not started."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from lmi_config.options.settings import SettingsError, read
from lmi_config.plan import explain, plan
from serving.engine import vllm
from serving.engine.base import EngineError
from serving.engine.no_engine import NoEngine
from serving.server import startup
from serving.server.prepare import Deployment, prepare
from serving.sources.locate import locate
from tests.fake_engine import FakeEngine
from tests.lmi_config.examples import PARTS, machine, model

pytestmark = pytest.mark.anyio

COMPAT = Path(__file__).parents[2] / "compat"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts a model with this file of tests/compat beside it; a fake engine replaces vLLM."""

    async def load(note):
        pass

    async def fake(*arguments):
        return FakeEngine()

    monkeypatch.setattr(vllm, "load", load)
    monkeypatch.setattr(vllm, "start", fake)

    async def start(name, text="", **environ):
        folder = shutil.copytree(COMPAT / name, tmp_path / "model")
        if text:
            (folder / "model.py").write_text(text)
        settings = read({"OPTION_MODEL_ID": str(folder), **environ})
        made = plan.make(settings, machine(), model(2), None, {}, PARTS)
        source = locate(str(folder), {}, revision=None, downloads=None)
        return await startup.start(Deployment(made, source, None), lambda *_: None)

    return start


@pytest.mark.parametrize(
    ("name", "environ", "alone"),
    [
        ("public/globals_and_load", {}, True),  # it is not an `async def`
        ("public/own_engine", {}, True),  # it answers the initialising call
        ("public/guard", {}, False),
        ("public/guard", {"OPTION_ENTRYPOINT": "model.py"}, True),
        ("public/configured_formatter", {"OPTION_ENTRYPOINT": "model.py"}, False),
    ],
)
async def test_whose_engine(started, name, environ, alone):
    runtime = await started(name, **environ)
    assert isinstance(runtime.engine, NoEngine if alone else FakeEngine)
    assert runtime.code.alone is alone
    await runtime.stop()


LMIS = "djl_python.lmi_vllm.vllm_async_service"
FIRST_CALLS = {
    "raises": "    payload = inputs.get_as_json()\n    payload['messages']\n",
    "answers": "    if inputs.is_empty():\n        return 'too short'\n",
    "answers with an error": (
        "    from djl_python import Output\n"
        "    if inputs.is_empty():\n        return Output().error('no messages', 424)\n"
    ),
    "exits": "    if inputs.is_empty():\n        raise SystemExit(3)\n",
    "ends its process": "    import os\n    if inputs.is_empty():\n        os._exit(3)\n",
    "hangs": "    import time\n    if inputs.is_empty():\n        time.sleep(600)\n",
}


@pytest.mark.parametrize("first_call", FIRST_CALLS.values(), ids=FIRST_CALLS)
async def test_in_front_of_lmis_handler_no_first_call_stops_the_start(started, first_call, caplog):
    text = f"async def handle(inputs):\n{first_call}    return None\n"
    runtime = await started(
        *("public/guard", text), OPTION_ENTRYPOINT=LMIS, OPTION_FORMATTER_TIMEOUT="2"
    )
    assert isinstance(runtime.engine, FakeEngine)
    assert runtime.code.handles
    assert not runtime.code.alone
    warned = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
    assert [it for it in warned if it.startswith("model.py: ")]
    properties = {"content-type": "application/json"}
    handling = runtime.code.handle(properties, b'{"messages": []}')
    assert [it async for it in handling] == [("done", None)]
    await runtime.stop()


async def test_options_of_an_engine_that_is_not_started_are_named(started, caplog):
    runtime = await started("public/own_engine", OPTION_MAX_MODEL_LEN="256", OPTION_SEED="5")
    await runtime.stop()
    assert "only the handle of model.py may read OPTION_MAX_MODEL_LEN, OPTION_SEED" in caplog.text


async def test_adapters_need_ours(started):
    with pytest.raises(EngineError, match="OPTION_ENABLE_LORA: adapters need vLLM, and the handle"):
        await started("public/own_engine", OPTION_ENABLE_LORA="true")


def test_the_properties_that_handlers_get(tmp_path):
    settings = read(
        {"OPTION_MODEL_ID": "s3://bucket/model", "OPTION_TENSOR_PARALLEL_DEGREE": "max"}
    )
    made = plan.make(settings, machine(), model(2), None, {}, PARTS)
    told = startup.handler_properties(made, tmp_path)
    assert told["model_id"] == str(tmp_path)
    assert (told["tensor_parallel_degree"], told["device_id"]) == ("1", "-1")
    here = dataclasses.replace(made, settings=read({"OPTION_MODEL_ID": "org/name"}))
    assert startup.handler_properties(here, tmp_path)["model_id"] == "org/name"


@pytest.mark.parametrize(
    ("name", "environ"),
    [
        ("globals_and_load", {}),
        ("guard", {"OPTION_ENTRYPOINT": "model.py"}),
        ("own_engine", {"OPTION_ENTRYPOINT": "model.py"}),
    ],
)
def test_a_handler_that_is_the_whole_service_needs_no_model_of_vllms(name, environ):
    made = prepare({"OPTION_MODEL_ID": str(COMPAT / "public" / name), **environ}).plan
    assert made.model.weight_bytes == 0
    text = explain.as_text(made)
    assert "its handle is the whole service; vLLM is not started" in text
    assert "vLLM, in this process" not in text


@pytest.mark.parametrize("name", ["guard", "own_engine"])
def test_a_handler_that_may_be_in_front_of_vllm_says_what_to_set(name):
    with pytest.raises(SettingsError, match=r"no config\.json.*set OPTION_ENTRYPOINT=model\.py"):
        prepare({"OPTION_MODEL_ID": str(COMPAT / "public" / name)})


def test_formatters_need_a_model():
    with pytest.raises(SettingsError, match=r"no config\.json") as raised:
        prepare({"OPTION_MODEL_ID": str(COMPAT / "public" / "configured_formatter")})
    assert "ENTRYPOINT" not in str(raised.value)
