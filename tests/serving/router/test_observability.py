# SPDX-License-Identifier: Apache-2.0
"""The router's records of a request: its line in the log, its spans at a collector."""

import asyncio
import logging
import re

import pytest
from prometheus_client import REGISTRY

from serving.router.placement import CLIENT_LEFT
from tests.collector import collecting
from tests.serving.access.test_access import SECRET as SHARED
from tests.serving.access.test_access import bearer, written
from tests.serving.router.conftest import END, STREAM, chunk, routing, sends, whole
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

SECRET = "my very own prompt"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
REFUSAL = whole(503, b"{}")


@pytest.fixture
def lines(caplog):
    """The facts of the lines about requests so far."""
    caplog.set_level(logging.INFO, "serving.access")
    return lambda: [it.facts for it in caplog.records if it.name == "serving.access"]


async def logged(lines):
    await until_async(lines)
    (facts,) = lines()
    return facts


@pytest.fixture
def collector(monkeypatch):
    with collecting() as it:
        for name, value in it.environ().items():
            monkeypatch.setenv(name, value)
        yield it


async def spans(collector, trace, count):
    await until_async(lambda: len(collector.of(trace)) >= count)
    found = collector.of(trace)
    assert len(found) == count, [it.name for it in found]
    return found


async def test_a_request_is_one_line(tmp_path, lines, caplog):
    keys = written(tmp_path / "keys.json")
    async with routing(
        2, routing_strategy="roundrobin", api_keys_file=keys, router_secret=SHARED
    ) as it:
        it.fleet[0].answer = it.fleet[1].answer = sends(STREAM + chunk(b"data: 1\n\n") + END)
        body = b'{"prompt": "%b", "stream": true}' % SECRET.encode()
        answer = await it.post(body, "/predictions/whatever", headers=bearer("team-a"))
        assert answer.status_code == 200
        facts = await logged(lines)
        assert 0 < facts.pop("first_byte_ms") <= facts.pop("ms") < 10_000
        assert facts.pop("replica") in [replica.url for replica in it.fleet]
        assert facts == {
            "method": "POST",
            "path": "/predictions/{model}",
            "status": 200,
            "end": "finished",
            "strategy": "roundrobin",
            "attempts": 1,
            "bytes_in": len(body),
            "bytes_out": len(chunk(b"data: 1\n\n") + END),
            "key": "team-a",
            "tenant": "team-a",
        }
        assert SECRET not in caplog.text
        assert "whatever" not in caplog.text


async def refuse(it):
    it.fleet[0].answer = sends(REFUSAL)
    return await it.post({"prompt": "a"})


async def be_unreachable(it):
    it.fleet[0].answer = lambda *_: it.fleet[0].stop()
    return await it.post({"prompt": "a"})


async def leave(it):
    it.fleet[0].answer = sends(then_s=60)
    _, writer = await it.raw(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    )
    await until_async(lambda: it.fleet[0].asked)
    writer.close()


async def be_cut(it):
    async def answer(replica, asked, writer):
        writer.write(STREAM + chunk(b"data: 1\n\n"))
        await writer.drain()
        await asyncio.sleep(0.05)
        await replica.stop()

    it.fleet[0].answer = answer
    with pytest.raises(Exception, match=r"closed|incomplete"):
        await it.post({"prompt": "a"})


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        (refuse, {"status": 503, "end": "finished"}),
        (be_unreachable, {"status": 502, "end": "failed", "error": "ReplicaFailed"}),
        (leave, {"status": CLIENT_LEFT, "end": "cancelled"}),
        (be_cut, {"status": 200, "end": "cut"}),
    ],
)
async def test_how_a_request_ended_is_in_its_line(happens, expected, lines):
    async with routing(1) as it:
        await happens(it)
        facts = await logged(lines)
        assert {name: facts.get(name) for name in expected} == expected
        assert ("error" in facts) == ("error" in expected)


async def test_the_line_can_be_left_out(lines):
    async with routing(1, router_access_log=False) as it:
        assert (await it.post({"prompt": "a"})).status_code == 200
    assert not lines()


async def test_a_retried_request_is_a_trace_from_the_client_to_the_replica(collector, lines):
    async with routing(
        2, routing_strategy="roundrobin", otlp_traces_endpoint=f"{collector.http}/v1/traces"
    ) as it:
        answers = iter((sends(REFUSAL), None))

        async def first_refused(replica, asked, writer):
            answer = next(answers)
            await (answer or sends(whole(200, b"{}")))(replica, asked, writer)

        it.fleet[0].answer = it.fleet[1].answer = first_refused
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "some=thing"}
        assert (await it.post({"prompt": SECRET}, headers=headers)).status_code == 200
        assert (await logged(lines))["trace_id"] == TRACE
        accept = {"accept": "application/openmetrics-text"}
        series = (await it.client.get("/metrics", headers=accept)).text
        assert f'# {{trace_id="{TRACE}"}}' in series
        found = await spans(collector, TRACE, 5)
        asked = sorted(
            (asked for at in it.fleet for asked in at.asked),
            key=lambda it: it.headers["traceparent"],
        )
    root, *parts = found
    assert [it.name for it in found] == ["POST /v1/completions", *("choose", "POST") * 2]
    assert root.parent == PARENT
    assert {it.parent for it in parts} == {root.id}
    assert {it.service for it in found} == {"slipway-router"}
    for part in parts:
        assert root.span.start_time_unix_nano <= part.span.start_time_unix_nano
        assert part.span.end_time_unix_nano <= root.span.end_time_unix_nano
    attempts = [it for it in parts if it.name == "POST"]
    assert [it.attributes["http.response.status_code"] for it in attempts] == [503, 200]
    assert [it.attributes.get("http.request.resend_count") for it in attempts] == [None, 1]
    assert [it.failed for it in (root, *attempts)] == [False, True, False]
    sent = sorted(f"00-{TRACE}-{it.id}-01" for it in attempts)
    assert [it.headers["traceparent"] for it in asked] == sent
    assert {it.headers["tracestate"] for it in asked} == {"some=thing"}
    assert root.attributes["http.route"] == "/v1/completions"
    assert root.attributes["slipway.attempts"] == 2
    assert SECRET not in str([it.span for it in found])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("traceparent", f"00-{TRACE}-{PARENT}")],
        [("traceparent", f"ff-{TRACE}-{PARENT}-01")],
        [("traceparent", f"00-{'0' * 32}-{PARENT}-01")],
        [("traceparent", f"00-{TRACE}-{PARENT}-01")] * 2,
        [("traceparent", "\xff" * 1000), ("tracestate", "=,=")],
    ],
)
async def test_a_context_that_is_none_begins_a_trace(collector, lines, headers):
    async with routing(1, otlp_traces_endpoint=f"{collector.http}/v1/traces") as it:
        raw = [(name, value.encode("latin-1")) for name, value in headers]
        assert (await it.post({"prompt": "a"}, headers=raw)).status_code == 200
        trace = (await logged(lines))["trace_id"]
        assert trace != TRACE
        root, *_ = await spans(collector, trace, 3)
        assert root.parent == ""
        (asked,) = it.fleet[0].asked
        assert asked.headers["traceparent"].startswith(f"00-{trace}-")
        assert "tracestate" not in asked.headers


async def test_what_is_not_sampled_is_passed_on_and_not_sent(collector, lines):
    async with routing(1, otlp_traces_endpoint=f"{collector.http}/v1/traces") as it:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert (await it.post({"prompt": "a"}, headers=headers)).status_code == 200
        assert (await logged(lines))["trace_id"] == TRACE
        (asked,) = it.fleet[0].asked
        assert asked.headers["traceparent"].startswith(f"00-{TRACE}-")
        assert asked.headers["traceparent"].endswith("-00")
    assert collector.spans == []


async def test_a_drain_sends_what_is_there_also_over_grpc(collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named")
    async with routing(1, otlp_traces_endpoint=collector.grpc) as it:
        assert (await it.post({"prompt": "a"})).status_code == 200
        assert collector.spans == []
    assert {it.service for it in collector.spans} == {"named"}
    assert len(collector.spans) == 3


async def test_a_collector_that_is_away_costs_spans_and_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    async with routing(1, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as it:

        def warned():
            return [
                it for it in caplog.records if it.name.startswith(("opentel", "serving.observ"))
            ]

        for _ in range(3):
            assert (await it.post({"prompt": "a"})).status_code == 200
            await until_async(warned)
            await asyncio.sleep(0.1)
        (line,) = warned()
        assert "traces are lost" in line.getMessage()


MEASURED = (
    'vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 1000.0\n'
    'vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 2.0\n'
    'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
)
"""A replica that computes 500 prompt tokens in a second."""


async def series(it, name):
    """The values of a series, by their replicas, or by "" for a series without replicas."""
    text = (await it.client.get("/metrics")).text
    return {
        dict(re.findall(r'(\w+)="([^"]*)"', labels or "")).get("replica", ""): float(value)
        for found, labels, value in re.findall(r"^(\w+)(\{.*\})? (\S+)$", text, re.MULTILINE)
        if found == name
    }


async def test_what_waits_is_told_in_tokens_and_in_seconds():
    prompt = "a" * 4000  # 1,000 tokens
    async with routing(2, wait=False, router_hold=60) as it:
        one, other = it.fleet
        one.tiers = MEASURED
        await it.ready()
        one.answer = other.answer = sends(then_s=60)
        assert await series(it, "slipway_router_backlog_tokens") == {one.url: 0, other.url: 0}
        asked = [
            asyncio.create_task(it.post({"prompt": f"{n}{prompt}", "stream": True}))
            for n in range(2)
        ]
        await until_async(lambda: one.asked and other.asked)
        tokens = await series(it, "slipway_router_backlog_tokens")
        assert tokens == pytest.approx({one.url: 1000, other.url: 1000}, rel=0.01)
        # The other one's rate is unknown, so the mean of all others is used.
        seconds = await series(it, "slipway_router_backlog_seconds")
        assert seconds == pytest.approx({one.url: 2, other.url: 2}, rel=0.01)
        rates = await series(it, "slipway_router_prefill_tokens_per_second")
        assert rates == {one.url: 500, other.url: 0}
        assert await series(it, "slipway_router_kv_usage") == {one.url: 0.25}
        assert await series(it, "slipway_router_held_seconds") == {"": 0}
        for fake in it.fleet:
            await fake.stop()
        await asyncio.gather(*asked, return_exceptions=True)
        await it.ready(0)
        # The last known rate is kept for requests that wait for a server.
        held = asyncio.create_task(it.post({"prompt": prompt}))
        await until_async(lambda: len(it.router.routing.held) == 1)
        (waits,) = (await series(it, "slipway_router_held_seconds")).values()
        assert 2 <= waits <= 2.2
        held.cancel()
        await until_async(lambda: not len(it.router.routing.held))


async def test_hints_of_requests_are_counted_each_once():
    def counted(field, taken):
        labels = {"field": field, "taken": taken}
        return REGISTRY.get_sample_value("slipway_cache_hints_total", labels) or 0

    async with routing(1) as it:
        await it.client.get("/metrics")
        before = counted("x-session-id", "true"), counted("session_id", "false")
        for body in ({}, {}, {"session_id": "a" * 300}):
            headers = {} if body else {"x-session-id": "s"}
            await it.post({"prompt": "a", **body}, headers=headers)
        await it.client.get("/metrics")
        after = counted("x-session-id", "true"), counted("session_id", "false")
        assert after == (before[0] + 2, before[1] + 1)
        await it.client.get("/metrics")
        assert after == (counted("x-session-id", "true"), counted("session_id", "false"))
