# SPDX-License-Identifier: Apache-2.0
"""LMI's management API, as its own clients read it."""

import asyncio
import datetime

import pytest

from tests.serving.conftest import running
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio


def worker_number(res):
    """Counts workers as the client of LMI's integration tests does: groups, or workers in the first
    group.
    """
    groups = res[0]["models"][0]["workerGroups"]
    return len(groups), len(groups[0]["workers"])


async def test_the_model_is_described(shared):
    name = shared.settings.model_names[0]
    for path in (f"/models/{name}", "/models/lmi", f"/workflows/{name}"):
        answer = await shared.client.get(path)
        assert answer.status_code == 200
        assert worker_number(answer.json()) == (1, 1)
        (workflow,) = answer.json()
        (model,) = workflow["models"]
        assert model["modelName"] == workflow["workflowName"] == path.rpartition("/")[2]
        assert (model["status"], model["loadedAtStartup"]) == ("Healthy", True)
        assert model["queueSize"] == shared.settings.job_queue_size
        assert model["requestInQueue"] == 0
        (group,) = model["workerGroups"]
        assert group["device"] == {"deviceType": "cpu", "deviceId": -1}
        (worker,) = group["workers"]
        assert worker["status"] == "READY"
        started = datetime.datetime.strptime(worker["startTime"], "%Y-%m-%dT%H:%M:%S.%f%z")
        age = datetime.datetime.now(datetime.UTC) - started
        assert datetime.timedelta() <= age < datetime.timedelta(minutes=10)


async def test_the_model_is_listed(shared):
    name = shared.settings.names_in_paths[0]
    (model,) = (await shared.client.get("/models?limit=2&next_page_token=0")).json()["models"]
    assert model == {"modelName": name, "modelUrl": shared.settings.model_id, "status": "READY"}
    listed = (await shared.client.get("/workflows")).json()
    assert listed == {"workflows": [{"workflowName": name}]}


async def test_a_model_has_lmis_spelling_in_paths():
    async with running(served_model_name=("Qwen/Qwen3-0.6B", "über.all")) as it:
        (model,) = (await it.client.get("/models")).json()["models"]
        assert model["modelName"] == "Qwen_Qwen3_0_6B"
        for name in ("Qwen_Qwen3_0_6B", "über.all", "_ber_all"):
            (described,) = (await it.client.get(f"/models/{name}")).json()
            assert described["workflowName"] == name
            answer = await it.post(f"/predictions/{name}", {"inputs": "a b"})
            assert answer.json() == {"generated_text": "b a"}
        # A body names it as the engine does.
        for name, status in (("Qwen/Qwen3-0.6B", 200), ("Qwen_Qwen3_0_6B", 404)):
            answer = await it.post("/v1/completions", {"prompt": "a b", "model": name})
            assert answer.status_code == status


async def test_waiting_and_failing_requests_are_reported(served):
    waiting = [served.post("/invocations", {"inputs": "wait"}) for _ in range(8)]
    tasks = [asyncio.create_task(it) for it in waiting]
    await until_async(lambda: served.pipeline.waiting)
    (described,) = (await served.client.get("/models/lmi")).json()
    assert described["models"][0]["requestInQueue"] == served.pipeline.waiting > 0
    served.engine.gate.set()
    await asyncio.gather(*tasks)


async def test_an_unhealthy_model():
    async with running(error_rate_any=(1, 3600)) as it:
        for _ in range(3):
            await it.invoke({"prompt": "break"})
        assert (await it.client.get("/ping")).status_code == 503
        (described,) = (await it.client.get("/models/lmi")).json()
        assert described["models"][0]["status"] == "Unhealthy"


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("POST", "/models?url=s3://b/m&model_name=m", "models are not registered here"),
        ("POST", "/workflows?url=x", "there are no workflows here"),
        ("PUT", "/models/lmi?min_worker=2", "workers are not scaled here"),
        ("DELETE", "/models/lmi", "is not unloaded while the server runs"),
        ("DELETE", "/workflows/lmi", "is not unloaded while the server runs"),
        ("POST", "/server/logging?level=debug", "start with OPTION_LOG_LEVEL=DEBUG"),
    ],
)
async def test_calls_without_a_meaning_here_are_refused_by_name(shared, method, path, told):
    answer = await shared.client.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (409, 409)
    assert told in answer.json()["message"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_another_model_is_not_here(shared, method):
    answer = await shared.client.request(method, "/models/other")
    assert answer.status_code == 404
    assert answer.json()["type"] == "ResourceNotFoundException"
    assert "model 'other' is not here" in answer.json()["message"]


async def test_other_methods(shared):
    answer = await shared.client.patch("/models/lmi")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, PUT, DELETE, HEAD")


async def test_metrics_by_lmis_name(shared):
    answer = await shared.client.get("/server/metrics?name[]=slipway_requests_queued")
    assert answer.status_code == 200
    assert "slipway_requests_queued" in answer.text
    assert (await shared.client.get("/metrics")).text.startswith("# HELP")


async def test_predictions_without_a_model(shared):
    assert (await shared.post("/predictions", {"inputs": "a b"})).json() == {
        "generated_text": "b a"
    }


async def test_the_handler_header_is_no_clients(shared):
    for path in ("/invocations", "/predictions/lmi"):
        answer = await shared.post(path, {"inputs": "a"}, headers={"Handler": "register_adapter"})
        assert answer.status_code == 400
        assert "the header `handler`" in answer.json()["error"]
