# SPDX-License-Identifier: Apache-2.0
"""The conformance run: a container that keeps every rule, and for each rule a container that breaks
it.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from aiohttp import web

from tests.support.harness.process import ROOT, Program
from tests.tools.sagemaker_container import Container
from tools.sagemaker_local import contract

BODY = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
NEEDS = {
    "adapter-again": "adapter-register",
    "adapter-answers": "adapter-register",
    "adapter-update": "adapter-register",
    "adapter-delete": "adapter-register",
    "session-headers": "session-new",
    "session-use": "session-new",
    "session-unknown": "session-new",
    "session-close": "session-new",
}


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapters" / "one"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def checked(adapter, *only, faults=()):
    """The results for a container with these faults, by the rules' names."""

    async def run():
        runner = web.AppRunner(Container(faults).app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            container = contract.Container(url, BODY, adapter, None)
            return await contract.run(container, only)
        finally:
            await runner.cleanup()

    return {it.rule: it for it in asyncio.run(run())}


def test_a_container_that_keeps_every_rule(adapter):
    found = checked(adapter)
    assert [*found] == [*contract.RULES]
    assert {it.rule: it.seen for it in found.values() if it.verdict == "fail"} == {}
    assert [it.rule for it in found.values() if it.verdict == "not tried"] == ["sigterm"]


@pytest.mark.parametrize("rule", [it for it in contract.RULES if it != "sigterm"])
def test_each_rule_is_seen_to_be_broken(adapter, rule, monkeypatch):
    monkeypatch.setattr(contract, "LEFT_S", 0.3)
    needed = [NEEDS[rule]] if rule in NEEDS else []
    found = checked(adapter, rule, *needed, faults=[rule])
    assert found[rule].verdict == "fail", found[rule].seen
    assert found[rule].seen
    assert all(found[it].verdict == "pass" for it in needed)


def test_a_silent_ping_is_not_waited_for(adapter, monkeypatch):
    monkeypatch.setattr(contract, "PING_S", 0.2)
    found = checked(adapter, "ping", faults=["silent"])["ping"]
    assert (found.verdict, found.seen) == ("fail", "GET /ping: no answer within 0.2 s")


def test_what_needs_an_adapter_or_a_session_is_not_tried_without_one():
    found = checked(None, "adapter-answers", "session-use")
    assert {it.verdict for it in found.values()} == {"not tried"}


@contextlib.contextmanager
def started(faults):
    """The container in a separate process."""
    command = (sys.executable, "tests/tools/sagemaker_container.py", "serve")
    with Program(
        *command, environ={"FAULTS": faults, "SAGEMAKER_BIND_TO_PORT": "{port}"}
    ) as program:
        program.ready()
        yield program


def command_line(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tools.sagemaker_local", "check", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(("faults", "kept"), [("", True), ("sigterm", False)])
def test_a_container_that_is_stopped(faults, kept):
    with started(faults) as program:
        pid = str(program.process.pid)
        ended = command_line(program.url, "--pid", pid, "--only", "sigterm", "ping")
        assert ended.returncode == (0 if kept else 1), ended.stdout
        assert ended.stdout.splitlines()[-1] == (
            "2 pass, 0 fail, 0 not tried" if kept else "1 pass, 1 fail, 0 not tried"
        )
        assert program.process.wait() == (0 if kept else -signal.SIGTERM)


def test_the_score_sheet_as_json():
    with started("metrics") as program:
        ended = command_line(program.url, "--json", "--only", "metrics", "ping")
    assert ended.returncode == 1
    ping, metrics = json.loads(ended.stdout)
    assert (ping["rule"], ping["verdict"]) == ("ping", "pass")
    assert (metrics["rule"], metrics["verdict"]) == ("metrics", "fail")
    assert metrics["seen"].startswith("answered 401")
    assert metrics["says"] == "/metrics is open and has series"
