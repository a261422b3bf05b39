# SPDX-License-Identifier: Apache-2.0
"""A client's retry of a request that is still being answered."""

import pytest

from serving.inference import coalescing
from tests.serving.conftest import running
from tests.serving.inference.test_queue import (
    ADAPTER,
    SHARE,
    WAIT,
    ask,
    filled,
    metric,
    prompts,
    queued,
)
from tests.serving.lora.test_registry import register, registry, write
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

ID = "X-Amzn-SageMaker-Inference-Id"


@pytest.fixture
async def deduplicated(served):
    before = await metric(served, "slipway_requests_deduplicated_total")

    async def count():
        return await metric(served, "slipway_requests_deduplicated_total") - before

    return count


async def leave(served, request):
    request.cancel()
    left = served.pipeline._coalescer._abandoned
    before = len(left)
    await until_async(lambda: len(left) > before)


async def test_a_retry_gets_the_answer_of_the_first(served, deduplicated):
    for path in ("/invocations", "/v1/completions"):
        served.engine.gate.clear()
        asked = [ask(served, {"prompt": f"wait {path}"}, path, **{ID: "1"})]
        await until_async(lambda: served.engine.running == 1)
        for number in range(2):
            asked.append(ask(served, {"prompt": f"wait {path}"}, path, **{ID: "1"}))
            await until_async(lambda n=number: served.pipeline._coalescer._following == n + 1)
        served.engine.gate.set()
        for it in asked:
            assert (await it).json()["choices"][0]["text"] == f"{path} wait"
    assert len(served.engine.bodies) == 2
    assert await deduplicated() == 4
    # Answered requests are forgotten.
    assert (await ask(served, **{ID: "1"})).status_code == 200
    assert (await ask(served, **{ID: "1"})).status_code == 200
    assert len(served.engine.bodies) == 4
    assert not served.pipeline._coalescer._shared


@pytest.mark.parametrize("finished", [False, True])
async def test_a_retry_of_a_client_that_left(served, deduplicated, finished):
    first = ask(served, **{ID: "1"})
    await until_async(lambda: served.engine.running == 1)
    await leave(served, first)
    if finished:
        served.engine.gate.set()
        await until_async(lambda: served.engine.running == 0)
    retry = ask(served, **{ID: "1"})
    if not finished:
        await until_async(lambda: served.pipeline._coalescer._following == 1)
        served.engine.gate.set()
    assert (await retry).json() == {"generated_text": "a wait"}
    assert len(served.engine.bodies) == 1
    assert await deduplicated() == 1
    assert not served.pipeline._coalescer._shared


async def test_retries_share_errors_too(served):
    inside, _ = await filled(served)
    waits = ask(served, {"inputs": "refuse"}, **{ID: "1"})
    await queued(served, 1)
    retry = ask(served, {"inputs": "refuse"}, **{ID: "1"})
    await until_async(lambda: served.pipeline._coalescer._following == 1)
    served.engine.gate.set()
    assert (await waits).json() == (await retry).json() == {"code": 424, "error": "not like this"}
    assert len(prompts(served)) == SHARE + 1
    for it in inside:
        await it


async def test_a_client_that_does_not_come_back(served, monkeypatch):
    monkeypatch.setattr(coalescing, "GRACE_S", 0.05)
    first = ask(served, **{ID: "1"})
    await until_async(lambda: served.engine.running == 1)
    first.cancel()
    await until_async(lambda: served.engine.running == 0)
    assert not served.pipeline._coalescer._shared
    assert await served.pipeline.admission.drained(60)


async def test_what_is_kept_for_clients_that_left_is_bounded(served, monkeypatch):
    monkeypatch.setattr(coalescing, "ABANDONED", 2)
    monkeypatch.setattr(coalescing, "LARGEST", 20)
    asked = []
    for number in range(4):
        asked.append(ask(served, {"inputs": f"wait {number}"}, **{ID: "1"}))
        await until_async(lambda n=number: served.engine.running == n + 1)
    for number, it in enumerate(asked):
        it.cancel()
        if number < 2:
            await until_async(lambda n=number: len(served.pipeline._coalescer._abandoned) == n + 1)
        else:
            await until_async(lambda n=number: served.engine.running == 5 - n)
    served.engine.gate.set()
    await until_async(lambda: not served.pipeline._coalescer._shared)  # too large to be kept


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"inputs": "wait b"}, {}),
        (WAIT, {ID: "2"}),
        (WAIT, {ID: "1" * 65}),
        (WAIT, {ADAPTER: "one"}),
        (WAIT, {"X-Tenant": "other"}),
        (WAIT, {"accept": "text/plain"}),
        (WAIT | {"stream": True}, {}),
    ],
)
async def test_what_is_not_the_same_is_not_shared(body, headers, tmp_path):
    async with running(cache_salt_header="X-Tenant") as served:
        engine = served.engine
        served.pipeline.adapters = registry(engine, tmp_path / "adapters", slots=(4, 4))
        await register(served, "one", write(tmp_path / "adapters" / "one"))
        common = {ID: "1", "X-Tenant": "mine"}
        asked = [ask(served, **common), ask(served, body, **common | headers)]
        if body.get("stream") or len(headers.get(ID, "")) > 64:
            asked.append(ask(served, body, **common | headers))
        await until_async(lambda: engine.running == len(asked))
        engine.gate.set()
        assert [(await it).status_code for it in asked] == [200] * len(asked)


async def test_sessions_are_not_mixed(served):
    new = {"X_Amzn_SageMaker_Session_Id": "NEW_SESSION"}
    asked = [ask(served, **{ID: "1"}, **new) for _ in range(2)]
    await until_async(lambda: served.engine.running == 2)
    served.engine.gate.set()
    sessions = [(await it).headers["x-amzn-sagemaker-session-id"].partition(";")[0] for it in asked]
    assert len(set(sessions)) == 2
    served.engine.gate.clear()
    asked = [ask(served, **{ID: "1"}, X_Amzn_SageMaker_Session_Id=it) for it in sessions]
    await until_async(lambda: served.engine.running == 2)
    served.engine.gate.set()
    assert [(await it).status_code for it in asked] == [200] * 2


async def test_a_stream_whose_client_leaves_ends_whatever_its_id(served):
    request = ask(served, WAIT | {"stream": True}, **{ID: "1"})
    await until_async(lambda: served.engine.running == 1)
    request.cancel()
    await until_async(lambda: served.engine.running == 0)
