# SPDX-License-Identifier: Apache-2.0
"""Records of requests: lines of the log, series, error rates. Only the engine is a fake."""

import asyncio
import logging
from typing import Any

import pytest
from prometheus_client import REGISTRY

from lmi_config.options.declared import Settings
from serving.errors import BadRequest, EngineFailed, NotReady, ServerFailed, TimedOut
from serving.exit import DIED, Exit
from serving.observability.error_rate import ErrorRates
from tests.serving.conftest import running
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

INFERENCE_ID = "X-Amzn-SageMaker-Inference-Id"
SECRET = "my very own prompt"


@pytest.fixture
def told(caplog):
    """The facts of the lines about requests so far."""
    caplog.set_level(logging.INFO, "serving.access")

    def facts():
        found = [record for record in caplog.records if record.name == "serving.access"]
        return [record.facts for record in found]

    return facts


async def logged(told, count=1):
    await until_async(lambda: len(told()) >= count)  # it is written once the answer has been sent
    assert len(told()) == count
    return told()[-1]


async def test_a_request_is_one_line_without_its_prompt(shared, told, caplog):
    assert (await shared.invoke({"inputs": SECRET})).status_code == 200
    facts = await logged(told)
    assert 0 < facts.pop("ms") < 10_000
    tokens = {name: facts.pop(f"{name}_tokens") for name in ("prompt", "cached", "completion")}
    assert tokens == {"prompt": 4, "cached": 0, "completion": 4}
    assert facts == {"method": "POST", "path": "/invocations", "status": 200}
    assert SECRET not in caplog.text


async def test_tokens_are_told_where_the_answer_has_them(shared, told):
    await shared.post("/v1/completions", {"prompt": "a b c"})
    facts = await logged(told)
    assert (facts["prompt_tokens"], facts["completion_tokens"]) == (3, 3)


async def test_probes_and_scrapes_leave_no_line(shared, told):
    await shared.client.get("/ping")
    await shared.client.get("/metrics")
    await shared.client.get("/nothing/of/the/sort")
    facts = await logged(told)
    assert (facts["path"], facts["status"], facts["error"]) == ("other", 404, "NotFound")


@pytest.mark.parametrize(
    ("headers", "known_as"),
    [
        ({INFERENCE_ID: "a-1", "x-request-id": "b"}, "a-1"),
        ({"x-request-id": "b:2/c"}, "b:2/c"),
        ({INFERENCE_ID: "with space", "x-request-id": "b"}, "b"),
        ({"x-request-id": "x" * 129}, None),
        ({}, None),
    ],
)
async def test_a_requests_id_is_the_clients_or_a_new_one(shared, headers, known_as):
    answer = await shared.invoke({"inputs": "a"}, headers=headers)
    found = answer.headers["x-request-id"]
    assert found == known_as if known_as else len(found) == 32
    assert shared.engine.request_ids[-1] == found


async def test_errors_have_the_id_too_and_their_lines_as_well(shared, told, caplog):
    answer = await shared.invoke({"inputs": "raise"}, headers={INFERENCE_ID: "broken"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "broken")
    assert (await logged(told))["error"] == "EngineFailed"


async def test_an_error_within_a_stream_is_told(shared, told):
    answer = await shared.invoke({"inputs": "a fault", "stream": True})
    assert answer.status_code == 200
    facts = await logged(told)
    assert (facts["status"], facts["error"]) == (200, "EngineFailed")


async def test_a_client_that_left_is_told(shared, told):
    asked = asyncio.create_task(shared.invoke({"inputs": "wait"}))
    await until_async(lambda: shared.engine.running == 1)
    asked.cancel()
    facts = await logged(told)
    assert (facts["status"], facts["complete"]) == (499, False)


async def test_a_request_that_is_cancelled_at_the_end_is_told(served, told):
    """Uvicorn cancels requests if the engine does not notice that the server stops."""

    async def hangs():
        await asyncio.Event().wait()

    served.engine.models = hangs
    asked = asyncio.create_task(served.client.get("/v1/models"))
    await until_async(lambda: len(served.server._http.server_state.tasks) == 1)
    served.server.stop()
    answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, 503)
    facts = await logged(told)
    assert (facts["path"], facts["status"], facts["error"]) == ("/v1/models", 503, "NotReady")


async def test_requests_are_counted_with_few_labels(shared):
    def count(path, status):
        labels = {"path": path, "adapter": "base", "status": status}
        return REGISTRY.get_sample_value("slipway_requests_total", labels) or 0

    names = ("/predictions/{model}", "2xx"), ("other", "4xx"), ("/invocations", "5xx")
    before = [count(*name) for name in names]
    await shared.post("/predictions/lmi", {"inputs": "a"})
    await shared.post("/some/name/of/an/attacker", {})
    await shared.invoke({"inputs": "break"})
    await until_async(lambda: [count(*name) for name in names] == [it + 1 for it in before])
    labels = {"path": "/predictions/{model}"}
    assert REGISTRY.get_sample_value("slipway_request_seconds_count", labels)


async def test_too_many_errors_of_the_engines_fail_ping_for_a_while():
    async with running(error_rate_model=(2, 1), error_rate_wlm=(0, 60)) as served:
        now = 0.0
        served.server.backend.error_rates._clock = lambda: now
        for order in ("refuse", "break", "refuse", "break"):
            await served.invoke({"inputs": order})
        assert (await served.client.get("/ping")).status_code == 200
        await served.invoke({"inputs": "raise"})
        ping = await served.client.get("/ping")
        assert ping.status_code == 503
        assert ping.json()["detail"] == (
            "more than 2 errors in 1 s; SERVING_ERROR_RATE_MODEL sets the limit"
        )
        assert (await served.invoke({"inputs": "a"})).status_code == 200
        now = 1.1
        assert (await served.client.get("/ping")).status_code == 200


async def test_requests_that_came_before_it_was_ready_do_not_count():
    async with running(wait=False, error_rate_any=(0, 60)) as served:
        served.may_start.clear()
        assert (await served.invoke({"inputs": "early"})).status_code == 503
        served.may_start.set()
        await served.ready()


async def test_with_fail_fast_they_end_the_server():
    async with running(error_rate_any=(0, 60), fail_fast=True) as served:
        await served.invoke({"inputs": "break"})
        end = await asyncio.wait_for(served.task, 15)
    assert end == Exit(
        DIED,
        "serving",
        "more than 0 errors in 60 s; SERVING_ERROR_RATE_ANY sets the limit, "
        "and SERVING_FAIL_FAST is set",
    )


@pytest.mark.parametrize(
    ("kind", "counted", "others"),
    [
        ("wlm", NotReady("full"), EngineFailed("x")),
        ("server", ServerFailed("x"), EngineFailed("x")),
        ("model", TimedOut(5), NotReady("full")),
        ("any", NotReady("full"), BadRequest("x")),
    ],
)
def test_each_kind_of_error_has_a_limit_of_its_own(kind, counted, others):
    now = [0.0]
    limit: dict[str, Any] = {f"error_rate_{kind}": (1, 10)}
    rates = ErrorRates(Settings(**limit), lambda: now[0])
    for _ in range(5):
        rates.count(others)
    rates.count(counted)
    assert not rates.exceeded()
    now[0] = 9
    rates.count(counted)
    assert rates.exceeded()
    now[0] = 11
    assert not rates.exceeded()
