# SPDX-License-Identifier: Apache-2.0
"""The router as its clients see it: HTTP, retries, and the answering replicas."""

import asyncio
import json
import logging
import re

import httpx
import pytest
from prometheus_client import REGISTRY

from serving.router import router, status
from serving.router.fleet import circuit_breaker, health, replicas
from serving.router.http import buffers, downstream
from serving.router.policy.tiers import DEFAULT_PRICES
from serving.router.retry import RetryBudget
from tests.serving.router.conftest import (
    END,
    STREAM,
    FakeReplica,
    Routed,
    chunk,
    close,
    routing,
    sends,
    whole,
)
from tests.support.harness.wait import turns, until_async

pytestmark = pytest.mark.anyio

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def posted(body: bytes, *lines: bytes) -> bytes:
    head = [POST.rstrip(), b"content-length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


async def test_a_request_reaches_a_replica_and_its_answer_the_client():
    async with routing() as it:
        body = {"prompt": "Hi", "model": "base"}
        headers = {"x-request-id": "mine", "traceparent": "00-1-2-03", "te": "trailers"}
        answer = await it.post(body, headers=headers)
        assert answer.status_code == 200
        assert answer.json()["replica"] in [replica.url for replica in it.fleet]
        assert answer.headers["x-request-id"] == "mine"
        (asked,) = [asked for replica in it.fleet for asked in replica.asked]
        assert asked.json() == body
        assert asked.headers["x-request-id"] == "mine"
        assert asked.headers["traceparent"] == "00-1-2-03"
        assert "te" not in asked.headers
        assert asked.headers["host"] in [
            replica.url.removeprefix("http://") for replica in it.fleet
        ]


async def test_a_request_without_an_id_gets_one():
    async with routing(1) as it:
        answer = await it.post({"prompt": "Hi"})
        assert len(answer.headers["x-request-id"]) == 32
        assert it.fleet[0].asked[0].headers["x-request-id"] == answer.headers["x-request-id"]


async def test_connections_are_used_again_on_both_sides():
    async with routing(1) as it:
        before = len(it.fleet[0].connections)
        for _ in range(20):
            assert (await it.post({"prompt": "Hi"})).status_code == 200
        assert len(it.fleet[0].connections) - before == 1
        assert len(it.router.clients) == 1


async def test_connections_that_carry_one_request_alone_are_not_kept():
    async with routing(1) as it:
        before = len(it.fleet[0].connections)
        for _ in range(20):
            begins = {"requestType": "NEW_SESSION"}
            assert (await it.post(begins, "/invocations")).status_code == 200
        await until_async(lambda: len(it.fleet[0].connections) <= before, 20)


async def test_connections_to_a_replica_that_is_gone_are_not_kept(tmp_path):
    go_on = asyncio.Event()

    async def answer(replica, asked, writer):
        await go_on.wait()
        writer.write(whole(200, b"late"))

    listed = tmp_path / "replicas"
    async with routing(1) as it:
        (replica,) = it.fleet
        replica.answer = answer
        listed.write_text(replica.url)
        async with routing(0, wait=False, router_replicas=listed.as_uri()) as other:
            asked = asyncio.create_task(other.post({"prompt": "Hi"}))
            await until_async(lambda: replica.asked)
            before = len(replica.connections)
            listed.write_text("")
            await other.ready(0)
            go_on.set()
            assert (await asked).text == "late"  # it answers the requests in flight
            await until_async(lambda: len(replica.connections) < before, 20)


async def test_a_stream_comes_as_it_is_made():
    go_on = asyncio.Event()

    async def answer(replica, asked, writer):
        writer.write(STREAM + chunk(b"data: 1\n\n"))
        await go_on.wait()
        writer.write(chunk(b"data: 2\n\n") + END)

    async with routing(1) as it:
        it.fleet[0].answer = answer
        body = json.dumps({"prompt": "Hi", "stream": True})
        async with it.client.stream("POST", "/v1/completions", content=body) as got:
            parts = got.aiter_bytes()
            assert await anext(parts) == b"data: 1\n\n"
            go_on.set()
            assert [part async for part in parts] == [b"data: 2\n\n"]
        await until_async(lambda: not it.router.proxied)


async def test_every_byte_of_an_answer_may_come_by_itself():
    async def answer(replica, asked, writer):
        content = b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM + chunk(b"data: 1\n\n") + END
        for place in range(len(content)):
            writer.write(content[place : place + 1])
            await writer.drain()
            await asyncio.sleep(0.0005)

    async with routing(1) as it:
        it.fleet[0].answer = answer
        assert (await it.post({"prompt": "Hi"})).text == "data: 1\n\n"
        it.fleet[0].answer = None
        assert (await it.post({"prompt": "Hi"})).status_code == 200


async def test_every_byte_of_a_request_may_come_by_itself():
    async with routing(1) as it:
        data = posted(b'{"prompt":"Hi"}', b"connection: close")
        reader, writer = await it.raw(b"")
        for place in range(len(data)):
            writer.write(data[place : place + 1])
            await asyncio.sleep(0.0005)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        assert it.fleet[0].asked[0].body == b'{"prompt":"Hi"}'
        writer.close()


async def test_chunked_requests():
    async with routing(1) as it:
        head = POST + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        assert b" 200 " in await it.answer(head + chunk(b'{"prompt":') + chunk(b'"Hi"}') + END)
        assert it.fleet[0].asked[0].json() == {"prompt": "Hi"}
        assert it.fleet[0].asked[0].headers["content-length"] == "15"


async def test_pipelined_requests_are_answered_in_their_order():
    async def answer(replica, asked, writer):
        await asyncio.sleep(0.02 if asked.body == b'"0"' else 0)
        writer.write(whole(200, asked.body))

    async with routing() as it:
        for replica in it.fleet:
            replica.answer = answer
        bodies = [b'"%d"' % n for n in range(50)]
        data = b"".join(map(posted, bodies)) + posted(b'"last"', b"connection: close")
        answers = await it.answer(data)
        found = [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 ")[1:]]
        assert found == [*bodies, b'"last"']


async def test_a_client_that_expects_100_continue_gets_it():
    async with routing(1) as it:
        head = POST + b"content-length: 4\r\nexpect: 100-continue\r\n\r\n"
        reader, writer = await it.raw(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b'"Hi"')
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        assert "expect" not in it.fleet[0].asked[0].headers
        writer.close()


async def test_an_offer_of_http2_is_not_taken_up():
    async with routing(1) as it:
        lines = (b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AA")
        reader, writer = await it.raw(posted(b'"Hi"', *lines))
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        assert it.fleet[0].asked[0].body == b'"Hi"'
        assert "http2-settings" not in it.fleet[0].asked[0].headers
        writer.close()


async def test_http_1_0_clients_get_plain_bodies():
    async with routing(1) as it:
        it.fleet[0].answer = sends(STREAM + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + END)
        found = await it.answer(b'POST /v1/completions HTTP/1.0\r\ncontent-length: 4\r\n\r\n"Hi"')
        head, _, body = found.partition(b"\r\n\r\n")
        assert body == b"data: 1\n\ndata: 2\n\n"
        assert b"transfer-encoding" not in head
        asks = b"POST /v1/completions HTTP/1.0\r\ncontent-length: 4\r\nexpect: 100-continue\r\n"
        for more in (b"", b"connection: keep-alive\r\n"):
            found = await it.answer(asks + more + b'\r\n"Hi"')
            assert found.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in found
        asks = b"POST /v1/completions HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n"
        found = await it.answer(asks + b'4\r\n"Hi"\r\n' + END)
        assert found.startswith(b"HTTP/1.1 400")
        assert b"HTTP/1.0 has no Transfer-Encoding" in found


async def test_an_answer_that_ends_with_its_connection():
    async def answer(replica, asked, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nall of it")
        await writer.drain()
        writer.close()

    async with routing(1) as it:
        it.fleet[0].answer = answer
        found = await it.answer(posted(b'"Hi"'))
        assert found.endswith(b"connection: close\r\n\r\nall of it")
        it.fleet[0].answer = None
        assert (await it.post("Hi")).status_code == 200


async def test_an_answers_framing_is_kept_whatever_its_connection_names():
    async with routing(1) as it:
        names = "connection: Content-Length, transfer-encoding, x-own"
        chunked = STREAM.replace(b"\r\n\r\n", f"\r\n{names}\r\n\r\n".encode())
        for content in (whole(200, b"ok", names, "x-own: 1"), chunked + chunk(b"ok") + END):
            it.fleet[0].answer = sends(content)
            answer = await it.post({"prompt": "Hi"})
            assert (answer.text, "x-own" in answer.headers) == ("ok", False)


async def test_head_requests():
    async with routing(1) as it:
        it.fleet[0].answer = sends(b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n")
        assert (await it.client.head("/v1/models/")).status_code == 404
        got = await it.client.head("/execution-parameters")
        assert (got.status_code, got.headers["content-length"]) == (200, "20")
        assert (await it.client.head("/ping")).status_code == 200


async def test_large_bodies_are_streamed(monkeypatch):
    monkeypatch.setattr(buffers, "MAX_BODY", 100_000)
    async with routing(1, max_request_size=5_000_000) as it:
        body = b'"' + b"x" * 2_000_000 + b'"'
        assert (await it.post(body)).json()["size"] == len(body)

        async def parts():
            for place in range(0, len(body), 100_000):
                yield body[place : place + 100_000]

        answer = await it.client.post("/v1/completions", content=parts())
        assert answer.json()["size"] == len(body)
        assert it.fleet[0].asked[-1].headers["transfer-encoding"] == "chunked"
        assert all(asked.body == body for asked in it.fleet[0].asked)
        assert it.router.buffers.bodies == 0


@pytest.mark.parametrize("told", [True, False])
async def test_too_large_bodies_are_refused(told):
    async with routing(1, max_request_size=1_000) as it:
        body = b"x" * 100_000
        line = (
            b"content-length: %d\r\n\r\n" % len(body)
            if told
            else b"transfer-encoding: chunked\r\n\r\n"
        )
        found = await it.answer(POST + line + (body if told else chunk(body)))
        assert found.startswith(b"HTTP/1.1 413 ")
        assert b"SERVING_MAX_REQUEST_SIZE" in found
        assert not it.fleet[0].asked
        assert it.router.buffers.bodies == 0


async def test_paths():
    async with routing(1) as it:
        paths = ("/invocations", "/predictions/lmi", "/models/lmi/invoke")
        for path in (*paths, "/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            assert (await it.post("Hi", path)).status_code == 200
            refused = await it.client.get(path)
            assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert (await it.client.get("/v1/models")).status_code == 200
        answer = await it.client.get("/v1/models/acme/base")
        assert "there is nothing at" not in answer.text
        assert (await it.client.get("/server/metrics")).status_code == 200
        for method, path in (
            *(("GET", path) for path in ("/models", "/models/lmi", "/workflows", "/workflows/lmi")),
            *(("POST", path) for path in ("/models", "/workflows", "/server/logging")),
            *((method, "/models/lmi") for method in ("PUT", "DELETE")),
        ):  # the replica decides about these; the stub knows none of them
            answer = await it.client.request(method, path)
            assert "there is nothing at" not in answer.text, path
        assert (await it.post("Hi", "/v1/load_lora_adapter")).status_code == 404
        refused = await it.post("Hi", "/ping")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        assert (await it.client.get("/v1/../server_info")).status_code == 404
        found = await it.answer(b"GET http://any/ping HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabcd",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        POST + b"bad header\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused(data):
    async with routing(1) as it:
        assert (await it.answer(data)).startswith(b"HTTP/1.1 400 ")
        assert not it.fleet[0].asked


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
async def test_too_long_heads_are_refused(end):
    async with routing(1) as it:
        found = await it.answer(POST + b"x: " + b"y" * 70_000 + end)
        assert found.startswith(b"HTTP/1.1 431 ")


async def test_a_client_that_leaves_ends_the_replicas_work():
    async with routing(1) as it:
        it.fleet[0].answer = sends(STREAM + chunk(b"data: 1\n\n"), then_s=60)
        _, writer = await it.raw(posted(b'"Hi"'))
        await until_async(lambda: bool(it.fleet[0].asked))
        writer.close()
        await until_async(lambda: it.fleet[0].gone == 1)
        (replica,) = it.router.pool.replicas
        assert (replica.in_flight, replica.queued) == (0, 0)
        assert not it.router.proxied


async def test_a_slow_reader_holds_the_replica_back():
    sent = 0

    async def answer(replica, asked, writer):
        nonlocal sent
        writer.write(STREAM)
        for _ in range(2_000):
            writer.write(chunk(b"x" * 16_384))
            await writer.drain()
            sent += 16_384
        writer.write(END)

    async with routing(1) as it:
        it.fleet[0].answer = answer
        reader, writer = await it.raw(posted(b'"Hi"', b"connection: close"))
        before = -1
        while sent > before:  # until it no longer moves
            before = sent
            await asyncio.sleep(0.5)
        assert sent < 20_000_000  # of 32 MB: the rest that sockets hold
        found = 0
        while part := await reader.read(1 << 20):
            found += len(part)
        assert found > 2_000 * 16_384
        writer.close()


# Retries and failures


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_another_replica_is_asked_when_one_cannot(status):
    async with routing(2) as it:
        it.fleet[0].answer = sends(whole(status, b"no"))
        for _ in range(20):
            answered = await it.post({"prompt": "Hi"})
            assert answered.json()["replica"] == it.fleet[1].url
        assert it.fleet[0].asked


@pytest.mark.parametrize("status", [400, 404, 424, 500, 504, 507])
async def test_other_answers_are_passed_on(status):
    async with routing(2) as it:
        for replica in it.fleet:
            replica.answer = sends(whole(status, b"no"))
        answered = await it.post({"prompt": "Hi"})
        assert (answered.status_code, answered.text) == (status, "no")
        assert sum(len(replica.asked) for replica in it.fleet) == 1


async def test_when_all_are_busy_the_client_hears_it_from_a_replica():
    async with routing(3) as it:
        for replica in it.fleet:
            replica.answer = sends(whole(503, b"busy", "retry-after: 7"))
        answered = await it.post({"prompt": "Hi"})
        assert (answered.status_code, answered.text) == (503, "busy")
        assert answered.headers["retry-after"] == "7"
        assert sum(len(replica.asked) for replica in it.fleet) == 3


async def test_retries_are_no_load_of_their_own():
    async with routing(2) as it:
        for replica in it.fleet:
            replica.answer = sends(whole(503, b"busy"))
        for _ in range(300):
            assert (await it.post({"prompt": "Hi"})).status_code == 503
        assert 390 <= sum(len(replica.asked) for replica in it.fleet) <= 431


async def test_a_replica_that_dies_before_it_answers_costs_nobody_an_answer():
    answer = sends(then_s=60)
    async with routing(2, routing_strategy="roundrobin") as it:
        it.fleet[0].answer = answer
        asked = [asyncio.create_task(it.post({"prompt": "Hi"})) for _ in range(40)]
        await until_async(lambda: len(it.fleet[0].asked) == 20)
        await it.fleet[0].stop()
        answers = await asyncio.gather(*asked)
        assert {answer.json()["replica"] for answer in answers} == {it.fleet[1].url}


async def test_a_replica_that_dies_while_it_answers_leaves_a_cut_answer():
    async def answer(replica, asked, writer):
        writer.write(STREAM + chunk(b"data: 1\n\n"))
        await writer.drain()
        writer.transport.abort()

    async with routing(2) as it:
        for replica in it.fleet:
            replica.answer = answer
        with pytest.raises(httpx.RemoteProtocolError):
            await it.post({"prompt": "Hi"})
        assert sum(len(replica.asked) for replica in it.fleet) == 1


async def test_a_frozen_replica_is_left_and_its_requests_go_elsewhere(monkeypatch):
    monkeypatch.setattr(health, "PING_TIMEOUT_S", 0.5)
    answer = sends(then_s=60)
    async with routing(2, routing_strategy="roundrobin") as it:
        frozen = it.fleet[0]
        frozen.answer = answer
        asked = [asyncio.create_task(it.post({"prompt": "Hi"})) for _ in range(10)]
        await until_async(lambda: len(frozen.asked) == 5)

        async def nothing(*_):
            await asyncio.sleep(60)

        monkeypatch.setattr(frozen, "_answer", nothing)
        answers = await asyncio.gather(*asked)
        assert {answer.json()["replica"] for answer in answers} == {it.fleet[1].url}


async def test_an_idle_connection_that_the_replica_has_closed_is_no_failure():
    async def answer(replica, asked, writer):
        writer.write(whole(200, b"once"))
        await writer.drain()
        # The connection is closed just as the next request comes.
        asyncio.get_running_loop().call_later(0.001, writer.transport.abort)

    async with routing(1) as it:
        it.fleet[0].answer = answer
        for _ in range(50):
            assert (await it.post({"prompt": "Hi"})).text == "once"
        (replica,) = it.router.pool.replicas
        assert not replica.breaker.ejected


async def test_no_replica_at_all():
    async with routing(2) as it:
        for replica in it.fleet:
            await replica.stop()
        await it.ready(0)
        answer = await it.post({"prompt": "Hi"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "2 down" in answer.json()["error"]["message"]
        assert (await it.client.get("/ping")).status_code == 503
        await it.fleet[0].start()
        await it.ready(1)
        assert (await it.post({"prompt": "Hi"})).status_code == 200
        assert (await it.client.get("/ping")).status_code == 200


@pytest.mark.parametrize("status", ["draining", "stopped"])
async def test_a_draining_replica_gets_no_new_requests(status):
    async with routing(2) as it:
        it.fleet[0].ping = (503, {"status": status})
        await it.ready(1)
        found = (await it.client.get("/replicas")).json()["replicas"]
        assert {row["state"] for row in found} == {"draining", "ready"}
        for _ in range(10):
            assert (await it.post({"prompt": "Hi"})).json()["replica"] == it.fleet[1].url


async def test_time_outs_open_no_breaker():
    """They show something about requests and the load, not about the replica."""
    async with routing(2, routing_strategy="roundrobin") as it:
        it.fleet[0].answer = sends(whole(504, b"late"))
        statuses = [(await it.post({"prompt": "Hi"})).status_code for _ in range(60)]
        assert statuses.count(504) == 30


async def test_a_replica_whose_answers_make_no_sense_is_looked_at_again(caplog):
    async with routing(2, wait=False) as it:
        odd, other = it.fleet
        odd.blocks = "9" * 5_000  # Python cannot read such a number
        await it.ready(1)
        await until_async(lambda: "looking at it failed" in caplog.text)
        rows = (await it.client.get("/replicas")).json()["replicas"]
        assert [row["state"] for row in rows if row["replica"] == odd.url] == ["failed"]
        assert (await it.post({"prompt": "Hi"})).json()["replica"] == other.url
        odd.blocks = ""
        await it.ready(2)


ONCE = [
    ("/invocations", {"requestType": "NEW_SESSION"}, {}),
    ("/invocations", {"inputs": "Hi"}, {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"}),
    ("/v1/files", {}, {}),
    ("/v1/batches", {}, {}),
]


@pytest.mark.parametrize(("path", "body", "headers"), ONCE)
@pytest.mark.parametrize("fault", ["502", "closed", "down"])
async def test_what_would_be_made_twice_is_asked_for_once(tmp_path, path, body, headers, fault):
    """A session, a file or a batch: the replica may have made it before it failed."""

    async def answer(replica, asked, writer):
        if fault == "closed":
            writer.transport.abort()
        elif fault == "down":
            await replica.stop()
        else:
            writer.write(whole(int(fault), b"no"))

    async with routing(3, routing_strategy="roundrobin", batch_folder=str(tmp_path)) as it:
        for _ in range(6):  # so that there are connections to use again
            assert (await it.post({"prompt": "Hi"})).status_code == 200
        for replica in it.fleet:
            replica.answer = answer
            replica.asked.clear()
        found = await it.post(body, path, headers=headers)
        assert found.status_code == 502
        assert sum(len(replica.asked) for replica in it.fleet) == 1


@pytest.mark.parametrize(("path", "body", "headers"), ONCE)
@pytest.mark.parametrize("status", [429, 503])
async def test_what_a_replica_refuses_to_make_is_made_elsewhere(
    tmp_path, path, body, headers, status
):
    """A replica that is stopping refuses in this way, until its next probe."""
    async with routing(2, routing_strategy="roundrobin", batch_folder=str(tmp_path)) as it:
        it.fleet[0].answer = sends(whole(status, b"draining", "retry-after: 1"))
        for _ in range(2):
            found = await it.post(body, path, headers=headers)
            assert found.json()["replica"] == it.fleet[1].url


@pytest.mark.parametrize(("path", "body", "headers"), ONCE)
async def test_what_no_replica_was_asked_to_make_is_made_elsewhere(
    monkeypatch, tmp_path, path, body, headers
):
    monkeypatch.setattr(health, "PING_S", 60.0)
    async with routing(2, routing_strategy="roundrobin", batch_folder=str(tmp_path)) as it:
        await it.fleet[0].stop()
        for _ in range(2):
            found = await it.post(body, path, headers=headers)
            assert found.json()["replica"] == it.fleet[1].url


@pytest.mark.parametrize("strategy", ["roundrobin", "prefixaware"])
async def test_a_replica_that_fails_always_loses_few_requests(strategy, caplog):
    async with routing(2, routing_strategy=strategy) as it:
        it.fleet[0].answer = sends(whole(500, b"no"))
        statuses = [(await it.post({"prompt": f"{n}"})).status_code for n in range(60)]
        assert statuses.count(500) <= 5
        assert statuses[10:] == [200] * 50
        assert await kept(it) == [True, False]
        assert "a replica is ejected" in caplog.messages
        assert any("server errors in a row" in str(vars(it)) for it in caplog.records)


async def kept(it):
    """For each replica, whether it is ejected."""
    rows = (await it.client.get("/replicas")).json()["replicas"]
    ejected = {row["replica"]: row["kept_from_requests"] for row in rows}
    return [ejected[replica.url] for replica in it.fleet]


@pytest.mark.parametrize("strategy", ["roundrobin", "prefixaware"])
@pytest.mark.parametrize("status", [500, 502])
async def test_requests_that_fail_on_every_replica_eject_none(strategy, status):
    """Otherwise a client with such requests, alone or among others, could take a fleet down."""

    async def answer(replica, asked, writer):
        poison = b"poison" in asked.body
        writer.write(whole(status, b"no") if poison else whole(200, b"yes"))

    async with routing(3, routing_strategy=strategy) as it:
        for replica in it.fleet:
            replica.answer = answer
        for n in range(120):
            found = await it.post({"prompt": "poison " * 500})
            assert found.status_code == status
            if n >= 60:
                assert (await it.post({"prompt": f"{n}"})).status_code == 200
        assert await kept(it) == [False] * 3


async def test_an_ejected_replica_is_readmitted_by_a_trial():
    tried = 0
    gate = asyncio.Event()

    async def answer(replica, asked, writer):
        nonlocal tried
        tried += 1
        await gate.wait()
        writer.write(whole(500 if fails else 200, b"{}"))

    async with routing(2, routing_strategy="roundrobin") as it:
        replicas = {one.name: one for one in it.router.pool.replicas}
        breaker = replicas[it.fleet[0].url].breaker

        async def asked(trials):
            """Requests meanwhile. All are answered, and this number of them are trials."""
            before = tried
            gate.clear()
            tasks = [asyncio.create_task(it.post({"prompt": "Hi"})) for _ in range(20)]
            await until_async(lambda: sum(not one.done() for one in tasks) == trials)
            assert tried == before + trials
            gate.set()
            assert {(await one).status_code for one in tasks} == {200}

        def is_over():
            breaker._until = 0.0
            breaker._changed()

        fails = True
        it.fleet[0].answer = sends(whole(500, b"no"))
        for _ in range(12):
            await it.post({"prompt": "Hi"})
        assert await kept(it) == [True, False]
        it.fleet[0].answer = answer
        await asked(trials=0)
        is_over()
        await asked(trials=1)  # a trial's error is not the end
        assert await kept(it) == [True, False]
        assert breaker._pause == 2 * circuit_breaker.FIRST_S
        fails = False
        await asked(trials=0)
        is_over()
        await asked(trials=1)
        assert await kept(it) == [False, False]


async def test_a_replica_that_stands_still_gets_no_more_but_a_trial(monkeypatch):
    """Its requests continue, and it is readmitted when they move again."""
    monkeypatch.setattr(router, "SWEEP_S", 0.02)
    monkeypatch.setattr(circuit_breaker, "STALLED_S", 0.3)
    gate = asyncio.Event()

    async def answer(replica, asked, writer):
        await gate.wait()
        writer.write(whole(200, b"late"))

    async with routing(2, routing_strategy="roundrobin") as it:
        it.fleet[0].answer = answer
        asked = [asyncio.create_task(it.post({"prompt": "Hi"})) for _ in range(12)]

        async def is_kept():
            asked.append(asyncio.create_task(it.post({"prompt": "Hi"})))
            return (await kept(it))[0]

        await until_async(is_kept)
        await turns()
        before = len(it.fleet[0].asked)
        for _ in range(10):
            assert (await it.post({"prompt": "Hi"})).json()["replica"] == it.fleet[1].url
        assert len(it.fleet[0].asked) == before
        assert it.fleet[0].gone == 0
        gate.set()
        assert {(await answer).status_code for answer in asked} == {200}

        async def is_readmitted():
            return not (await kept(it))[0]

        await until_async(is_readmitted)


async def test_an_answer_that_does_not_begin_in_time(monkeypatch):
    monkeypatch.setattr(router, "SWEEP_S", 0.02)
    async with routing(1, router_first_byte_timeout=0.1) as it:
        it.fleet[0].answer = sends(then_s=60)
        answered = await it.post({"inputs": "Hi"}, "/invocations")
        assert answered.status_code == 504
        assert "0.1 s" in answered.json()["error"]
        await until_async(lambda: it.fleet[0].gone == 1)


async def test_an_answer_that_stands_still(monkeypatch):
    monkeypatch.setattr(router, "SWEEP_S", 0.02)
    async with routing(1, router_idle_timeout=0.1) as it:
        it.fleet[0].answer = sends(STREAM + chunk(b"data: 1\n\n"), then_s=60)
        with pytest.raises(httpx.RemoteProtocolError):
            await it.post({"prompt": "Hi"})


async def test_idle_clients_are_let_go(monkeypatch):
    monkeypatch.setattr(router, "SWEEP_S", 0.02)
    monkeypatch.setattr(downstream, "KEEP_ALIVE_S", 0.1)
    async with routing(1) as it:
        assert await it.answer(b"") == b""


async def dripped(routed: Routed, head: bytes, piece: bytes, every: float) -> bytes:
    """The answer to a client that sends a piece again and again."""
    reader, writer = await routed.raw(head)
    answer = asyncio.ensure_future(reader.read())
    async with asyncio.timeout(20):
        while not answer.done():
            writer.write(piece)
            await asyncio.wait([answer], timeout=every)
    writer.close()
    return await answer


async def test_a_head_has_to_be_whole_in_time(monkeypatch):
    monkeypatch.setattr(router, "SWEEP_S", 0.02)
    monkeypatch.setattr(downstream, "HEAD_S", 0.5, raising=False)
    async with routing(1) as it:
        found = await dripped(it, POST + b"x: ", b"a", 0.05)
        assert found.startswith(b"HTTP/1.1 408 ")
        assert b"head was not whole" in found
        # The time of an answer does not count for the next head.
        slow = posted(b'"Hi"')

        async def answer(replica, asked, writer):
            await asyncio.sleep(1)
            writer.write(whole(200, b"late"))

        it.fleet[0].answer = answer
        reader, writer = await it.raw(slow + slow[:20])
        assert b" 200 " in await reader.readuntil(b"late")
        writer.write(slow[20:])
        assert b" 200 " in await reader.readuntil(b"late")
        writer.close()


@pytest.mark.parametrize("buffer", [buffers.MAX_BODY, 1_000])
async def test_a_body_has_a_least_rate(monkeypatch, buffer):
    """With and without streaming."""
    monkeypatch.setattr(router, "SWEEP_S", 0.02)
    monkeypatch.setattr(downstream, "BEHIND_S", 0.5, raising=False)
    monkeypatch.setattr(buffers, "MAX_BODY", buffer)
    async with routing(1) as it:
        head = POST + b"content-length: 1000000\r\n\r\n" + b"a" * 2_000
        found = await dripped(it, head, b"a", 0.05)
        assert found.startswith(b"HTTP/1.1 408 ")
        assert b"less than 8192 bytes a second" in found
        # Uploads above this rate are not ended, however long they take.
        reader, writer = await it.raw(POST + b"content-length: 204800\r\n\r\n")
        for _ in range(25):
            writer.write(b"a" * 8192)
            await asyncio.sleep(0.05)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}"), 60)
        writer.close()


async def test_a_client_that_is_not_read_is_not_called_slow(monkeypatch):
    """Its replica accepts nothing for longer than a client may be silent."""
    monkeypatch.setattr(router, "SWEEP_S", 0.02)
    monkeypatch.setattr(downstream, "BEHIND_S", 0.5, raising=False)
    monkeypatch.setattr(buffers, "MAX_BODY", 100_000)
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await go_on.wait()
        await reader.readexactly(30_000_000)
        writer.write(whole(200, b"all of it"))
        writer.close()

    async with routing(1) as it:
        late = await asyncio.start_server(serve, "127.0.0.1", 0, limit=65_536)
        (replica,) = it.router.pool.replicas
        port, replica.port = replica.port, late.sockets[0].getsockname()[1]
        reader, writer = await it.raw(POST + b"content-length: 30000000\r\n\r\n")
        writer.write(b"a" * 30_000_000)
        await asyncio.sleep(1.5)
        go_on.set()
        await writer.drain()
        assert (await reader.readuntil(b"all of it")).startswith(b"HTTP/1.1 200 ")
        writer.close()
        replica.port = port
        await close(late)


async def test_nobody_keeps_others_out_with_connections_alone(monkeypatch):
    monkeypatch.setattr(router, "most_routed", lambda: 20, raising=False)
    go_on = asyncio.Event()

    async def answer(replica, asked, writer):
        await go_on.wait()
        writer.write(whole(200, b"done"))

    async with routing(1) as it:
        idle = [await it.raw(b"") for _ in range(30)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in idle]
        assert (await it.post({"prompt": "Hi"})).status_code == 200
        await until_async(lambda: sum(end.done() for end in ends) >= 11)
        it.fleet[0].answer = answer
        busy = [await it.raw(posted(b'"Hi"')) for _ in range(20)]
        await until_async(lambda: len(it.router.proxied) == 20)
        found = await it.answer(posted(b'"Hi"'))
        assert found.startswith(b"HTTP/1.1 503 ")
        assert b"there are 20 connections" in found
        ping = b"GET /ping HTTP/1.1\r\nconnection: close\r\n\r\n"
        assert (await it.answer(ping)).startswith(b"HTTP/1.1 200 ")
        go_on.set()
        for reader, writer in busy:
            assert b" 200 " in await reader.readuntil(b"done")
            writer.close()
        for end, (_, writer) in zip(ends, idle, strict=True):
            writer.close()
            await asyncio.wait([end])


async def test_the_headers_and_the_memory_of_heads_have_limits(monkeypatch):
    async with routing(1) as it:
        many = posted(b'"Hi"', *[b"a:"] * 950, b"connection: close")
        assert (await it.answer(many)).startswith(b"HTTP/1.1 200 ")
        more = posted(b'"Hi"', *[b"a:"] * 1_000)
        assert (await it.answer(more)).startswith(b"HTTP/1.1 431 ")
        monkeypatch.setattr(buffers, "MAX_HEADS", 100_000)
        found = await it.answer(many)
        assert found.startswith(b"HTTP/1.1 503 ")
        assert b"memory" in found
        assert (await it.post({"prompt": "Hi"})).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "X-Tenant",
        "X-Amzn-SageMaker-Adapter-Identifier",
        "x-amzn-sagemaker-session-id",
        "X-Session-Id",
        "X-Claude-Code-Session-Id",
        "X-Dynamo-Parent-Session-ID",
        "my-key",
    ],
)
async def test_no_client_has_what_is_meant_for_replicas_taken_off(name):
    async with routing(1, cache_salt_header="X-Tenant", session_key="My-Key") as it:
        body = {"prompt": "Hi"}
        for connection in (f"keep-alive, {name}", f"{name.upper()} ,close"):
            headers = [(name, "the gateway's"), ("connection", connection)]
            answer = await it.post(body, headers=headers)
            assert answer.status_code == 400
            assert name.lower() in answer.text
            headers = [("connection", "keep-alive"), *headers]
            assert (await it.post(body, "/invocations", headers=headers)).status_code == 400
        assert not it.fleet[0].asked
        headers = [(name, "the gateway's"), ("connection", "close, X-Mine"), ("x-mine", "1")]
        assert (await it.post(body, headers=headers)).status_code == 200
        (asked,) = it.fleet[0].asked
        assert asked.headers[name.lower()] == "the gateway's"
        assert "x-mine" not in asked.headers


async def test_a_tenant_is_named_once():
    async with routing(1, cache_salt_header="X-Tenant") as it:
        for path in ("/v1/completions", "/invocations"):
            headers = [("X-Tenant", "victim"), ("x-tenant", "attacker")]
            answer = await it.post({"prompt": "Hi"}, path, headers=headers)
            assert answer.status_code == 400
            assert "x-tenant is there 2 times" in answer.text
            assert "victim" not in answer.text
        assert not it.fleet[0].asked


async def test_answers_that_are_not_http():
    async with routing(2) as it:
        for replica in it.fleet:
            replica.answer = sends(b"nonsense\r\n\r\n")
        answered = await it.post({"prompt": "Hi"})
        assert answered.status_code == 502
        assert answered.json()["error"]["type"] == "BadGatewayError"


async def test_stopping_waits_for_what_is_under_way():
    go_on = asyncio.Event()

    async def answer(replica, asked, writer):
        await go_on.wait()
        writer.write(whole(200, b"done"))

    async with routing(1) as it:
        it.fleet[0].answer = answer
        asked = asyncio.create_task(it.post({"prompt": "Hi"}))
        await until_async(lambda: bool(it.fleet[0].asked))
        it.router.stop()
        await until_async(lambda: it.router.draining)
        for path in ("/ping", "/health"):
            assert (await it.client.get(path)).json()["status"] == "draining"
        assert (await it.post({"prompt": "Hi"})).status_code == 503
        go_on.set()
        assert (await asked).text == "done"
        await it.task


# The answering replica


async def test_adapters_go_where_they_are():
    async with routing(3, wait=False) as it:
        it.fleet[2].models.append({"id": "poet", "parent": "base"})
        await it.ready()
        for body in ({"model": "poet"}, {"adapters": "poet"}, {"adapters": ["poet"]}):
            for _ in range(5):
                answer = await it.post({"prompt": "Hi", **body})
                assert answer.json()["replica"] == it.fleet[2].url
        header = {"X-Amzn-SageMaker-Adapter-Identifier": "poet"}
        for path, headers in (("/invocations", header), ("/invocations?adapter=poet", {})):
            for _ in range(5):
                answer = await it.post({"inputs": "Hi"}, path, headers=headers)
                assert answer.json()["replica"] == it.fleet[2].url


async def test_sagemaker_sessions_go_to_the_replica_that_has_them():
    async def begin(replica, asked, writer):
        header = "X-Amzn-SageMaker-New-Session-Id: s-1; Expires=2030-01-01T00:00:00Z"
        writer.write(whole(200, b"{}", header))

    async with routing(5) as it:
        it.fleet[3].answer = begin
        while not it.fleet[3].asked:
            await it.post({"requestType": "NEW_SESSION"}, "/invocations")
        it.fleet[3].answer = None
        header = {"X-Amzn-SageMaker-Session-Id": "s-1"}
        for _ in range(10):
            answer = await it.post({"inputs": "Hi"}, "/invocations", headers=header)
            assert answer.json()["replica"] == it.fleet[3].url


async def test_a_sub_agent_is_placed_beside_its_parent():
    def moved():
        series = "slipway_router_session_moves_total"
        return REGISTRY.get_sample_value(series, {"reason": "gone"}) or 0

    async with routing(5) as it:
        session = {"X-Claude-Code-Session-Id": "s"}
        long = "word " * 1000
        first = (await it.post({"prompt": long}, headers=session)).json()["replica"]
        for number in range(5):
            agent = {**session, "X-Claude-Code-Agent-Id": f"a{number}"}
            answer = await it.post({"prompt": f"{number} {long}"}, headers=agent)
            assert answer.json()["replica"] == first
        before = moved()
        (replica,) = [replica for replica in it.fleet if replica.url == first]
        await replica.stop()
        await it.ready(4)
        answer = await it.post({"prompt": f"{long} and more"}, headers=session)
        second = answer.json()["replica"]
        assert second != first
        assert moved() == before + 1
        answer = await it.post({"prompt": f"compacted {long}"}, headers=session)
        assert answer.json()["replica"] == second


async def test_equal_prompts_go_to_one_replica():
    async with routing(5) as it:
        long = "word " * 1000
        first = (await it.post({"prompt": long})).json()["replica"]
        for n in range(10):
            answer = await it.post({"prompt": f"{long} and {n}"})
            assert answer.json()["replica"] == first


async def test_a_replica_that_has_started_anew_has_nothing_cached():
    async with routing(5) as it:
        long = {"prompt": "word " * 10_000}
        first = (await it.post(long)).json()["replica"]
        (replica,) = [replica for replica in it.fleet if replica.url == first]
        await replica.stop()
        await it.ready(4)
        replica.born = 2.0
        await replica.start()
        await it.ready()
        chosen = {(await it.post({**long, "salt": n})).json()["replica"] for n in range(1)}
        again = {(await it.post(long)).json()["replica"] for _ in range(5)}
        assert len(chosen | again) == 1


TIERS = (
    'slipway_kv_tier_capacity_tokens{{tier="l1"}} {memory}\n'
    'slipway_kv_tier_capacity_tokens{{tier="disk"}} 0.0\n'
    'slipway_kv_shared_store_info{{store="{store}"}} 1.0\n'
)


async def test_replicas_may_have_different_tiers_and_it_shows_who_has_what():
    async with routing(3, wait=False) as it:
        with_memory, with_store, plain = it.fleet
        with_memory.tiers = TIERS.format(memory=9e6, store="a")
        with_store.tiers = TIERS.format(memory=0, store="a")
        await it.ready()
        homes = {(await it.post({"prompt": "word " * 400})).json()["replica"] for _ in range(5)}
        assert len(homes) == 1
        found = (await it.client.get("/replicas")).json()["replicas"]
        rows = {row["replica"]: row for row in found}
        assert rows[with_memory.url]["kv_tier_tokens"] == {"memory": 9_000_000}
        assert rows[with_memory.url]["kv_shared_store"] == "a"
        assert rows[plain.url]["kv_tier_tokens"] == {}
        assert rows[plain.url]["kv_shared_store"] == ""
        sent = {url: row["kv_tokens_sent"] for url, row in rows.items()}
        home = homes.pop()
        assert sent[home]["engine"] == 384
        assert sent[with_memory.url]["memory"] == (384 if home == with_memory.url else 0)
        shares = home != plain.url
        assert sent[with_store.url]["shared"] == sent[with_memory.url]["shared"] == 384 * shares


def ordered(routed: Routed) -> list[FakeReplica]:
    """The replicas in the order of the router's list."""
    return sorted(routed.fleet, key=lambda replica: replica.url)


async def test_a_request_goes_to_a_replica_of_the_model_that_it_names(caplog):
    async with routing(3, wait=False) as it:
        for replica, name in zip(ordered(it), ("one", "one", "other"), strict=True):
            replica.models = [{"id": name}, {"id": "lmi"}]
        await it.ready()

        async def homes(body: dict[str, str], count: int = 12) -> set[str]:
            sent = [await it.post({"prompt": f"{n}", **body}) for n in range(count)]
            return {answer.json()["replica"] for answer in sent}

        one, two, other = (replica.url for replica in ordered(it))
        assert await homes({"model": "one"}) == {one, two}
        assert await homes({"model": "other"}) == {other}
        everyone = {one, two, other}
        for body in ({}, {"model": "lmi"}, {"model": "nobody"}):  # all replicas refuse these
            assert await homes(body) == everyone
        assert caplog.text.count("replicas serve different models") == 1
        (told,) = (await it.client.get("/replicas")).json()["warnings"]
        assert f"different models: one ({one}, {two}), other ({other});" in told
        # Requests of a failed or absent replica do not go to another model.
        ordered(it)[2].answer = sends(whole(503, b"busy", "retry-after: 1"))
        assert (await it.post({"prompt": "Hi", "model": "other"})).text == "busy"
        await ordered(it)[2].stop()
        await it.ready(2)
        answer = await it.post({"prompt": "Hi", "model": "other"})
        assert answer.status_code == 503
        assert "no replica of other can take the request: 1 down" in answer.text
        assert await homes({"model": "one"}) == {one, two}


KEYS = 'slipway_kv_chunk_tokens {chunk}\nslipway_tenants_info{{header="{header}"}} 1.0\n'


async def test_replicas_whose_caches_are_found_by_other_keys(caplog):
    async with routing(4, wait=False, cache_salt_header="X-Tenant") as it:
        keys = ((256.0, "x-tenant"), (256.0, "x-tenant"), (128.0, ""))
        for replica, (chunk_tokens, header) in zip(ordered(it), keys, strict=False):
            replica.tiers = KEYS.format(chunk=chunk_tokens, header=header)
        await it.ready()
        one, two, three, _ = (replica.url for replica in ordered(it))
        chunks, tenants = sorted((await it.client.get("/replicas")).json()["warnings"])
        assert f"chunks of 256 tokens ({one}, {two}), 128 tokens ({three})" in chunks
        assert f"told apart by x-tenant ({one}, {two}), nothing ({three})," in tenants
        assert "at the router by x-tenant" in tenants
        await until_async(lambda: sum(it.levelname == "WARNING" for it in caplog.records) == 2)
        # A mended replica becomes ready again.
        await ordered(it)[2].stop()
        await it.ready(3)
        ordered(it)[2].tiers = KEYS.format(chunk=256.0, header="x-tenant")
        await ordered(it)[2].start()
        await it.ready()
        assert (await it.client.get("/replicas")).json()["warnings"] == []


async def test_replicas_that_tell_tenants_apart_and_a_router_that_does_not(caplog):
    async with routing(2, wait=False) as it:
        for replica in it.fleet:
            replica.tiers = KEYS.format(chunk=256.0, header="x-tenant")
        await it.ready()
        (told,) = (await it.client.get("/replicas")).json()["warnings"]
        assert "at the router by nothing" in told
        await until_async(lambda: told in caplog.text)


async def test_replicas_whose_shared_stores_are_not_one():
    async with routing(3, wait=False) as it:
        for replica, store in zip(ordered(it), "aab", strict=True):
            replica.tiers = TIERS.format(memory=0, store=store)
        await it.ready()
        (told,) = (await it.client.get("/replicas")).json()["warnings"]
        one, two, three = (replica.url for replica in ordered(it))
        assert f"not the same: a ({one}, {two}), b ({three});" in told
        # Other models have other caches.
        ordered(it)[2].models = [{"id": "other"}]
        await until_async(lambda: it.router.pool.replicas[2].model == "other")
        (told,) = (await it.client.get("/replicas")).json()["warnings"]
        assert told.startswith("replicas serve different models")


async def test_a_request_may_ask_why_it_went_where(caplog):
    caplog.set_level(logging.DEBUG, "serving.router.placement")
    async with routing(2) as it:
        body = {"prompt": "word " * 400}
        first = await it.post(body)
        assert "x-slipway-route" not in first.headers
        answer = await it.post(body, headers={"X-Slipway-Route": "1"})
        chosen = f"prefixaware: {first.json()['replica']}"
        reason = f"{chosen} engine 384 of 500 tokens"
        assert answer.headers["x-slipway-route"] == reason
        own = [it for it in caplog.records if it.name == "serving.router.placement"]
        lines = [it.getMessage() for it in own]
        assert lines[0] == f"{chosen} engine 0 of 500 tokens"
        assert lines[1] == reason
        assert "word" not in "".join(lines)


async def test_how_fast_a_replica_loads_is_looked_at_again(monkeypatch):
    monkeypatch.setattr(health, "SPEEDS_S", 0.0)
    async with routing(1, wait=False) as it:
        it.fleet[0].tiers = TIERS.format(memory=9, store="a")
        await it.ready()
        (replica,) = it.router.pool.replicas
        assert replica.prices == DEFAULT_PRICES
        it.fleet[0].tiers += (
            'slipway_kv_tier_load_seconds_per_token{tier="shared"} 3e-05\n'
            "slipway_prefill_seconds_per_token 1e-05\n"
        )
        await until_async(lambda: replica.prices.shared == pytest.approx(3))


async def test_changes_of_adapters_go_to_all():
    async with routing(3) as it:
        answer = await it.client.post("/adapters?name=poet&src=/poet", content=b"")
        assert answer.status_code == 200
        assert [replica.asked[0].target for replica in it.fleet] == [
            "/adapters?name=poet&src=/poet"
        ] * 3
        it.fleet[1].answer = sends(whole(409, b'{"code":409}', "content-type: application/json"))
        answer = await it.client.delete("/adapters/poet")
        assert (answer.status_code, answer.json()) == (409, {"code": 409})
        assert [len(replica.asked) for replica in it.fleet] == [2, 2, 2]
        it.fleet[2].answer = sends(whole(503, b'{"code":503}', "retry-after: 7"))
        answer = await it.client.delete("/adapters/poet")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


async def test_a_call_about_a_conversation_goes_to_all_and_the_most_is_answered():
    """Also where some replicas have no tiers, or fail."""

    def keeps(tokens):
        return sends(whole(200, b'{"tokens": %d}' % tokens, "content-type: application/json"))

    async with routing(4, cache_salt_header="X-Tenant") as it:
        for replica, tokens in zip(it.fleet, (256, 4096, 0), strict=False):
            replica.answer = keeps(tokens)
        it.fleet[3].answer = sends(whole(404, b"{}"))
        headers = {"x-tenant": "a", "x-other": "b"}
        for method, query in (("GET", ""), ("DELETE", "?forget=true")):
            target = f"/kv_sessions/mine{query}"
            found = await it.client.request(method, target, headers=headers)
            assert (found.status_code, found.json()) == (200, {"tokens": 4096})
        for replica in it.fleet:
            asked = replica.asked[-1]
            assert (asked.method, asked.target) == ("DELETE", "/kv_sessions/mine?forget=true")
            assert (asked.headers["x-tenant"], "x-other" in asked.headers) == ("a", False)
        for replica in it.fleet:
            replica.answer = sends(whole(404, b'{"code":404}', "content-type: application/json"))
        found = await it.client.delete("/kv_sessions/mine")
        assert (found.status_code, found.json()) == (404, {"code": 404})
        found = await it.client.put("/kv_sessions/mine")
        assert (found.status_code, found.headers["allow"]) == (405, "GET, DELETE")


async def test_a_conversation_is_not_forgotten_while_a_replica_has_not():
    async def dying(replica, asked, writer):
        writer.transport.abort()

    failing = sends(whole(503, b'{"code":503}', "content-type: application/json"))
    for answer in (failing, dying):
        async with routing(3) as it:
            for replica in it.fleet:
                replica.answer = sends(whole(200, b'{"tokens": 256}'))
            it.fleet[1].answer = answer
            assert (await it.client.delete("/kv_sessions/mine")).status_code == 200
            found = await it.client.delete("/kv_sessions/mine?forget=true")
            assert found.status_code >= 500


@pytest.mark.parametrize("state", ["starting", "draining", "failed"])
async def test_a_replica_without_kv_has_nothing_to_forget(state):
    async with routing(2) as it:
        it.fleet[0].answer = sends(whole(200, b'{"tokens": 256}'))
        it.fleet[1].ping = (503, {"status": state})
        await it.ready(1)
        found = await it.client.delete("/kv_sessions/mine?forget=true")
        assert (found.status_code, it.fleet[1].asked) == (200, [])


async def test_a_conversation_is_not_forgotten_while_a_replica_is_unreachable():
    def cut(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with routing(2) as it:
        it.fleet[0].answer = sends(whole(200, b'{"tokens": 256}'))
        await it.fleet[1].stop()  # so its KV has ended, too
        await it.ready(1)
        forget = "/kv_sessions/mine?forget=true"
        assert (await it.client.delete(forget)).status_code == 200
        async with await asyncio.start_server(cut, "127.0.0.1", it.fleet[1].port):
            found = await it.client.delete(forget)
            assert found.status_code >= 500
            assert "did not answer" in found.text


async def test_a_prefetch_goes_to_the_server_of_the_last_turn():
    async with routing(3) as it:
        path, turn = "/kv_sessions/my%20own/prefetch", {"prompt": "a"}
        await it.client.post(path)
        assert [len(replica.asked) for replica in it.fleet] == [1, 1, 1]
        answer = await it.post(turn, headers={"x-session-id": "my own"})
        await it.client.post(path)
        asked = {it.url: len(it.asked) for it in it.fleet}
        assert asked.pop(answer.json()["replica"]) == 3
        assert [*asked.values()] == [1, 1]


async def test_a_change_goes_nowhere_else():
    async with routing(1) as it, routing(1) as other:
        where = f"location: {other.fleet[0].url}/adapters"
        it.fleet[0].answer = sends(whole(307, b"{}", where))
        answer = await it.client.post("/adapters?name=poet&src=/poet", content=b"")
        assert (answer.status_code, other.fleet[0].asked) == (307, [])


async def test_a_replica_that_ends_keeps_no_change_from_the_others():
    """The router has not noticed the end yet: it probes once a second."""
    states = iter(["draining", "stopped", "failed"])

    async def ending(replica, asked, writer):
        replica.ping = (503, {"status": next(states)})
        writer.write(whole(503, b'{"code":503}', "retry-after: 1"))

    async def dying(replica, asked, writer):
        await replica.stop()

    for answer, count in ((ending, 3), (dying, 1)):
        for _ in range(count):
            async with routing(2) as it:
                it.fleet[0].answer = answer
                found = await it.client.post("/adapters?name=poet&src=/poet", content=b"")
                assert (found.status_code, found.json()["replica"]) == (200, it.fleet[1].url)


async def test_a_change_that_only_ending_replicas_have_got_is_refused():
    async def dying(replica, asked, writer):
        await replica.stop()

    async with routing(1) as it:
        it.fleet[0].answer = dying
        found = await it.client.post("/adapters?name=poet&src=/poet", content=b"")
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")


async def test_a_change_is_answered_when_all_have_answered():
    """Even if one has failed: all work is done before the answer."""
    ended = 0

    async def breaks_off(replica, asked, writer):
        writer.transport.abort()

    async def slow(replica, asked, writer):
        nonlocal ended
        await asyncio.sleep(0.3)
        ended += 1
        writer.write(whole(200, b"{}"))

    async with routing(3) as it:
        it.fleet[0].answer = breaks_off
        it.fleet[1].answer = it.fleet[2].answer = slow
        found = await it.client.post("/adapters?name=poet&src=/poet", content=b"")
        assert (found.status_code, ended) == (502, 2)


async def test_a_change_of_adapters_that_finds_no_room_may_be_sent_again(monkeypatch):
    monkeypatch.setattr(buffers, "MAX_BODIES", 100_000)
    async with routing(1) as it:
        half = POST + b"content-length: 100000\r\n\r\n" + b"a" * 60_000
        writers = [(await it.raw(half))[1] for _ in range(2)]
        await until_async(lambda: it.router.buffers.bodies == 120_000)
        answer = await it.client.post("/adapters", content=b'{"name":"x","src":"/y"}')
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "memory" in answer.text
        for writer in writers:
            writer.close()
        await until_async(lambda: not it.router.buffers.bodies)
        answer = await it.client.post("/adapters", content=b'{"name":"x","src":"/y"}')
        assert answer.status_code == 200


async def test_what_the_router_says_of_its_replicas():
    async with routing(2) as it:
        await it.post({"prompt": "word " * 1000})
        found = (await it.client.get("/replicas")).json()["replicas"]
        assert [row["state"] for row in found] == ["ready", "ready"]
        assert found[0]["kv_cache_tokens"] == 100_000
        assert found[0]["kv_tier_tokens"] == {}
        series = (await it.client.get("/metrics")).text
        counted = 'slipway_router_requests_total{end="finished",replica="%s",status="200"} 1.0'
        assert sum(counted % replica.url in series for replica in it.fleet) == 1


async def test_many_replicas_are_told_in_pages():
    urls = [f"http://127.0.{n // 250}.{n % 250 + 1}:9" for n in range(2 * status.PAGE + 50)]
    async with routing(0, wait=False, router_replicas=",".join(urls)) as it:
        await until_async(lambda: len(it.router.pool.replicas) == len(urls))
        found, start, sizes = [], 0, []
        while start is not None:
            page = (await it.client.get("/replicas", params={"start": start})).json()
            assert page["count"] == len(urls)
            sizes.append(len(page["replicas"]))
            found += [row["replica"] for row in page["replicas"]]
            start = page["next"]
        assert sizes == [status.PAGE, status.PAGE, 50]
        assert sorted(found) == sorted(urls)
        first = (await it.client.get("/replicas")).json()
        assert [row["replica"] for row in first["replicas"]] == found[: status.PAGE]
        beyond = (await it.client.get("/replicas?start=9999")).json()
        assert (beyond["replicas"], beyond["next"]) == ([], None)
        for wrong in ("-1", "two", "1.5", "9" * 30):
            answer = await it.client.get("/replicas", params={"start": wrong})
            assert answer.status_code == 400
            assert f"start='{wrong}': is the number" in answer.text


async def test_series_of_replicas_that_are_gone_are_gone(monkeypatch, tmp_path):
    file = tmp_path / "replicas"

    async def shown() -> set[str]:
        series = (await it.client.get("/metrics")).text
        return set(re.findall(rf'(\w+)\{{[^}}]*replica="{gone.url}"', series))

    now = {"replica_ready", "in_flight", "backlog_tokens", "backlog_seconds"}
    now |= {"prefill_tokens_per_second"}
    now = {f"slipway_router_{name}" for name in now}
    everything = now | {f"slipway_router_requests_{name}" for name in ("total", "created")}
    async with routing(2, routing_strategy="roundrobin", wait=False) as other:
        stays, gone = other.fleet
        file.write_text(f"{stays.url}\n{gone.url}")
        async with routing(0, router_replicas=file.as_uri(), routing_strategy="roundrobin") as it:
            await it.ready(2)
            for _ in range(2):
                assert (await it.post({"prompt": "Hi"})).status_code == 200
            assert await shown() == everything
            file.write_text(stays.url)
            await until_async(lambda: len(it.router.pool.replicas) == 1)
            # The counts of its last requests can still be read.
            assert await shown() == {f"slipway_router_requests_{it}" for it in ("total", "created")}
            monkeypatch.setattr(replicas, "COUNTED_S", 0.0, raising=False)
            assert await shown() == set()
            file.write_text(f"{stays.url}\n{gone.url}")
            await it.ready(2)
            assert await shown() == now


async def test_retry_budget():
    budget = RetryBudget()
    assert [budget.spend() for _ in range(101)] == [True] * 100 + [False]
    for _ in range(11):
        budget.earn()
    assert [budget.spend(), budget.spend()] == [True, False]


async def test_files_and_batches_go_to_servers_that_share_them(tmp_path):
    paths = [("POST", "/v1/files"), ("DELETE", "/v1/files/a"), ("GET", "/v1/files/a/content")]
    paths += [("POST", "/v1/batches"), ("GET", "/v1/batches/a"), ("POST", "/v1/batches/a/cancel")]
    folder = str(tmp_path)
    async with routing(
        2, batch_folder=folder, max_request_size=1_000, batch_file_size=100_000
    ) as it:
        for method, path in paths:
            size = 100_000 if path == "/v1/files" else 1_000
            answer = await it.client.request(method, path, content=b"x" * size)
            assert answer.status_code == 200, path
        assert sum(len(replica.asked) for replica in it.fleet) == len(paths)
        for path, size, told in (
            ("/v1/files", 200_000, "100000 bytes; OPTION_BATCH_FILE_SIZE sets the limit"),
            ("/v1/batches", 2_000, "1000 bytes; SERVING_MAX_REQUEST_SIZE sets the limit"),
        ):
            answer = await it.client.post(path, content=b"x" * size)
            assert answer.status_code == 413
            assert told in answer.json()["error"]["message"]
    async with routing(1) as it:
        for method, path in paths:
            answer = await it.client.request(method, path)
            assert answer.status_code == 404
            assert "OPTION_BATCH_FOLDER" in answer.text
