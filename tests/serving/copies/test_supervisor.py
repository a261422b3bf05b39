# SPDX-License-Identifier: Apache-2.0
"""A container with two copies: its processes, and the effects of their ends."""

import json
import shutil
import signal
import sys
import time

import httpx
import psutil
import pytest

from serving.copies import life, supervisor
from serving.exit import Exit
from serving.kv_cache.cache_server import TERM_S
from serving.lifecycle import GRACE_S, SHUTDOWN
from tests.support.harness.process import AS_ENTRYPOINT_SH, Program
from tests.support.harness.wait import until
from tests.support.models import tiny

OURS = {"x-request-id": "a-clients"}
ASK = {"prompt": "a b", "max_tokens": 2}


class Container(Program):
    def __init__(self, folder, **environ):
        super().__init__(
            *(sys.executable, "-m", "tests.serving.copies.parts"),
            log=folder / "log",
            environ={
                **AS_ENTRYPOINT_SH,
                "OPTION_MODEL_ID": str(tiny.make()),
                "OPTION_COPIES": "2",
                "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
                **environ,
            },
        )

    def ready(self, seconds=120):
        """The supervisor notices it one look later than the router."""
        super().ready(seconds)

        def both():
            told = self.get("/metrics")
            return told.status_code == 401 or "slipway_copies_ready 2.0" in told.text

        until(both, 60)

    def ask(self, **headers):
        return httpx.post(f"{self.url}/v1/completions", json=ASK, headers=headers, timeout=20)

    def get(self, path, **headers):
        return httpx.get(self.url + path, headers=headers, timeout=20)

    def replicas(self):
        return self.get("/replicas").json()["replicas"]

    def ready_copies(self):
        return sum(it["state"] == "ready" for it in self.replicas())

    def both(self):
        """Whether both copies listen, and the router knows that they are ready."""
        if self.ready_copies() < 2:
            return False
        try:
            return len(self.parts()[1]) == 2
        except KeyError:
            return False

    def parts(self):
        """The router, and the copies."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            for it in child.net_connections():
                if it.status == "LISTEN":
                    found[it.laddr.port] = child
        ports = [int(it["replica"].rpartition(":")[2]) for it in self.replicas()]
        return found[self.port], [found[port] for port in ports]

    def lines(self):
        return [json.loads(it) for it in self.logged().splitlines() if it.startswith("{")]


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    with Container(tmp_path_factory.mktemp("copies")) as it:
        it.ready(120)
        yield it


def test_a_client_sees_one_server(container):
    assert container.ask().status_code == 200
    assert container.get("/ping").json()["detail"] == "2 of 2 copies are ready"
    assert container.get("/v1/models", **OURS).json()["data"][0]["id"]
    assert container.get("/nothing").status_code == 404
    (model,) = container.get("/models/lmi").json()[0]["models"]
    assert [it["id"] for it in model["workerGroups"][0]["workers"]] == [1, 2]
    assert container.get("/models/other").status_code == 404


def test_only_requests_of_clients_have_lines_and_each_has_one(container):
    answer = container.ask(**{"x-request-id": "the-one"})
    assert answer.status_code == 200

    def served():
        return [it for it in container.lines() if it["logger"] == "serving.access"]

    def own():
        return [it for it in served() if it["request_id"] == "the-one"]

    until(own, 10)
    models = {it["request_id"] for it in served() if it["path"] == "/v1/models"}
    assert models <= {*OURS.values()}  # and not those of the router's probes
    (line,) = own()
    assert line["copy"] in (0, 1)


def test_copies_answer_only_the_router(container):
    for it in container.replicas():
        assert httpx.post(f"{it['replica']}/v1/completions", json=ASK).status_code == 401


def test_metrics_are_those_of_all_with_the_copys_number(container):
    assert container.ask().status_code == 200
    until(lambda: "slipway_copies_ready 2.0" in container.get("/metrics").text, 60)
    text = container.get("/metrics").text
    assert "slipway_copies 2.0" in text
    for number in (0, 1):
        assert f'slipway_build_info{{copy="{number}"' in text
    assert "slipway_router_requests_total" in text


def test_a_copy_that_is_killed_comes_back_and_nothing_of_it_is_left(container):
    _, (victim, other) = container.parts()
    worker = next(it for it in victim.children() if it.name() == "sleep")
    victim.kill()
    statuses = []

    def ended():
        statuses.append(container.ask().status_code)
        return "a copy has ended" in container.logged()

    until(ended, 60)
    assert not worker.is_running()
    assert other.is_running()
    (told,) = [it for it in container.lines() if "copy has ended" in it["message"]]
    assert told["code"] == -9
    restarts = f'slipway_copy_restarts_total{{copy="{told["copy"]}"}} 1.0'
    until(lambda: restarts in container.get("/metrics").text, 30)
    until(lambda: ended() and container.both(), 60)
    assert {*statuses} == {200}


def test_connections_wait_while_the_router_starts_again(container):
    router, copies = container.parts()
    router.kill()
    assert container.get("/ping").status_code in (200, 503)
    until(lambda: container.get("/ping").status_code == 200, 30)
    assert container.ask().status_code == 200
    assert all(it.is_running() for it in copies)


def test_a_port_that_is_taken_ends_the_start(container, tmp_path):
    second = Container(tmp_path, OPTION_PORT=str(container.port))
    second.start()
    assert second.process.wait(60) == 3
    assert "cannot listen on port" in second.lines()[-1]["reason"]


def test_a_stop_finishes_what_is_under_way(container):
    """The last test with this container."""
    asked = {"prompt": "wait", "max_tokens": 2}
    began = time.monotonic()
    with pytest.raises(httpx.HTTPError), httpx.Client(timeout=0.5) as client:
        client.post(f"{container.url}/v1/completions", json=asked)
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(35) == 0
    assert time.monotonic() - began < 30
    assert container.lines()[-1]["message"] == "stopped"


def test_a_copy_that_cannot_start_ends_the_container_with_its_reason(tmp_path):
    with Container(tmp_path, COPY_FAILS="1") as it:
        assert it.process.wait(120) == 3
        last = it.lines()[-1]
        assert (last["message"], last["stage"]) == ("failed", "start")
        assert last["reason"] == "copy 1: CUDA out of memory"
        assert "copy" not in last


def test_a_copy_of_changed_files_has_no_tiers(tmp_path):
    """Tiers have KV of the files that the container started with."""
    model = tmp_path / "model"
    shutil.copytree(tiny.make(), model)
    with Container(tmp_path, OPTION_MODEL_ID=str(model)) as it:
        it.ready(120)
        it.parts()[1][0].kill()
        until(lambda: "a copy has ended" in it.logged() and it.both(), 60)
        assert supervisor.CHANGED not in it.logged()
        weights = next(model.glob("*.safetensors"))
        weights.with_suffix(".new").write_bytes(weights.read_bytes())
        weights.with_suffix(".new").replace(weights)
        it.parts()[1][1].kill()
        until(lambda: f"without tiers: {supervisor.CHANGED}" in it.logged(), 60)
        (told,) = [line for line in it.lines() if line["message"].startswith("copy 1 starts")]
        assert (told["level"], "restart the container" in told["message"]) == ("error", True)


ITS_DEVICE = {"COPY_FAILS": "1", "COPY_FAULT": "CUDA error: uncorrectable ECC error encountered"}


def test_a_copy_whose_device_has_failed_is_left_out_and_everybody_is_told(tmp_path):
    with Container(tmp_path, **ITS_DEVICE) as it:
        Program.ready(it, 120)
        assert it.get("/ping").json()["detail"] == "1 of 2 copies are ready"
        assert it.ask().status_code == 200
        (told,) = [line for line in it.lines() if "left out" in line["message"]]
        assert (told["level"], told["copy"]) == ("error", 1)
        assert ITS_DEVICE["COPY_FAULT"] in told["message"]
        until(lambda: '"copies": 1' in it.logged(), 30)
        until(lambda: 'slipway_copy_left_out{copy="1"} 1.0' in it.get("/metrics").text, 30)
        assert "slipway_copies 2.0" in it.get("/metrics").text
        rows = {row["copy"]: row for row in it.get("/ui/status").json()["replicas"]}
        assert rows[0]["state"] == "ready"
        assert rows[1]["state"] == "failed"
        assert rows[1]["detail"] == f"left out: {ITS_DEVICE['COPY_FAULT']}"
        (model,) = it.get("/models/lmi").json()[0]["models"]
        workers = model["workerGroups"][0]["workers"]
        assert [(worker["id"], worker["status"]) for worker in workers] == [
            *((1, "READY"), (2, "FAILED"))
        ]


@pytest.mark.parametrize(
    ("environ", "last"),
    [
        ({"OPTION_COPIES_LEAST": "2"}, "copy 1: "),
        ({"SERVING_FAIL_FAST": "true"}, "copy 1: "),
        ({"COPY_FAILS": "0,1"}, "copy "),
    ],
)
def test_a_device_that_has_failed_ends_a_container_that_needs_it(tmp_path, environ, last):
    with Container(tmp_path, **{**ITS_DEVICE, **environ}) as it:
        assert it.process.wait(120) == 3
        assert it.lines()[-1]["stage"] == "start"
        assert it.lines()[-1]["reason"].startswith(last)
        assert ITS_DEVICE["COPY_FAULT"] in it.lines()[-1]["reason"]
        assert "CUDA_VISIBLE_DEVICES" in it.lines()[-1]["fix"]


def test_fail_fast_ends_the_container_with_its_first_copy(tmp_path):
    with Container(tmp_path, SERVING_FAIL_FAST="true") as it:
        it.ready(120)
        it.parts()[1][1].kill()
        assert it.process.wait(60) == 1
        assert it.lines()[-1]["reason"].endswith("exit code -9, and SERVING_FAIL_FAST is set")


def test_copies_that_end_again_and_again_are_left_out_until_there_is_none(tmp_path):
    may_end = tmp_path / "may"
    with Container(tmp_path, COPIES_END=str(may_end)) as it:
        it.ready(120)
        may_end.touch()
        _, copies = it.parts()
        copies[0].kill()
        until(lambda: "is left out" in it.logged(), 120)
        assert it.get("/ping").status_code == 200
        assert it.ask().status_code == 200
        copies[1].kill()
        assert it.process.wait(120) == 1
        assert it.lines()[-1]["reason"].startswith("no copy can serve: copy ")


def test_fewer_copies_than_there_have_to_be_end_the_container(tmp_path):
    may_end = tmp_path / "may"
    environ = {"OPTION_COPIES_LEAST": "2", "PATIENCE_S": "3", "COPIES_END": str(may_end)}
    with Container(tmp_path, **environ) as it:
        it.ready(120)
        may_end.touch()
        it.parts()[1][1].kill()
        until(lambda: it.get("/ping").status_code == 503, 30)
        assert it.process.wait(60) == 1
        assert it.lines()[-1]["reason"] == "1 of 2 copies has been ready for 3 s"


def test_the_router_checks_keys_and_the_operators_secret_closes_the_container(tmp_path):
    secret, key = "s" * 40, "k" * 20
    with Container(tmp_path, OPTION_ROUTER_SECRET=secret, OPTION_ADMIN_API_KEY=key) as it:
        it.ready(120)
        assert it.ask().status_code == 401
        assert it.ask(authorization=f"Bearer {key}").status_code == 200
        assert secret not in it.logged()


def test_an_orderly_end_takes_less_than_platforms_allow():
    whole = life.ROUTER_S + life.SERVERS_S + TERM_S + SHUTDOWN.log
    assert whole < GRACE_S - 0.5


@pytest.mark.parametrize(("code", "container"), [(-9, 1), (0, 1), (3, 3)])
def test_a_signal_is_no_exit_code(code, container):
    """The supervisor applies this to the router and to the copies."""
    assert life.exit_code(Exit(code, "serving"), 1) == container
