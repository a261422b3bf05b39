# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker, asked by a real Envoy, which sends requests to the picked replicas."""

import asyncio
import json
import logging
import random
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from serving.protocol import IDENTITY
from serving.router import placement
from serving.router.epp.answer_usage import Usage, UsageReader
from serving.router.http import buffers
from serving.router.metrics import CACHED_TOKENS, PROMPT_TOKENS, RETRIES, USAGE
from serving.router.policy import candidates
from tests.collector import collecting
from tests.gateway import gateway
from tests.serving.access.test_access import SECRET, bearer, written
from tests.serving.access.test_objectives import manifest
from tests.serving.router.conftest import (
    END,
    STREAM,
    FakeReplica,
    Routed,
    chunk,
    routing,
    sends,
    whole,
)
from tests.serving.router.test_prefill import FETCHED, Divided, breaks, divided, ended, long
from tests.support.harness import ports
from tests.support.harness.process import AS_ENTRYPOINT_SH, Program
from tests.support.harness.wait import until, until_async

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
SERVING, NOT_SERVING = 1, 2

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def through_envoy(
    folder: Path,
    count: int = 2,
    *,
    wait: bool = True,
    envoy: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> AsyncIterator[Routed]:
    port = ports.free()
    async with routing(count, wait=wait, epp=True, epp_port=port, **more) as it:
        with gateway(folder, port, [replica.port for replica in it.fleet], **envoy) as program:
            await it.client.aclose()
            it.client = httpx.AsyncClient(base_url=program.url, timeout=20)
            yield it


def counted(counter: Any, *labels: str) -> float:
    return float((counter.labels(*labels) if labels else counter)._value.get())


async def idle(it: Routed) -> None:
    """Wait until the picker has no request in flight."""
    await until_async(
        lambda: all(
            (replica.in_flight, replica.queued, replica.context) == (0, 0, 0)
            for replica in it.router.pool.replicas
        )
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/invocations", {"inputs": "Hi"}),
    ],
)
async def test_a_request_reaches_a_replica_and_its_answer_the_client(tmp_path, path, body):
    async with through_envoy(tmp_path) as it:
        answer = await it.post(body, path, headers={"X-Request-Id": "one"})
        assert answer.status_code == 200
        (asked,) = [asked for replica in it.fleet for asked in replica.asked]
        assert (asked.target, asked.json(), asked.headers["x-request-id"]) == (path, body, "one")
        assert answer.headers["x-request-id"] == "one"
        await idle(it)
        done = {(status, how) for _, status, how in it.router.routing.tally.requests}
        assert done == {(200, "finished")}


async def test_a_request_is_one_line_and_a_trace(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "serving.access")
    trace, parent = "4" * 32, "7" * 16
    with collecting() as collector:
        for name, value in collector.environ().items():
            monkeypatch.setenv(name, value)
        url = f"{collector.http}/v1/traces"
        async with through_envoy(tmp_path, 1, otlp_traces_endpoint=url) as it:
            headers = {"traceparent": f"00-{trace}-{parent}-01"}
            answer = await it.post({"prompt": "Hi"}, "/v1/completions", headers=headers)
            assert answer.status_code == 200
            await idle(it)
            (asked,) = it.fleet[0].asked
            await until_async(lambda: len(collector.of(trace)) == 2)
        assert asked.headers["traceparent"].split("-")[1] == trace
    root, choose = collector.of(trace)
    assert (root.name, choose.name, choose.parent) == ("POST /v1/completions", "choose", root.id)
    assert root.attributes["http.response.status_code"] == 200
    (facts,) = [it.facts for it in caplog.records if it.name == "serving.access"]
    expected = {"status": 200, "end": "finished", "replica": it.fleet[0].url, "trace_id": trace}
    assert {name: facts[name] for name in expected} == expected
    assert facts["bytes_out"] == len(answer.content)


async def test_a_request_waits_until_a_replica_has_room(tmp_path):
    async with through_envoy(tmp_path, 1, wait=False, router_hold=60) as it:
        it.fleet[0].tiers = "slipway_request_slots 1"
        await it.ready()
        go = asyncio.Semaphore(0)

        async def answer(replica, asked, writer):
            await go.acquire()
            writer.write(whole(200, b"{}", "connection: close"))

        it.fleet[0].answer = answer
        asked = []
        for count in range(4):
            asked.append(asyncio.create_task(it.post({"prompt": f"{count}"})))
            await until_async(lambda n=count: len(it.router.routing.held) == n)
            await until_async(lambda: len(it.fleet[0].asked) == 1)
        gone = asked.pop(1)
        gone.cancel()
        await until_async(lambda: len(it.router.routing.held) == 2)
        for _ in asked:
            go.release()
        answers = [await found for found in asked]
        assert [found.status_code for found in answers] == [200] * 3
        assert [request.json()["prompt"] for request in it.fleet[0].asked] == ["0", "2", "3"]
        assert ["x-slipway-held-ms" in found.headers for found in answers] == [False, True, True]
        await idle(it)


async def test_keys_are_held_to_their_limits(tmp_path):
    limits = {"requests_per_minute": 4, "concurrent_requests": 1}
    options = {
        "api_keys_file": written(tmp_path / "keys.json", {"team-a": limits}),
        "router_secret": SECRET,
    }
    async with through_envoy(tmp_path, 1, **options) as it:
        headers = bearer("team-a")
        for left in (3, 2):
            answer = await it.post({"prompt": "a"}, "/v1/completions", headers=headers)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            await idle(it)
        release = asyncio.Event()

        async def answer_late(replica, asked, writer):
            await release.wait()
            writer.write(whole(200, b"{}"))

        it.fleet[0].answer = answer_late
        first = asyncio.create_task(it.post({"prompt": "a"}, "/v1/completions", headers=headers))
        await until_async(lambda: len(it.fleet[0].asked) == 3)
        refused = await it.post({"prompt": "a"}, "/v1/completions", headers=headers)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "1 requests at once" in refused.text
        release.set()
        assert (await first).status_code == 200
        await idle(it)
        refused = await it.post({"prompt": "a"}, "/v1/completions", headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "requests")
        assert "4 requests a minute" in refused.text
        assert len(it.fleet[0].asked) == 3
        await until_async(lambda: not +it.router.routing.limiter._at_once)


async def test_a_stream_comes_as_it_is_made(tmp_path):
    go_on = asyncio.Event()

    async def answer(replica, asked, writer):
        writer.write(STREAM + chunk(b"data: 1\n\n"))
        await go_on.wait()
        writer.write(chunk(b"data: 2\n\n") + END)

    async with through_envoy(tmp_path, 1) as it:
        it.fleet[0].answer = answer
        body = json.dumps({"prompt": "Hi " * 100, "stream": True})
        async with it.client.stream("POST", "/v1/completions", content=body) as got:
            parts = got.aiter_bytes()
            assert await anext(parts) == b"data: 1\n\n"
            (replica,) = it.router.pool.replicas
            # its prompt is computed
            await until_async(lambda: (replica.in_flight, replica.queued) == (1, 0))
            go_on.set()
            assert b"".join([part async for part in parts]) == b"data: 2\n\n"
        await idle(it)


def traffic() -> list[tuple[dict[str, Any], str, dict[str, str]]]:
    """Requests of several applications and conversations, some with adapters and sessions."""
    chance = random.Random(7)
    systems = [f"You are assistant {n}. " + "Be brief. " * 100 for n in range(6)]
    found: list[tuple[dict[str, Any], str, dict[str, str]]] = []
    for n in range(120):
        system = chance.choice(systems)
        text = f"{system} Question {chance.randrange(20)}: " + "why " * chance.randrange(200)
        body: dict[str, Any] = {"stream": True, "user": f"user-{chance.randrange(9)}"}
        if n % 3:
            body |= {"messages": [{"role": "user", "content": text}]}
        else:
            body |= {"prompt": text}
        if n % 7 == 0:
            body["model"] = "poet"
        path = "/v1/chat/completions" if n % 3 else "/v1/completions"
        found.append((body, path, {"x-tenant": "a"} if n % 11 == 0 else {}))
    return found


async def streamed(replica, asked, writer):
    name = b"data: " + replica.url.encode() + b"\n\n"
    writer.write(STREAM + chunk(name) + END)


async def sent(it: Routed) -> list[int]:
    """Send the traffic, one request after the other. Returns the index of each request's
    replica.
    """
    places = [replica.name for replica in it.router.pool.replicas]
    found = []
    for body, path, headers in traffic():
        answer = await it.post(body, path, headers=headers)
        found.append(places.index(answer.text.removeprefix("data: ").strip()))
        await idle(it)
    return found


@pytest.mark.parametrize("strategy", ["prefixaware", "session", "roundrobin"])
async def test_its_decisions_are_the_proxys(tmp_path, monkeypatch, strategy):
    monkeypatch.setattr("random.randrange", lambda _: 0)  # where round-robin begins
    more: dict[str, Any] = {"routing_strategy": strategy, "cache_salt_header": "x-tenant"}
    tallies, decisions = [], []
    more["wait"] = False
    fleets: list[Any] = [routing(4, **more), through_envoy(tmp_path, 4, **more)]
    for fleet in fleets:
        async with fleet as it:
            places = {url: str(n) for n, url in enumerate(sorted(one.url for one in it.fleet))}
            monkeypatch.setattr(candidates, "_weight", by_place(places))
            for replica in it.fleet:
                replica.answer = streamed
            for replica in sorted(it.fleet, key=lambda replica: replica.url)[1:3]:
                replica.models.append({"id": "poet", "parent": "base"})
            await it.ready()
            await until_async(lambda it=it: it.router.pool.adapters)
            series = (PROMPT_TOKENS, CACHED_TOKENS)
            before = [counted(one) for one in series]
            decisions.append(await sent(it))
            it.router.routing.tally.flush()
            tallies.append([counted(one) - was for one, was in zip(series, before, strict=True)])
    assert decisions[0] == decisions[1]
    assert len({*decisions[0]}) == 4
    assert tallies[0] == tallies[1]
    assert tallies[0][0]


weight = candidates._weight


def by_place(places: Mapping[str, str]) -> Any:
    """A session's weights by the index of a replica: the ports of the two fleets differ."""
    return lambda session, replica: weight(session, places[replica])


async def test_adapters_go_where_they_are(tmp_path):
    async with through_envoy(tmp_path, 3, wait=False) as it:
        it.fleet[2].models.append({"id": "poet", "parent": "base"})
        await it.ready()
        for _ in range(5):
            answer = await it.post({"prompt": "Hi", "model": "poet"})
            assert answer.json()["replica"] == it.fleet[2].url
        header = {"X-Amzn-SageMaker-Adapter-Identifier": "poet"}
        answer = await it.post({"inputs": "Hi"}, "/invocations", headers=header)
        assert answer.json()["replica"] == it.fleet[2].url


async def test_sagemaker_sessions_go_to_the_replica_that_has_them(tmp_path):
    async def begin(replica, asked, writer):
        header = "X-Amzn-SageMaker-New-Session-Id: s-1; Expires=2030-01-01T00:00:00Z"
        writer.write(whole(200, b"{}", header))

    async with through_envoy(tmp_path, 4) as it:
        it.fleet[3].answer = begin
        while not it.fleet[3].asked:
            await it.post({"requestType": "NEW_SESSION"}, "/invocations")
        assert "," not in it.fleet[3].asked[0].headers["x-gateway-destination-endpoint"]
        it.fleet[3].answer = None
        header = {"X-Amzn-SageMaker-Session-Id": "s-1"}
        for _ in range(8):
            answer = await it.post({"inputs": "Hi"}, "/invocations", headers=header)
            assert answer.json()["replica"] == it.fleet[3].url


async def dies(replica, asked, writer):
    writer.transport.abort()
    raise ConnectionError


@pytest.mark.parametrize("how", ["503", "429", "dies"])
async def test_the_gateway_falls_back_and_the_picker_follows(tmp_path, how):
    async with through_envoy(tmp_path, 3) as it:
        long = "word " * 2000
        first = (await it.post({"prompt": long})).json()["replica"]
        await idle(it)
        (failing,) = [replica for replica in it.fleet if replica.url == first]
        failing.answer = dies if how == "dies" else sends(whole(int(how), b"{}"))
        before = counted(RETRIES, "gateway")
        answer = await it.post({"prompt": long})
        assert answer.status_code == 200
        second = answer.json()["replica"]
        assert second != first
        assert counted(RETRIES, "gateway") == before + 1
        await idle(it)
        # The router knows that the prompt is now also there.
        hint = {"x-slipway-route": "1", "x-test-subset": second.removeprefix("http://")}
        answer = await it.post({"prompt": long}, headers=hint)
        assert "engine 2,048 of 2,500 tokens" in answer.headers["x-slipway-route"]


async def test_when_all_are_busy_the_client_hears_it_from_a_replica(tmp_path):
    async with through_envoy(tmp_path, 2) as it:
        for replica in it.fleet:
            replica.answer = sends(whole(429, b'{"busy":1}', "retry-after: 3"))
        answer = await it.post({"prompt": "Hi"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        await idle(it)


async def test_only_the_endpoints_that_the_gateway_names_are_picked(tmp_path):
    async with through_envoy(tmp_path, 3) as it:
        endpoints = [replica.url.removeprefix("http://") for replica in it.fleet]
        for _ in range(4):
            hint = {"x-test-subset": ",".join(endpoints[:2])}
            replica = (await it.post({"prompt": "Hi"}, headers=hint)).json()["replica"]
            assert replica in {it.fleet[0].url, it.fleet[1].url}
        assert not it.fleet[2].asked
        for _ in range(3):
            answer = await it.post({"prompt": "Hi"}, headers={"x-test-subset": endpoints[2]})
            assert answer.json()["replica"] == it.fleet[2].url
        for none in ("10.9.9.9:80", ","):
            answer = await it.post({"prompt": "Hi"}, headers={"x-test-subset": none})
            assert answer.status_code == 503
            assert "no endpoint that the gateway allows" in answer.json()["error"]["message"]


async def test_a_client_cannot_choose_its_endpoint(tmp_path):
    async with through_envoy(tmp_path, 2) as it:
        it.fleet[1].ping = (503, {"status": "draining"})
        await it.ready(1)
        mine = {"x-gateway-destination-endpoint": it.fleet[1].url.removeprefix("http://")}
        answer = await it.post({"prompt": "Hi"}, headers=mine)
        assert answer.json()["replica"] == it.fleet[0].url


async def test_it_tells_servers_who_asks(tmp_path):
    secret: dict[str, Any] = {"router_secret": "0123456789abcdef" * 2, "api_key": "sk-one"}
    async with through_envoy(tmp_path, 1, **secret) as it:
        assert (await it.post({"prompt": "Hi"})).status_code == 401
        assert not it.fleet[0].asked
        given = {"authorization": "Bearer sk-one", "x-api-key": "sk-one"}
        assert (await it.post({"prompt": "Hi"}, headers=given)).status_code == 200
        headers = it.fleet[0].asked[-1].headers
        assert not given.keys() & headers.keys()
        assert headers[IDENTITY.decode()]


async def test_objectives_say_how_important_a_request_is(tmp_path):
    file = tmp_path / "objectives.yaml"
    file.write_text(manifest(batch=-10, chat=5))
    options: dict[str, Any] = {"router_secret": SECRET, "router_objectives": str(file)}
    async with through_envoy(tmp_path, 1, **options) as it:

        async def told(name: str) -> tuple[int, bool]:
            headers = {"X-Gateway-Inference-Objective": name} if name else {}
            assert (await it.post({"prompt": "Hi"}, headers=headers)).status_code == 200
            caller = it.fleet[0].asked[-1].caller(SECRET)
            return caller.priority, caller.sheddable

        async def is_told(name: str, *expected: object) -> bool:
            return await told(name) == expected

        assert [await told(name) for name in ("", "nobody's", "batch", "chat")] == [
            *((0, False), (0, False), (10, True), (-5, False))
        ]
        file.write_text(manifest(chat=-1))
        await until_async(lambda: is_told("chat", 1, True))
        assert await told("batch") == (0, False)


async def test_a_client_says_nothing_of_itself_in_our_name(tmp_path):
    async with through_envoy(tmp_path, 1) as it:
        given = {IDENTITY.decode(): "admin", "authorization": "Bearer the-servers"}
        assert (await it.post({"prompt": "Hi"}, headers=given)).status_code == 200
        headers = it.fleet[0].asked[-1].headers
        assert IDENTITY.decode() not in headers
        assert headers["authorization"] == "Bearer the-servers"


@asynccontextmanager
async def divided_behind_envoy(folder: Path, **more: Any) -> AsyncIterator[Divided]:
    async with divided(behind=partial(through_envoy, folder), **more) as it:
        yield it


async def test_a_long_prompt_is_computed_on_one_replica_before_the_gateway_asks_the_other(tmp_path):
    """The gateway waits longer for this message than for others."""

    async def compute(replica, asked, writer):
        await asyncio.sleep(0.5)
        writer.write(whole(200, b"{}"))

    async with divided_behind_envoy(tmp_path, envoy={"message_timeout": "0.2s"}) as it:
        it.prefills.answer = compute
        body = long()
        answer = await it.routed.post(body, headers={"x-slipway-route": "1"})
        assert (answer.status_code, answer.json()["replica"]) == (200, it.decodes.url)
        assert answer.headers["x-slipway-route"].endswith(f"prefilled on {it.prefills.url}")
        (first,), (second,) = it.prefills.asked, it.decodes.asked
        assert first.json() == second.json() == body
        assert it.phases() == {"prefills": ["prefill"], "decodes": ["decode"]}
        assert (await it.routed.post({"prompt": "Hi"})).status_code == 200
        assert it.phases() == {"prefills": [], "decodes": [""]}
        await idle(it.routed)


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (breaks, "lost"),
        (sends(whole(503, b"busy")), "refused"),
        (sends(b"", 9), "timeout"),
    ],
)
async def test_what_goes_wrong_with_a_prefill_costs_no_answer(tmp_path, monkeypatch, answer, end):
    if end == "timeout":
        monkeypatch.setattr(placement, "PREFILL_S", 0.3)
    async with divided_behind_envoy(tmp_path) as it:
        it.prefills.answer = answer
        before = ended(end)
        found = await it.routed.post(long())
        assert (found.status_code, found.json()["replica"]) == (200, it.decodes.url)
        assert it.phases() == {"prefills": ["prefill"], "decodes": [""]}
        assert ended(end) == before + 1
        await idle(it.routed)


async def test_what_a_gateway_sends_leads_to_no_kv_to_be_fetched(tmp_path):
    """The body comes from the client, so the answering replica computes the prompt."""
    async with divided_behind_envoy(tmp_path, told=FETCHED) as it:
        before = ended("none")
        assert (await it.routed.post(long())).json()["replica"] == it.decodes.url
        assert it.phases() == {"prefills": [], "decodes": [""]}
        assert ended("none") == before + 1


async def test_a_client_that_leaves_the_gateway_ends_the_prefill(tmp_path):
    async with divided_behind_envoy(tmp_path) as it:
        it.prefills.answer = sends(b"", 60)
        asked = asyncio.create_task(it.routed.post(long()))
        await until_async(lambda: it.prefills.asked)
        asked.cancel()
        await until_async(lambda: it.prefills.gone == 1)
        await idle(it.routed)
        assert not it.decodes.asked


async def test_no_ready_endpoint(tmp_path):
    async with through_envoy(tmp_path, 2) as it:
        for replica in it.fleet:
            replica.ping = (503, {"status": "starting"})
        await it.ready(0)
        answer = await it.post({"prompt": "Hi"})
        assert answer.status_code == 503
        assert answer.json()["error"]["message"].startswith("no replica can take the request: 2")
        assert (await it.post({"inputs": "Hi"}, "/invocations")).status_code == 503


async def test_what_the_router_answers_it_answers_through_the_gateway(tmp_path):
    async with through_envoy(tmp_path, 2) as it:
        answer = await it.client.get("/nothing")
        assert (answer.status_code, answer.json()["code"]) == (404, 404)
        answer = await it.client.get("/v1/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert (await it.client.get("/v1/models")).json() == {"data": [{"id": "base"}]}
        answer = await it.client.post("/adapters?name=poet&src=/poet", content=b"")
        assert answer.status_code == 200
        assert [replica.asked[-1].target for replica in it.fleet] == [
            "/adapters?name=poet&src=/poet"
        ] * 2
        page = {"origin": "https://elsewhere.example"}
        assert (await it.post({"prompt": "Hi"}, headers=page)).status_code == 403


async def test_large_bodies_are_streamed(tmp_path, monkeypatch):
    monkeypatch.setattr(buffers, "MAX_BODY", 100_000)
    async with through_envoy(tmp_path, 2, max_request_size=2_000_000) as it:
        body = {"prompt": "word" * 300_000}
        answer = await it.post(body)
        (asked,) = [asked for replica in it.fleet for asked in replica.asked]
        assert (answer.status_code, asked.json()) == (200, body)
        answer = await it.post({"prompt": "word" * 600_000})
        assert answer.status_code == 413
        await idle(it)
        picker: Any = it.router._picker
        assert picker._picking.buffers.bodies == 0


async def test_a_client_that_leaves_ends_what_is_under_way(tmp_path):
    async with through_envoy(tmp_path, 1) as it:
        it.fleet[0].answer = sends(STREAM + chunk(b"data: 1\n\n"), 60)
        async with it.client.stream("POST", "/v1/completions", json={"stream": True}) as got:
            assert await anext(got.aiter_bytes()) == b"data: 1\n\n"
            assert it.router.pool.replicas[0].in_flight == 1
        await idle(it)
        await until_async(lambda: it.fleet[0].gone)
        done = {(status, how) for _, status, how in it.router.routing.tally.requests}
        assert done == {(200, "cancelled")}


@pytest.mark.parametrize("stream", [False, True])
async def test_it_counts_the_tokens_that_answers_say_they_used(tmp_path, stream):
    usage = {
        "prompt_tokens": 50,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    text = 'he said "usage": {"prompt_tokens": 9}'
    said = json.dumps({"choices": [{"text": text}], "usage": usage, "more": None}).encode()
    async with through_envoy(tmp_path, 1) as it:
        answer = STREAM + chunk(b"data: " + said + b"\n\n") + chunk(b"data: [DONE]\n\n") + END
        it.fleet[0].answer = sends(answer if stream else whole(200, said))
        kinds = ("prompt", "cached", "completion")
        before = [counted(USAGE, kind) for kind in kinds]
        await it.post({"prompt": "Hi", "stream": stream})
        await idle(it)
        assert [counted(USAGE, kind) - was for kind, was in zip(kinds, before, strict=True)] == [
            *(50, 32, 7)
        ]


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'{"usage": {"input_tokens": 5, "output_tokens": 6}}', Usage(5, 0, 6)),
        (b'{"usage": {"prompt_tokens": 1}} {"usage": {"prompt_tokens": 2}}', Usage(2, 0, 0)),
        (b'{"text": "\\"usage\\": {\\"prompt_tokens\\": 3}"}', None),
        (b'{"usage": {"prompt_tokens": 1', None),
        (b'{"usage": {"prompt_tokens": "many"}}', None),
        (b'{"usage": {"prompt_tokens_details": 3}}', None),
        (b'{"usage": {"prompt_tokens": 1, "x": "\xff"}}', None),
        (b'{"usage": null}', None),
        (b'{"usage": {"prompt_tokens": %d}}' % 2**40, Usage(2**40, 0, 0)),
        (b'{"usage": {"prompt_tokens": %d}}' % (2**40 + 1), None),
        (b'{"usage": {"prompt_tokens": -5}}', None),
        (b'{"usage": {"prompt_tokens": Infinity}}', None),
        (b'{"usage": {"prompt_tokens": NaN}}', None),
        (b'{"usage": {"prompt_tokens": 1e308}}', None),
        (b'{"usage": {"prompt_tokens": 7.0}}', None),
        (b'{"usage": {"prompt_tokens": "7"}}', None),
        (b'{"usage": {"prompt_tokens": [1]}}', None),
        (b'{"usage": {"prompt_tokens": 1, "completion_tokens": true}}', None),
        (b'{"usage": {"prompt_tokens": %b}}' % (b"9" * 4000), None),
        (b'{"usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": -1}}}', None),
        (b'{"usage": {"prompt_tokens": 1, "prompt_tokens_details": [1]}}', None),
        (b'{"usage": ' + b'{"a":' * 700, None),
        (b"", None),
    ],
)
def test_usage(tail, usage):
    reader = UsageReader()
    for at in range(0, len(tail), 7):
        reader.feed(tail[at : at + 7])
    assert reader.read() == usage


async def test_a_gateway_that_does_not_stream_bodies_is_told(tmp_path, caplog):
    envoy = {"request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP"}
    async with through_envoy(tmp_path, 1, envoy=envoy) as it:
        for _ in range(2):
            assert (await it.post({"prompt": "Hi"})).status_code >= 500
        told = [line.getMessage() for line in caplog.records if "request_body_mode" in line.message]
        assert len(told) == 1
        assert "should be FULL_DUPLEX_STREAMED" in told[0]


async def test_answers_need_not_be_shown_to_the_picker(tmp_path):
    envoy = {"response_body_mode": "NONE", "response_trailer_mode": "SKIP"}
    async with through_envoy(tmp_path, 2, envoy=envoy) as it:
        assert (await it.post({"prompt": "Hi"})).status_code == 200
        await idle(it)


async def test_health_and_reflection():
    port = ports.free()
    async with routing(1, wait=False, epp=True, epp_port=port) as it:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def status(service: str) -> int:
                request = health_pb2.HealthCheckRequest(service=service)
                return int((await stub.Check(request, wait_for_ready=True)).status)

            assert await status("liveness") == SERVING
            await it.ready()
            for service in ("", "readiness", SERVICE):
                await until_async(lambda service=service: status_is(status, service, SERVING))
        described = await asyncio.to_thread(reflected, port)
        assert SERVICE in described


async def status_is(status: Any, service: str, value: int) -> bool:
    return bool(await status(service) == value)


def reflected(port: int) -> list[str]:
    """The services that the server describes."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert database.FindFileContainingSymbol(SERVICE)
        return [*database.get_services()]


async def test_it_is_not_ready_before_it_knows_the_replicas(monkeypatch):
    port = ports.free()
    async with routing(1, wait=False, epp=True, epp_port=port) as it:
        it.router.pool.probed.clear()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="readiness")
            found = await stub.Check(request, wait_for_ready=True)
            if not it.router.pool.probed.is_set():
                assert found.status == NOT_SERVING


async def test_a_stop_waits_for_what_is_under_way(tmp_path):
    go_on = asyncio.Event()

    async def answer(replica, asked, writer):
        writer.write(STREAM + chunk(b"data: 1\n\n"))
        await go_on.wait()
        writer.write(chunk(b"data: 2\n\n") + END)

    async with through_envoy(tmp_path, 1) as it:
        it.fleet[0].answer = answer
        async with it.client.stream("POST", "/v1/completions", json={"stream": True}) as got:
            parts = got.aiter_bytes()
            assert await anext(parts) == b"data: 1\n\n"
            it.router.stop()
            await until_async(lambda: it.router.draining)
            go_on.set()
            assert b"".join([part async for part in parts]) == b"data: 2\n\n"
        await asyncio.wait_for(it.task, 10)


def picker(port: int, log: Path, *arguments: str, environ: dict[str, str] | None = None) -> Program:
    """`route --epp` in a separate process."""
    command = (sys.executable, "-m", "serving", "route", "--epp", "--epp-port", str(port))
    return Program(*command, *arguments, environ={**AS_ENTRYPOINT_SH, **(environ or {})}, log=log)


@pytest.mark.parametrize("fail_open", [False, True])
async def test_a_picker_that_is_killed_and_started_again(tmp_path, fail_open):
    replica = FakeReplica()
    await replica.start()
    port = ports.free()
    program = picker(port, tmp_path / "picker.log", replica.url)
    with gateway(tmp_path, port, [replica.port], fail_open=fail_open) as envoy:
        async with httpx.AsyncClient(base_url=envoy.url, timeout=20) as client:

            async def status() -> int:
                return (await client.post("/v1/completions", json={"prompt": "Hi"})).status_code

            async def is_status(value: int) -> bool:
                return await status() == value

            async def is_picked() -> bool:
                answer = await client.post(
                    "/v1/completions", json={"prompt": "Hi"}, headers={"x-slipway-route": "1"}
                )
                return answer.status_code == 200 and "x-slipway-route" in answer.headers

            with program:
                await asyncio.to_thread(program.ready, 60)
                await until_async(is_picked)
                program.kill()
                if fail_open:
                    # the messages in flight to the picker are lost
                    await until_async(lambda: is_status(200))
                    assert not await is_picked()
                else:
                    assert await status() >= 500
                program.start()
                await until_async(is_picked)
    await replica.stop()


async def test_several_processes_share_the_port(tmp_path):
    replica = FakeReplica()
    await replica.start()
    port = ports.free()
    two = {"OPTION_ROUTER_PROCESSES": "2"}
    with (
        picker(port, tmp_path / "picker.log", replica.url, environ=two) as program,
        gateway(tmp_path, port, [replica.port]) as envoy,
    ):
        await asyncio.to_thread(program.ready, 60)
        assert len(program.children()) == 2
        async with httpx.AsyncClient(base_url=envoy.url, timeout=20) as client:
            for _ in range(4):
                answer = await client.post("/v1/completions", json={"prompt": "Hi"})
                assert answer.json()["replica"] == replica.url
        await asyncio.to_thread(program.stop)
    await replica.stop()


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        (
            {"OPTION_ROUTER_REPLICAS": "http://a:8080,http://10.0.0.1:8080"},
            "http://a:8080: gateways need IP addresses, not names",
        ),
        ({"OPTION_EPP_CERTIFICATE": "/none"}, "TLS needs both"),
        (
            {"OPTION_EPP_CERTIFICATE": "/none", "OPTION_EPP_PRIVATE_KEY": "/none"},
            "OPTION_EPP_CERTIFICATE: /none: No such file or directory",
        ),
        (
            {"OPTION_EPP_CERTIFICATE": "self-signed", "OPTION_EPP_PRIVATE_KEY": "/none"},
            "OPTION_EPP_PRIVATE_KEY: OPTION_EPP_CERTIFICATE=self-signed has none; leave it out",
        ),
    ],
)
def test_what_it_cannot_start_with(tmp_path, environ, fault):
    replicas = () if "OPTION_ROUTER_REPLICAS" in environ else ("http://10.0.0.1:8080",)
    program = picker(ports.free(), tmp_path / "log", *replicas, environ=environ)
    with program:
        assert program.process.wait(60) == 2
    assert fault in program.logged()


def test_a_port_that_is_taken(tmp_path):
    taken = Program(sys.executable, "-m", "http.server", "{port}", "--bind", "0.0.0.0")
    with taken:
        until(taken.listens)
        program = picker(taken.port, tmp_path / "log", "http://10.0.0.1:8080")
        with program:
            assert program.process.wait(60) not in (0, None)
    assert f"cannot listen on port {taken.port}" in program.logged()


async def test_replicas_of_a_file_that_have_no_address_are_left_out(tmp_path, caplog):
    file = tmp_path / "replicas"
    file.write_text("http://a:8080\nhttp://127.0.0.1:1\n")
    more = {"router_replicas": file.as_uri(), "epp": True, "epp_port": ports.free()}
    async with routing(0, wait=False, **more) as it:
        await until_async(lambda: it.router.pool.replicas)
        assert [replica.name for replica in it.router.pool.replicas] == ["http://127.0.0.1:1"]
    assert "http://a:8080 is left out" in caplog.text
