# SPDX-License-Identifier: Apache-2.0
"""A real Envoy in front of two real engines, which asks `route --epp` where to send requests, and
beside it the same router's proxy.
"""

import random
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import Served, serving
from tests.gateway import gateway
from tests.support.harness import metrics, ports
from tests.support.harness.process import cpu_seconds
from tests.support.harness.wait import until
from tests.support.models import tiny_lora

DOCUMENTS, QUESTIONS = 12, 4
SENTENCE = "The import statement is one of many that bind names. "
SERIES = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")


@pytest.fixture(scope="module")
def fleet(tiny_options, tmp_path_factory):
    """Two engines, a router that is also a picker, and Envoy."""
    folder = tmp_path_factory.mktemp("gateway")
    tiny_lora.write(folder / "one", 1)
    lora = {"OPTION_ENABLE_LORA": "true", "OPTION_ADAPTER_ROOTS": str(folder)}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(serving(folder / f"log-{n}", **tiny_options, **lora))
            for n in range(2)
        ]
        for it in engines:
            it.ready()
        port = ports.free()
        options = {
            "OPTION_ROUTER_REPLICAS": ",".join(it.url for it in engines),
            "OPTION_EPP": "true",
            "OPTION_EPP_PORT": str(port),
        }
        command = ("./entrypoint.sh", "route")
        routed = stack.enter_context(serving(folder / "router", *command, **options))
        routed.ready()
        until(lambda: routed.client.get("/ping").json()["detail"].startswith("2"))
        envoy = stack.enter_context(gateway(folder, port, [it.port for it in engines]))
        yield engines, routed, envoy


@pytest.fixture
def client(fleet):
    with httpx.Client(base_url=fleet[2].url, timeout=120) as it:
        yield it


def test_the_apis_are_those_of_one_server(fleet, client, tiny_options):
    name = tiny_options["OPTION_MODEL_ID"]
    message: Any = {"role": "user", "content": "Hi"}
    with openai.OpenAI(base_url=f"{fleet[2].url}/v1", api_key="none", max_retries=0) as api:
        whole = api.chat.completions.create(model=name, messages=[message], max_tokens=4)
        assert whole.usage
        assert whole.usage.completion_tokens == 4
        stream = api.chat.completions.create(
            model=name, messages=[message], max_tokens=4, stream=True, temperature=0
        )
        chunks: list[Any] = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert len(chunks) > 1
        assert api.completions.create(model=name, prompt="Hi", max_tokens=3).choices[0].text
        assert api.models.list().data
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 3}}
    assert client.post("/invocations", json=body).json()["generated_text"]
    assert client.post("/invocations", json={"inputs": 5}).status_code == 424


def test_adapters_are_registered_everywhere(fleet, client):
    engines = fleet[0]
    source = {"name": "one", "src": str(engines[0].log.parent / "one")}
    assert client.post("/adapters", params=source).status_code == 200
    for it in engines:
        assert it.client.get("/adapters/one").status_code == 200
    body = {"inputs": "Hi", "adapters": "one", "parameters": {"max_new_tokens": 2}}
    assert all(client.post("/invocations", json=body).status_code == 200 for _ in range(4))
    assert client.delete("/adapters/one").status_code == 200


def test_a_session_goes_where_it_began(client):
    for _ in range(3):
        answer = client.post("/invocations", json={"requestType": "NEW_SESSION"})
        session = answer.headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]
        header = {"X-Amzn-SageMaker-Session-Id": session}
        body = {"inputs": "Hi", "parameters": {"max_new_tokens": 1}}
        for _ in range(4):
            assert client.post("/invocations", json=body, headers=header).status_code == 200


def test_as_much_is_cached_as_with_the_proxy(fleet, client, record_property):
    """The same documents and questions for both; the beginning of a document tells them apart."""
    engines, routed, envoy = fleet
    shares, costs = {}, {}
    for way, it in (("gateway", client), ("proxy", routed.client)):
        draw = random.Random(3)
        asked = [n for n in range(DOCUMENTS) for _ in range(QUESTIONS)]
        draw.shuffle(asked)
        before = [counted(engines, name) for name in SERIES]
        programs = [routed.own, *([envoy.own] if way == "gateway" else [])]
        began = cpu_seconds(programs)
        for number, n in enumerate(asked):
            prompt = f"{way} {n:02}: {SENTENCE * 60} Question {number}?"
            answer = it.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
        costs[way] = (cpu_seconds(programs) - began) / len(asked)
        after = [counted(engines, name) for name in SERIES]
        hits, queries = (now - was for now, was in zip(after, before, strict=True))
        shares[way] = hits / queries
    record_property("cached", shares)
    record_property("cpu_seconds_a_request", costs)
    assert shares["proxy"] > 0.6
    assert shares["gateway"] == pytest.approx(shares["proxy"], abs=0.03)
    text = routed.client.get("/metrics").text
    assert metrics.total(text, "slipway_router_usage_tokens_total") > DOCUMENTS * QUESTIONS


def counted(engines: list[Served], series: str) -> float:
    for it in engines:
        it.counted()
    return sum(it.total(series) for it in engines)
