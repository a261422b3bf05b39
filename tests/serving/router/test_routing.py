"""What clients of the router see: HTTP, retries, and who answers."""

import asyncio
import json

import httpx
import pytest

from serving.router import client, exchange, replicas, server
from tests.serving.router.conftest import END, STREAM, chunk, routing, until, whole

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
        await until(lambda: not it.router.exchanges)


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
    async def answer(replica, asked, writer):
        writer.write(STREAM + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + END)

    async with routing(1) as it:
        it.fleet[0].answer = answer
        found = await it.answer(b'POST /v1/completions HTTP/1.0\r\ncontent-length: 4\r\n\r\n"Hi"')
        head, _, body = found.partition(b"\r\n\r\n")
        assert body == b"data: 1\n\ndata: 2\n\n"
        assert b"transfer-encoding" not in head


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


async def test_head_requests():
    async def answer(replica, asked, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n")

    async with routing(1) as it:
        it.fleet[0].answer = answer
        assert (await it.client.head("/v1/models/")).status_code == 404
        got = await it.client.head("/execution-parameters")
        assert (got.status_code, got.headers["content-length"]) == (200, "20")
        assert (await it.client.head("/ping")).status_code == 200


async def test_large_bodies_are_streamed(monkeypatch):
    monkeypatch.setattr(client, "BUFFER", 100_000)
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
        assert it.router.buffered == 0


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
        assert it.router.buffered == 0


async def test_paths():
    async with routing(1) as it:
        paths = ("/invocations", "/predictions/lmi", "/models/lmi/invoke")
        for path in (*paths, "/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            assert (await it.post("Hi", path)).status_code == 200
            refused = await it.client.get(path)
            assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert (await it.client.get("/v1/models")).status_code == 200
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
    async def answer(replica, asked, writer):
        writer.write(STREAM + chunk(b"data: 1\n\n"))
        await asyncio.sleep(60)

    async with routing(1) as it:
        it.fleet[0].answer = answer
        _, writer = await it.raw(posted(b'"Hi"'))
        await until(lambda: bool(it.fleet[0].asked))
        writer.close()
        await until(lambda: it.fleet[0].gone == 1)
        (replica,) = it.router.fleet.replicas
        assert (replica.in_flight, replica.queued) == (0, 0)
        assert not it.router.exchanges


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
        await asyncio.sleep(0.5)
        assert sent < 20_000_000  # of 32 MB: what sockets hold
        before = sent
        await asyncio.sleep(0.2)
        assert sent == before
        found = 0
        while part := await reader.read(1 << 20):
            found += len(part)
        assert found > 2_000 * 16_384
        writer.close()


# Retries and failures


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_another_replica_is_asked_when_one_cannot(status):
    async def answer(replica, asked, writer):
        writer.write(whole(status, b"no"))

    async with routing(2) as it:
        it.fleet[0].answer = answer
        for _ in range(20):
            answered = await it.post({"prompt": "Hi"})
            assert answered.json()["replica"] == it.fleet[1].url
        assert it.fleet[0].asked


@pytest.mark.parametrize("status", [400, 404, 424, 500, 507])
async def test_other_answers_are_passed_on(status):
    async def answer(replica, asked, writer):
        writer.write(whole(status, b"no"))

    async with routing(2) as it:
        for replica in it.fleet:
            replica.answer = answer
        answered = await it.post({"prompt": "Hi"})
        assert (answered.status_code, answered.text) == (status, "no")
        assert sum(len(replica.asked) for replica in it.fleet) == 1


async def test_when_all_are_busy_the_client_hears_it_from_a_replica():
    async def answer(replica, asked, writer):
        writer.write(whole(503, b"busy", "retry-after: 7"))

    async with routing(3) as it:
        for replica in it.fleet:
            replica.answer = answer
        answered = await it.post({"prompt": "Hi"})
        assert (answered.status_code, answered.text) == (503, "busy")
        assert answered.headers["retry-after"] == "7"
        assert sum(len(replica.asked) for replica in it.fleet) == 3


async def test_retries_are_no_load_of_their_own():
    async def answer(replica, asked, writer):
        writer.write(whole(503, b"busy"))

    async with routing(2) as it:
        for replica in it.fleet:
            replica.answer = answer
        for _ in range(300):
            assert (await it.post({"prompt": "Hi"})).status_code == 503
        assert 390 <= sum(len(replica.asked) for replica in it.fleet) <= 431


async def test_a_replica_that_dies_before_it_answers_costs_nobody_an_answer():
    async def answer(replica, asked, writer):
        await asyncio.sleep(60)

    async with routing(2, routing_strategy="roundrobin") as it:
        it.fleet[0].answer = answer
        asked = [asyncio.create_task(it.post({"prompt": "Hi"})) for _ in range(40)]
        await until(lambda: len(it.fleet[0].asked) == 20)
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
    monkeypatch.setattr(replicas, "PING_TIMEOUT_S", 0.1)

    async def answer(replica, asked, writer):
        await asyncio.sleep(60)

    async with routing(2, routing_strategy="roundrobin") as it:
        frozen = it.fleet[0]
        frozen.answer = answer
        asked = [asyncio.create_task(it.post({"prompt": "Hi"})) for _ in range(10)]
        await until(lambda: len(frozen.asked) == 5)

        async def nothing(*_):
            await asyncio.sleep(60)

        monkeypatch.setattr(frozen, "_answer", nothing)
        answers = await asyncio.gather(*asked)
        assert {answer.json()["replica"] for answer in answers} == {it.fleet[1].url}


async def test_an_idle_connection_that_the_replica_has_closed_is_no_failure():
    async def answer(replica, asked, writer):
        writer.write(whole(200, b"once"))
        await writer.drain()
        # Closed just as the next request comes.
        asyncio.get_running_loop().call_later(0.001, writer.transport.abort)

    async with routing(1) as it:
        it.fleet[0].answer = answer
        for _ in range(50):
            assert (await it.post({"prompt": "Hi"})).text == "once"
        (replica,) = it.router.fleet.replicas
        assert not replica.breaker.open(0)


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


async def test_answers_that_are_mostly_errors_open_the_breaker():
    async def answer(replica, asked, writer):
        writer.write(whole(500, b"no"))

    async with routing(2, routing_strategy="roundrobin") as it:
        it.fleet[0].answer = answer
        statuses = [(await it.post({"prompt": "Hi"})).status_code for _ in range(60)]
        assert statuses.count(500) == 20
        assert statuses[41:] == [200] * 19


async def test_an_answer_that_does_not_begin_in_time(monkeypatch):
    monkeypatch.setattr(server, "SWEEP_S", 0.02)

    async def answer(replica, asked, writer):
        await asyncio.sleep(60)

    async with routing(1, router_first_byte_timeout=0.1) as it:
        it.fleet[0].answer = answer
        answered = await it.post({"inputs": "Hi"}, "/invocations")
        assert answered.status_code == 504
        assert "0.1 s" in answered.json()["error"]
        await until(lambda: it.fleet[0].gone == 1)


async def test_an_answer_that_stands_still(monkeypatch):
    monkeypatch.setattr(server, "SWEEP_S", 0.02)

    async def answer(replica, asked, writer):
        writer.write(STREAM + chunk(b"data: 1\n\n"))
        await asyncio.sleep(60)

    async with routing(1, router_idle_timeout=0.1) as it:
        it.fleet[0].answer = answer
        with pytest.raises(httpx.RemoteProtocolError):
            await it.post({"prompt": "Hi"})


async def test_idle_clients_are_let_go(monkeypatch):
    monkeypatch.setattr(server, "SWEEP_S", 0.02)
    monkeypatch.setattr(server, "CLIENT_IDLE_S", 0.1)
    async with routing(1) as it:
        assert await it.answer(b"GET /ping HT") == b""


async def test_answers_that_are_not_http():
    async def answer(replica, asked, writer):
        writer.write(b"nonsense\r\n\r\n")

    async with routing(2) as it:
        for replica in it.fleet:
            replica.answer = answer
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
        await until(lambda: bool(it.fleet[0].asked))
        it.router.stop()
        await until(lambda: it.router.draining)
        assert (await it.client.get("/ping")).json()["status"] == "draining"
        assert (await it.post({"prompt": "Hi"})).status_code == 503
        go_on.set()
        assert (await asked).text == "done"
        assert await it.task == 0


# Who answers


async def test_adapters_go_where_they_are():
    async with routing(3, wait=False) as it:
        it.fleet[2].models.append({"id": "poet", "parent": "base"})
        await it.ready()
        for body in ({"model": "poet"}, {"adapters": "poet"}, {"adapters": ["poet"]}):
            for _ in range(5):
                answer = await it.post({"prompt": "Hi", **body})
                assert answer.json()["replica"] == it.fleet[2].url
        header = {"X-Amzn-SageMaker-Adapter-Identifier": "poet"}
        answer = await it.post({"inputs": "Hi"}, "/invocations", headers=header)
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


async def test_changes_of_adapters_go_to_all():
    async def refuse(replica, asked, writer):
        writer.write(whole(409, b'{"code":409}', "content-type: application/json"))

    async def busy(replica, asked, writer):
        writer.write(whole(503, b'{"code":503}', "retry-after: 7"))

    async with routing(3) as it:
        answer = await it.client.post("/adapters?name=poet&src=/poet", content=b"")
        assert answer.status_code == 200
        assert [replica.asked[0].target for replica in it.fleet] == [
            "/adapters?name=poet&src=/poet"
        ] * 3
        it.fleet[1].answer = refuse
        answer = await it.client.delete("/adapters/poet")
        assert (answer.status_code, answer.json()) == (409, {"code": 409})
        assert [len(replica.asked) for replica in it.fleet] == [2, 2, 2]
        it.fleet[2].answer = busy
        answer = await it.client.delete("/adapters/poet")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


async def test_a_replica_that_ends_keeps_no_change_from_the_others():
    """The router has not noticed yet: it asks each second."""
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


async def test_pages_for_people_and_programs():
    async with routing(2) as it:
        await it.post({"prompt": "word " * 1000})
        found = (await it.client.get("/replicas")).json()["replicas"]
        assert [row["state"] for row in found] == ["ready", "ready"]
        assert found[0]["kv_cache_tokens"] == 100_000
        shown = await it.client.get("/replicas", headers={"accept": "text/html"})
        assert it.fleet[0].url in shown.text
        series = (await it.client.get("/metrics")).text
        counted = 'slipway_router_requests_total{end="finished",replica="%s",status="200"} 1.0'
        assert sum(counted % replica.url in series for replica in it.fleet) == 1


async def test_retry_budget():
    budget = exchange.RetryBudget()
    assert [budget.spend() for _ in range(101)] == [True] * 100 + [False]
    for _ in range(11):
        budget.earn()
    assert [budget.spend(), budget.spend()] == [True, False]
