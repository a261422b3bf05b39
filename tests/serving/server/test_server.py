# SPDX-License-Identifier: Apache-2.0
"""The server's life, from start to exit code; only the engine is a fake."""

import asyncio
import json
import logging
import os
import shlex
import signal
import tomllib
from pathlib import Path

import pytest

from serving import VERSION
from serving.engine.base import EngineError
from serving.exit import DIED, START_FAILED, Exit
from serving.lifecycle import GRACE_S, SHUTDOWN
from serving.router.fleet import facts
from serving.server import server as module
from tests.serving.conftest import running
from tests.support.harness.wait import until_async

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.anyio


async def test_while_starting_it_says_what_it_does():
    async with running(wait=False) as served:
        served.may_start.clear()
        answer = await served.client.get("/ping")
        assert answer.status_code == 503
        assert answer.json()["status"] == "starting"
        assert answer.json()["detail"] == "pretending"
        answer = await served.invoke({"inputs": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json() == {"code": 503, "error": "the server is starting: pretending"}
        served.may_start.set()
        await served.ready()


async def test_it_can_be_stopped_while_starting():
    async with running(wait=False) as served:
        served.may_start.clear()
        await served.client.get("/ping")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(served.task, 15) == Exit(0, "start")


async def test_a_failed_start_has_its_exit_code_and_reason():
    async with running(wait=False) as served:
        served.start_error = EngineError("no such model")
        end = await asyncio.wait_for(served.task, 15)
    assert end == Exit(START_FAILED, "start", "no such model")


async def test_a_start_that_takes_too_long_has_failed():
    async with running(wait=False, model_loading_timeout=1) as served:
        served.may_start.clear()
        end = await asyncio.wait_for(served.task, 15)
    reason = "not ready after 1 s (OPTION_MODEL_LOADING_TIMEOUT): pretending"
    assert end == Exit(START_FAILED, "start", reason)


async def test_it_tells_how_long_its_start_took(caplog):
    caplog.set_level(logging.INFO)
    async with running() as served:
        told = (await served.client.get("/metrics")).text
    (ready,) = [record.facts for record in caplog.records if record.message == "ready"]
    assert list(ready["steps"]) == ["planning", "beginning", "fetching"]
    assert ready["elapsed_s"] >= ready["steps"]["planning"] > 0
    assert 'slipway_start_seconds{step="fetching"}' in told
    assert f'slipway_build_info{{lmcache="0.5.6",version="{VERSION}",vllm="0.32.0' in told


async def test_routers_read_by_which_header_it_tells_tenants_apart():
    async with running(cache_salt_header="X-Tenant") as served:
        assert facts.read((await served.client.get("/metrics")).content).tenant_header == "x-tenant"


async def test_the_command_to_try_when_it_is_ready_gets_an_answer(caplog):
    caplog.set_level(logging.INFO)
    async with running() as served:
        (text,) = [record.text for record in caplog.records if record.message == "ready"]
        (command,) = [line for line in text.splitlines() if line.startswith("curl ")]
        _, _, url, _, body = shlex.split(command)
        assert f"or open {served.url}/ui in a browser" in text
        kind = {"content-type": "application/x-www-form-urlencoded"}  # curl's own
        answer = await served.client.post(url, content=body, headers=kind)
    assert answer.status_code == 200
    assert "generated_text" in answer.json()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_requests_finish(served, number):
    whole = asyncio.create_task(served.invoke({"inputs": "wait a"}))
    stream = asyncio.create_task(served.invoke({"inputs": "wait b", "stream": True}))
    await until_async(lambda: served.engine.running == 2)
    os.kill(os.getpid(), number)
    await until_async(lambda: served.server.lifecycle.stage == "draining")
    ping = await served.client.get("/ping")
    assert (ping.status_code, ping.json()["status"]) == (503, "draining")
    late = await served.invoke({"inputs": "late"})
    assert (late.status_code, late.headers["retry-after"]) == (503, "1")
    served.engine.gate.set()
    assert (await whole).json() == {"generated_text": "a wait"}
    assert json.loads((await stream).text.splitlines()[-1])["generated_text"] == "bwait"
    assert await asyncio.wait_for(served.task, 15) == Exit(0, "draining")
    assert served.engine.stopped


@pytest.mark.parametrize("twice", [True, False])
async def test_what_does_not_finish_in_time_is_told_so(served, monkeypatch, twice):
    monkeypatch.setattr(module, "SHUTDOWN", SHUTDOWN._replace(drain=60 if twice else 0.2))
    whole = asyncio.create_task(served.invoke({"inputs": "wait a"}))
    stream = asyncio.create_task(served.invoke({"inputs": "wait b", "stream": True}))
    openai = asyncio.create_task(
        served.post("/v1/completions", {"prompt": "wait c", "stream": True})
    )
    await until_async(lambda: served.engine.running == 3)
    os.kill(os.getpid(), signal.SIGTERM)
    if twice:
        await until_async(lambda: served.server.lifecycle.stage == "draining")
        os.kill(os.getpid(), signal.SIGTERM)
    told = {"code": 503, "error": "the server is stopping"}
    assert ((await whole).status_code, (await whole).json()) == (503, told)
    assert json.loads((await stream).text.splitlines()[-1]) == told
    *_, error, done = (await openai).text.split("\n\n")[:-1]
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the server is stopping"
    assert done == "data: [DONE]"
    assert await asyncio.wait_for(served.task, 15) == Exit(0, "draining")


def test_an_end_in_which_every_step_takes_its_time_comes_before_the_platform_kills():
    assert sum(SHUTDOWN) <= GRACE_S - 0.5  # the end of Python itself, and uvicorn's ticks


async def test_no_step_of_the_end_takes_longer_than_it_may(monkeypatch):
    short = SHUTDOWN._replace(drain=0.2, farewell=0.2, engine=0.2)
    monkeypatch.setattr(module, "SHUTDOWN", short)
    async with running() as served:
        monkeypatch.setattr(served.engine, "stop", asyncio.Event().wait)
        held = asyncio.create_task(served.invoke({"inputs": "wait"}))
        await until_async(lambda: served.engine.running == 1)
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        await until_async(lambda: len(served.server._http.server_state.tasks) == 2)
        served.server.stop()
        assert await asyncio.wait_for(served.task, 15) == Exit(0, "draining")
        assert (await held).status_code == 503
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        writer.close()


@pytest.mark.parametrize("draining", [False, True])
async def test_an_engine_that_dies_fails_the_server(served, draining):
    if draining:
        held = asyncio.create_task(served.invoke({"inputs": "wait a"}))
        await until_async(lambda: served.engine.running == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await until_async(lambda: served.server.lifecycle.stage == "draining")
    served.engine.failure = "an engine process ended"
    await until_async(lambda: served.server.lifecycle.stage == "failed")
    assert served.server.lifecycle.ping()[0] == 500
    if draining:
        served.engine.gate.set()
        await held
    stage = "draining" if draining else "serving"
    end = await asyncio.wait_for(served.task, 15)
    assert end == Exit(DIED, stage, "an engine process ended")


def test_the_version_is_the_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
