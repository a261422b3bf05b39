# SPDX-License-Identifier: Apache-2.0
"""The server's spans, as a collector gets them. Only the engine is a fake."""

import subprocess
import sys

import pytest
from prometheus_client import REGISTRY, Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.collector import collecting
from tests.serving.conftest import running
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

SECRET = "my very own prompt"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "some=thing"}


@pytest.fixture
async def traced(monkeypatch):
    """A server that sends spans, its collector, and the headers that its engine gets."""
    with collecting() as collector:
        for name, value in collector.environ().items():
            monkeypatch.setenv(name, value)
        async with running(otlp_traces_endpoint=f"{collector.http}/v1/traces") as it:
            yield it, collector, it.engine.calls


async def spans(collector, count):
    await until_async(lambda: len(collector.of(TRACE)) >= count)
    found = collector.of(TRACE)
    assert len(found) == count, [it.name for it in found]
    return found


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/invocations", {"inputs": SECRET}, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}, "chat"),
        ("/v1/completions", {"prompt": SECRET, "stream": True}, "text_completion"),
    ],
)
async def test_a_request_is_a_span_with_its_parts(traced, path, body, operation):
    it, collector, heard = traced
    assert (await it.post(path, body, headers=HEADERS)).status_code == 200
    root, _, engine = found = await spans(collector, 3)
    assert [it.name for it in found] == [f"POST {path}", "queue", f"{operation} model"]
    assert [it.parent for it in found] == [PARENT, root.id, root.id]
    assert {it.service for it in found} == {"slipway"}
    times = [(it.span.start_time_unix_nano, it.span.end_time_unix_nano) for it in found]
    assert times[0][0] <= times[1][0] <= times[1][1] <= times[2][0] <= times[2][1] <= times[0][1]
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["http.route"] == path
    assert engine.attributes == {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "model",
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    (call,) = heard
    assert call.trace == {
        "traceparent": f"00-{TRACE}-{engine.id}-01",
        "tracestate": "some=thing",
    }
    assert not any(it.failed for it in found)
    assert SECRET not in str([it.span for it in found])


@pytest.mark.parametrize(
    ("prompt", "status", "error", "failed"),
    [
        ("refuse", 400, "BadRequest", ("text_completion model",)),
        ("break", 500, "EngineFailed", ("POST /v1/completions", "text_completion model")),
    ],
)
async def test_what_went_wrong_is_in_the_spans(traced, prompt, status, error, failed):
    it, collector, _ = traced
    answer = await it.post("/v1/completions", {"prompt": prompt}, headers=HEADERS)
    assert answer.status_code == status
    root, *_ = found = await spans(collector, 3)
    assert tuple(it.name for it in found if it.failed) == failed
    assert (root.attributes["error.type"], root.attributes["http.response.status_code"]) == (
        error,
        status,
    )


OPENMETRICS = {"accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3"}


async def test_series_name_the_traces_that_are_sent(traced):
    it, *_ = traced
    unsent = TRACE[::-1]
    for trace, flags in ((TRACE, "01"), (unsent, "00")):
        headers = {"traceparent": f"00-{trace}-{PARENT}-{flags}"}
        await it.post("/v1/completions", {"prompt": "a"}, headers=headers)
    engines = Counter("vllm:tokens", "The colon is part of the name.")
    try:
        answer = await it.client.get("/metrics", headers=OPENMETRICS)
    finally:
        REGISTRY.unregister(engines)
    kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.headers["content-type"] == kind
    found = {it.name: it.samples for it in text_string_to_metric_families(answer.text)}
    assert "vllm:tokens_total" in {it.name for it in found["vllm:tokens"]}
    named = [it.exemplar.labels for it in found["slipway_request_seconds"] if it.exemplar]
    assert {"trace_id": TRACE} in named
    assert unsent not in answer.text
    plain = await it.client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert TRACE not in plain.text


def test_without_an_endpoint_what_makes_spans_is_not_even_imported():
    code = (
        "import sys, serving.router.workers, serving.server.server\n"
        "names = 'opentelemetry.sdk.trace', 'opentelemetry.exporter'\n"
        "sys.exit(str([name for name in sys.modules if name.startswith(names)]).strip('[]') or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
