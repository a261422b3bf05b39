# SPDX-License-Identifier: Apache-2.0
"""A container with several models, and room for one: its doors, its swaps, and its end."""

import concurrent.futures
import json
import shutil
import signal
import sys
import threading

import httpx
import psutil
import pytest

from tests.support.harness.process import AS_ENTRYPOINT_SH, Program
from tests.support.harness.wait import until
from tests.support.models import tiny

ROOM = {"OPTION_MODELS_MEMORY": "3G", "OPTION_KV_CACHE_MEMORY_BYTES": "64M"}
"""Room for one model; the plan takes 2.6 GiB for one."""


class Container(Program):
    def __init__(self, folder, **environ):
        self.folder = folder
        super().__init__(
            *(sys.executable, "-m", "tests.serving.models.parts"),
            log=folder / "log",
            environ={
                **AS_ENTRYPOINT_SH,
                **ROOM,
                **environ,
            },
        )

    def ask(self, model, path="/v1/completions", **headers):
        body = {"prompt": "a b", "max_tokens": 2} | ({"model": model} if model else {})
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=120)

    def get(self, path, **headers):
        return httpx.get(self.url + path, headers=headers, timeout=60)

    def load(self, name, folder, **headers):
        body = {"model_name": name, "url": str(folder)}
        return httpx.post(f"{self.url}/models", json=body, headers=headers, timeout=120)

    def unload(self, name):
        return httpx.delete(f"{self.url}/models/{name}", timeout=120)

    def states(self):
        return {it["modelName"]: it["status"] for it in self.get("/models").json()["models"]}

    def servers(self):
        """The models' servers: children that listen, apart from the router."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            ports = {it.laddr.port for it in child.net_connections() if it.status == "LISTEN"}
            if ports and self.port not in ports:
                found.append(child)
        return found

    def lines(self):
        return [json.loads(it) for it in self.logged().splitlines() if it.startswith("{")]


def listed(folder, *names):
    found = {}
    for name in names:
        found[name] = {"model_id": str(shutil.copytree(tiny.make(), folder / name))}
    return {"OPTION_MODELS": json.dumps(found)}


@pytest.fixture(scope="module")
def turns(tmp_path_factory):
    """Two models that take turns."""
    folder = tmp_path_factory.mktemp("turns")
    with Container(folder, **listed(folder, "a", "b")) as it:
        it.ready(300)
        yield it


def test_nothing_runs_before_the_first_request_and_ping_is_up(turns):
    until(lambda: turns.states() == {"a": "COLD", "b": "COLD"}, 60)
    assert turns.get("/ping").status_code == 200
    assert turns.get("/ping").json()["detail"] == "0 of 2 models run"
    assert turns.servers() == []
    models = turns.get("/v1/models").json()["data"]
    assert [(it["id"], it["state"]) for it in models] == [("a", "cold"), ("b", "cold")]
    assert turns.get("/v1/models/b").json()["id"] == "b"
    assert turns.get("/v1/models/c").status_code == 404


def test_models_take_turns_and_every_request_is_answered(turns):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(turns.ask, ["a", "b", "a", "b", "b", "a", "a", "b"])]
    assert {it.status_code for it in answers} == {200}
    assert {it.json()["model"] for it in answers} == {"a", "b"}
    assert int(answers[0].headers["x-slipway-held-ms"]) > 0
    assert len(turns.servers()) == 1
    starts = [it for it in turns.lines() if it.get("state") == "starting"]
    assert len(starts) <= 4
    assert turns.ask("", "/models/a/invoke").status_code in (200, 424)
    assert turns.ask("c").status_code == 404
    nameless = turns.ask("")
    assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "model")


def test_what_the_operator_lists_is_not_changed_by_calls(turns, tmp_path):
    assert turns.load("c", tmp_path).status_code == 409
    assert turns.unload("a").status_code == 409
    assert turns.unload("c").status_code == 404
    assert turns.get("/v1/files").status_code == 404
    assert turns.get("/models/a").json()["modelName"] == "a"
    assert httpx.put(f"{turns.url}/models/a").status_code == 405


def test_series_have_the_model(turns):
    assert turns.ask("a").status_code == 200
    ready = 'slipway_model_state{model="a",state="ready"} 1.0'
    until(lambda: ready in turns.get("/metrics").text, 60)
    text = turns.get("/metrics").text
    assert 'slipway_build_info{model="a"' in text
    assert "slipway_router_requests_total" in text
    assert "slipway_copies" not in text


def test_a_killed_server_is_started_again_by_the_next_request(turns):
    assert turns.ask("b").status_code == 200
    (server,) = turns.servers()
    server.kill()
    until(lambda: turns.states()["b"] == "COLD", 60)
    assert turns.ask("b").status_code == 200
    assert turns.ask("a").status_code == 200


def test_sigterm_refuses_those_that_wait(turns):
    """The last test with this container, which it stops."""
    turns.ask("a")
    got = []
    waiting = threading.Thread(target=lambda: got.append(turns.ask("b")))
    waiting.start()
    until(lambda: "slipway_router_held 1.0" in turns.get("/metrics").text, 60)
    turns.process.send_signal(signal.SIGTERM)
    waiting.join(60)
    assert got[0].status_code in (200, 503)
    assert turns.process.wait(60) == 0
    assert turns.lines()[-1]["message"] == "stopped"


@pytest.fixture(scope="module")
def sleepers(tmp_path_factory):
    """Three models with vLLM's sleep mode, and a GPU for one that runs and two that sleep. The
    engine of c cannot sleep.
    """
    folder = tmp_path_factory.mktemp("sleepers")
    models = listed(folder, "a", "b", "c")
    (folder / "c" / "INSOMNIA").touch()
    sizes = {"OPTION_KV_CACHE_MEMORY_BYTES": "8G", "OPTION_MODELS_MEMORY": "16G", "FAKE_GPU": "18"}
    with Container(folder, OPTION_ENABLE_SLEEP_MODE="true", **models, **sizes) as it:
        it.ready(300)
        yield it


def test_a_model_that_makes_room_on_a_gpu_sleeps_and_wakes_up(sleepers):
    assert sleepers.ask("a").status_code == 200
    assert sleepers.ask("b").status_code == 200
    assert sleepers.states() == {"a": "ASLEEP", "b": "READY", "c": "COLD"}
    both = {it.pid for it in sleepers.servers()}
    assert len(both) == 2
    for name, other in ("ab", "ba", "ab"):
        answer = sleepers.ask(name)
        assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert sleepers.states() == {name: "READY", other: "ASLEEP", "c": "COLD"}
    assert {it.pid for it in sleepers.servers()} == both  # nothing was started for it
    listed = sleepers.get("/v1/models").json()["data"]
    assert [it["state"] for it in listed] == ["ready", "asleep", "cold"]


def test_a_model_that_dies_asleep_is_started_again(sleepers):
    assert sleepers.ask("b").status_code == 200
    (b,) = [it for it in sleepers.servers() if _serves(sleepers, it, "b")]
    assert sleepers.ask("a").status_code == 200
    b.kill()
    until(lambda: sleepers.states()["b"] == "COLD", 60)
    assert sleepers.ask("b").status_code == 200
    assert sleepers.states()["a"] == "ASLEEP"


def _serves(container, server, name):
    """Whether a server is that of a model."""
    port = next(it.laddr.port for it in server.net_connections() if it.status == "LISTEN")
    lines = [it for it in container.lines() if it.get("model") == name]
    return any(it.get("port") == port for it in lines)


def test_an_engine_that_cannot_sleep_is_stopped(sleepers):
    assert sleepers.ask("c").status_code == 200
    assert sleepers.ask("a").status_code == 200
    assert sleepers.states()["c"] == "COLD"
    assert "the engine did not sleep" in sleepers.logged()


@pytest.fixture(scope="module")
def multi(tmp_path_factory):
    """SageMaker's multi-model mode."""
    folder = tmp_path_factory.mktemp("multi")
    for name in ("x", "y", "faulty"):
        shutil.copytree(tiny.make(), folder / name / "model")
    (folder / "faulty" / "model" / "FAULT").write_text("the weights are torn")
    environ = {"SAGEMAKER_MULTI_MODEL": "true", "OPTION_MODEL_ROOTS": str(folder)}
    with Container(folder, **environ) as it:
        it.ready(300)
        yield it


def resident(processes):
    return [it for it in processes if it.is_running() and it.status() != "zombie"]


def test_sagemakers_calls(multi):
    assert multi.get("/ping").status_code == 200
    assert multi.get("/models").json() == {"models": []}
    assert multi.ask("x").status_code == 404
    url = multi.folder / "x" / "model"
    assert multi.load("x", url).status_code == 200
    (server,) = multi.servers()
    one = {"modelName": "x", "modelUrl": str(url), "status": "READY"}
    assert multi.get("/models").json() == {"models": [one]}
    assert multi.get("/models/x").json() == one
    assert multi.get("/models/y").status_code == 404
    assert multi.load("x", url).status_code == 409
    asked = {"inputs": "Hi", "parameters": {"max_new_tokens": 2}}
    target = {"X-Amzn-SageMaker-Target-Model": "x.tar.gz"}
    answer = httpx.post(f"{multi.url}/models/x/invoke", json=asked, headers=target, timeout=60)
    assert answer.status_code == 200
    assert multi.ask("", "/models/y/invoke").status_code == 404
    full = multi.load("y", multi.folder / "y" / "model")
    assert full.status_code == 507
    assert "there is room for" in full.text
    assert resident([server]) == [server]  # nothing was stopped for it
    below = [server, *server.children(recursive=True)]
    assert multi.unload("x").status_code == 200
    assert resident(below) == []
    assert multi.unload("x").status_code == 404
    assert multi.load("y", multi.folder / "y" / "model").status_code == 200
    assert multi.unload("y").status_code == 200


def test_a_model_that_does_not_start_is_not_loaded(multi):
    answer = multi.load("faulty", multi.folder / "faulty" / "model")
    assert answer.status_code == 400
    assert "the weights are torn" in answer.text
    assert multi.get("/models").json() == {"models": []}


def test_a_call_that_does_not_wait(multi):
    url = multi.folder / "x" / "model"
    query = f"model_name=x&synchronous=false&url={url}"
    assert httpx.post(f"{multi.url}/models?{query}", timeout=60).status_code == 202
    assert multi.get("/models/x").json()["modelUrl"] == str(url)
    until(lambda: multi.states() == {"x": "READY"}, 120)
    assert multi.load("y", multi.folder / "y" / "model").status_code == 507
    assert multi.unload("x").status_code == 200
    faulty = {"model_name": "faulty", "url": str(multi.folder / "faulty" / "model")}
    told = httpx.post(f"{multi.url}/models", json=faulty | {"synchronous": False}, timeout=60)
    assert told.status_code == 202
    waited = multi.ask("faulty")
    assert (waited.status_code, "the weights are torn" in waited.text) == (503, True)
    until(lambda: multi.states() == {}, 120)
    assert multi.get("/models/faulty").status_code == 404


@pytest.mark.parametrize(
    ("method", "target", "code", "kind"),
    [
        ("POST", "/models", 400, "BadRequestException"),
        ("POST", "/models?model_name=z", 400, "BadRequestException"),
        ("POST", "/models?url=InvalidUrl", 400, "BadRequestException"),  # LMI makes a name of it
        # LMI: 404 ModelNotFoundException; SageMaker knows 409, 507 and 400 here
        ("POST", "/models?model_name=z&url=InvalidUrl", 400, "BadRequestException"),
        ("PUT", "/models", 405, "MethodNotAllowedException"),
        ("POST", "/models/noop", 405, "MethodNotAllowedException"),
        ("GET", "/models/InvalidModel", 404, "ResourceNotFoundException"),
        ("DELETE", "/models/fake", 404, "ResourceNotFoundException"),
        ("POST", "/models/fake/invoke", 404, None),
        ("POST", "/predictions/fake", 404, None),
        # LMI scales its workers: 404 for a model that is not there
        ("PUT", "/models/fake", 405, "MethodNotAllowedException"),
        ("GET", "/InvalidUrl", 404, None),
    ],
)
def test_refusals_are_those_of_lmi(multi, method, target, code, kind):
    """The calls of LMI's own tests of its management API, with the codes that these expect."""
    answer = httpx.request(method, multi.url + target, timeout=60)
    assert answer.status_code == code
    if kind:
        found = answer.json()
        assert (found["code"], found["type"]) == (code, kind)
        assert found["message"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"model_name": "z", "url": "/etc"}, "models may be under"),
        ({"model_name": "z", "url": "{folder}/../../../etc"}, "models may be under"),
        ({"model_name": "z", "url": "{folder}/nothing"}, "there is no such folder"),
        ({"model_name": "z", "url": "s3://bucket/z"}, "models may be under"),
        ({"model_name": "z", "url": "\0"}, "url="),
        ({"model_name": "z", "url": "x" * 1025}, "at most 1024"),
        ({"model_name": "a/b", "url": "{folder}/x"}, "model_name="),
        ({"model_name": "", "url": "{folder}/x"}, "model_name="),
        ({"model_name": 5, "url": "{folder}/x"}, "the body should be like"),
        ({}, "the body should be like"),
        ({"model_name": "z", "url": "x", "more": "y" * 70_000}, "at most 65536 bytes"),
    ],
)
def test_calls_that_are_refused(multi, body, why):
    body = {
        key: it.replace("{folder}", str(multi.folder)) if isinstance(it, str) else it
        for key, it in body.items()
    }
    answer = httpx.post(f"{multi.url}/models", json=body, timeout=60)
    assert answer.status_code == 400
    assert why in answer.text


def test_a_link_does_not_lead_out_of_the_roots(multi):
    (multi.folder / "link").symlink_to("/etc")
    assert multi.load("z", multi.folder / "link").status_code == 400
