# SPDX-License-Identifier: Apache-2.0
"""Streams whose replica fails: clients get the same events as without the failure."""

import asyncio
import gzip
import json
import time
from typing import Any

import httpx
import pytest

from serving.router import router
from serving.router.proxy import continuation, proxied
from tests.serving.router.conftest import END, STREAM, FakeReplica, chunk, routing, whole
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPT = [7, 8, 9]
PIECES = ["A", " long", " ans", "wer", "", "é", " with", " more", " and", " more", "."]
"""The text of each token. The fifth one's text comes with the next token."""
GREEDY = {"stream": True, "temperature": 0, "max_tokens": len(PIECES)}
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], **GREEDY},
    COMPLETION: {"prompt": "Hi", **GREEDY},
}


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Engine:
    """The replicas' answer: always the same text, in events as vLLM 0.32 sends them."""

    def __init__(self) -> None:
        self.fails_after: list[int] = []  # events before the failure, for each request in turn
        self.failure: bytes = b""  # sent at the failure; b"" aborts the connection
        self.pieces = [PIECES]  # for each request in turn; the last one also for all later requests
        self.size = 1  # tokens of an event
        self.field = "content"
        self.has_ids = True
        self.head = STREAM
        self.asked: list[Any] = []

    async def __call__(self, replica, asked, writer) -> None:
        body = asked.json()
        number = len(self.asked)
        self.asked.append((asked.target, body))
        limit = self.fails_after[number] if number < len(self.fails_after) else None
        pieces = self.pieces[min(number, len(self.pieces) - 1)]
        events = [*self.events(number, asked.target.partition("?")[0], body, pieces)]
        writer.write(self.head)
        for event in events[:limit]:
            data = event if isinstance(event, str) else json.dumps(event)
            writer.write(chunk(f"data: {data}\n\n".encode()))
            await writer.drain()
        if limit is None:
            writer.write(END)
        elif self.failure:
            writer.write(chunk(self.failure) + END)
        else:
            await asyncio.sleep(0.01)
            raise ConnectionError

    def events(self, number, path, body, pieces):
        chat = path == CHAT
        prompt = body["prompt"] if body.get("return_token_ids") and not chat else PROMPT
        prompt = prompt if isinstance(prompt, list) else PROMPT
        ids = self.has_ids and body.get("return_token_ids")
        done = len(prompt) - len(PROMPT)
        assert prompt == [*PROMPT, *range(done)]
        wanted = pieces[done : done + int(body["max_tokens"])]
        kind = "chat.completion.chunk" if chat else "text_completion"
        told: dict[str, Any] = {"id": f"id-{number}", "object": kind, "created": 10 + number}
        shared = {"prompt_token_ids": prompt if ids else None}
        if chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            role |= {"finish_reason": None}
            yield {**told, "choices": [role], "model": "m", **shared}
        for at in range(0, len(wanted), self.size):
            text = "".join(wanted[at : at + self.size])
            last = at + self.size >= len(wanted)
            tokens = [*range(done + at, min(done + at + self.size, done + len(wanted)))]
            said = {"delta": {self.field: text}} if chat else {"text": text}
            choice: dict[str, Any] = {"index": 0, **said, "logprobs": None}
            choice |= {"finish_reason": "length" if last else None}
            if not chat or last:
                choice |= {"stop_reason": None}
            if not chat:
                choice |= {"prompt_token_ids": prompt if ids and not at else None}
            choice |= {"token_ids": tokens if ids else None}
            yield {**told, "choices": [choice], "model": "m"}
        if (body.get("stream_options") or {}).get("include_usage"):
            counts = {"prompt_tokens": len(prompt), "completion_tokens": len(wanted)}
            usage = counts | {"total_tokens": sum(counts.values())}
            yield {**told, "choices": [], "model": "m", "usage": usage}
        yield "[DONE]"


async def streamed(engine: Engine, path: str, body: Any, *, count: int = 3, **settings: Any):
    """The events of a stream, and how it ended."""
    settings = {"router_continue_streams": True, **settings}
    async with routing(count, routing_strategy="roundrobin", **settings) as it:
        for replica in it.fleet:
            replica.answer = engine
        answer = await it.post(body, path)
        again = await it.client.get("/ping")  # the connection goes on
        assert again.status_code == 200
        await asyncio.sleep(0)
        assert it.router.buffers.bodies == 0
        assert not it.router.proxied
        assert len(it.router.clients) == 1
        return answer


def events(answer: httpx.Response) -> list[Any]:
    *found, rest = answer.text.split("\n\n")
    assert not rest
    data = [it.removeprefix("data: ") for it in found]
    return [it if it == "[DONE]" else json.loads(it) for it in data]


def spoken(answer: httpx.Response) -> list[Any]:
    """The events that are not blank. A token without text may be generated twice."""
    return [it for it in events(answer) if '": ""' not in json.dumps(it) or "role" in str(it)]


def text(found: list[Any]) -> str:
    choices = [it["choices"][0] for it in found[:-1] if it["choices"]]
    return "".join(it.get("text") or it.get("delta", {}).get("content") or "" for it in choices)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("failures", [[3], [6], [6, 2, 2], [10]])
async def test_a_stream_is_the_same_as_without_the_failure(path, failures):
    """Equal event by event, and as a whole: the ids, times and token counts are those of one
    answer.
    """
    body = BODIES[path] | {"stream_options": {"include_usage": True}}
    undisturbed, engine = Engine(), Engine()
    expected = await streamed(undisturbed, path, body, router_continue_streams=False)
    assert "return_token_ids" not in undisturbed.asked[0][1]
    engine.fails_after = failures
    found = await streamed(engine, path, body, count=len(failures) + 1)
    assert spoken(found) == spoken(expected)
    assert len(engine.asked) == len(failures) + 1
    target, rest = engine.asked[-1]
    assert target == COMPLETION
    kept = len(rest["prompt"]) - len(PROMPT)
    assert kept > 1
    assert rest["max_tokens"] == len(PIECES) - kept


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("missing", [1, 2])
async def test_no_event_of_a_stream_that_lacks_only_its_end_is_repeated(path, missing):
    body = BODIES[path] | {"stream_options": {"include_usage": True}}
    expected = await streamed(Engine(), path, body)
    engine = Engine()
    engine.fails_after = [len(events(expected)) - missing]
    assert spoken(await streamed(engine, path, body)) == spoken(expected)


async def test_the_rest_begins_with_a_whole_character():
    engine = Engine()
    engine.fails_after = [5]  # the fifth token has the first byte of a character
    found = await streamed(engine, COMPLETION, BODIES[COMPLETION])
    assert text(events(found)) == "".join(PIECES)
    assert engine.asked[1][1]["prompt"] == [*PROMPT, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"seed": 5, "temperature": 1}),
        (COMPLETION, {"seed": 5, "temperature": 1}),
        (COMPLETION, {"stop": ["x"]}),
        (COMPLETION, {"max_tokens": f"{len(PIECES)}"}),
        (CHAT, {"min_tokens": 2.0}),
        (COMPLETION, {"frequency_penalty": 1}),
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ],
)
async def test_what_depends_on_how_the_answer_began_is_generated_again(path, more):
    engine = Engine()
    engine.fails_after = [4, 6]
    body = BODIES[path] | more
    found = await streamed(engine, path, body)
    assert text(events(found)) == "".join(PIECES)
    assert [it for it in engine.asked if it == (path, body)] == engine.asked
    if path == CHAT:
        roles = [it for it in events(found)[:-1] if "role" in it["choices"][0]["delta"]]
        assert len(roles) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"size": 3},
        {"has_ids": False},
        {"field": "reasoning"},
        {"fails_after": [1]},
        {"head": STREAM.replace(b"\r\n\r\n", b"\r\nX-Slipway-Formatted: true\r\n\r\n")},
    ],
)
async def test_where_tokens_do_not_say_how_it_began_it_is_generated_again(change):
    engine = Engine()
    engine.fails_after = [3]
    for name, value in change.items():
        setattr(engine, name, value)
    found = events(await streamed(engine, CHAT, BODIES[CHAT]))
    deltas = [it["choices"][0]["delta"] for it in found[:-1]]
    assert "".join(it.get(engine.field) or "" for it in deltas) == "".join(PIECES)
    assert engine.asked[0] == engine.asked[1]
    assert engine.asked[0][0] == CHAT
    assert found[-1] == "[DONE]"


ERROR = {"error": {"message": "no", "type": "x", "param": None, "code": 503}}
FAILED = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(ERROR).encode()


async def test_a_replica_that_says_that_it_failed_is_left():
    engine = Engine()
    engine.fails_after, engine.failure = [4], FAILED
    found = await streamed(engine, CHAT, BODIES[CHAT])
    assert text(events(found)) == "".join(PIECES)


async def test_without_another_replica_the_client_gets_the_last_ones_error():
    engine = Engine()
    engine.fails_after, engine.failure = [4, 1], FAILED
    found = events(await streamed(engine, COMPLETION, BODIES[COMPLETION], count=2))
    assert found[-2:] == [ERROR, "[DONE]"]
    assert len(found) == 7


@pytest.mark.parametrize(
    "pieces", [["A", " long", " story"], ["A", " lo"]], ids=["another", "shorter"]
)
async def test_another_answer_is_not_mixed_in(pieces):
    engine = Engine()
    engine.fails_after = [4]
    engine.pieces = [PIECES, pieces]
    with pytest.raises(httpx.RemoteProtocolError):
        await streamed(engine, COMPLETION, BODIES[COMPLETION] | {"stop": ["x"]})
    assert len(engine.asked) == 2


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.5},
        {"temperature": None},
        {"n": 2},
        {"logprobs": 0},
        {"return_token_ids": True},
        {"prompt": ["a", "b"]},
    ],
)
async def test_others_are_cut_as_before(more):
    engine = Engine()
    engine.fails_after = [4]
    body = BODIES[COMPLETION] | more
    with pytest.raises(httpx.RemoteProtocolError):
        await streamed(engine, COMPLETION, body)
    assert engine.asked == [(COMPLETION, body)]


async def test_too_long_a_stream_is_cut(monkeypatch):
    monkeypatch.setattr(continuation, "MOST", 20)
    engine = Engine()
    engine.fails_after = [9]
    with pytest.raises(httpx.RemoteProtocolError):
        await streamed(engine, COMPLETION, BODIES[COMPLETION])


@pytest.mark.parametrize("status", [200, 400])
async def test_whole_answers_pass(status):
    async def answer(replica: FakeReplica, asked: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(status, b'{"a": 1}', "content-type: application/json"))

    async with routing(1, router_continue_streams=True) as it:
        it.fleet[0].answer = answer
        for odd in ({}, {"messages": 5}):
            found = await it.post(BODIES[CHAT] | odd, CHAT)
            assert (found.status_code, found.json()) == (status, {"a": 1})
        assert len(it.router.clients) == 1


async def test_a_stopped_stream_of_a_replica_that_is_down_is_continued(monkeypatch):
    monkeypatch.setattr(proxied, "STOPPED_S", 0.0)
    engine = Engine()

    async def hang(replica: FakeReplica, asked: Any, writer: asyncio.StreamWriter) -> None:
        engine.asked.append(None)
        data = json.dumps(next(engine.events(0, COMPLETION, asked.json(), PIECES)))
        writer.write(STREAM + chunk(f"data: {data}\n\n".encode()))
        await asyncio.sleep(60)

    async with routing(2, routing_strategy="roundrobin", router_continue_streams=True) as it:
        for replica in it.fleet:
            replica.answer = hang
        asked = asyncio.create_task(it.post(BODIES[COMPLETION], COMPLETION))
        while not engine.asked:
            await asyncio.sleep(0.01)
        (hanging,) = [one for one in it.router.pool.replicas if one.in_flight]
        for replica in it.fleet:
            replica.answer = engine
        it.router._on_gone(hanging)
        assert text(events(await asked)) == "".join(PIECES)


async def test_a_stream_that_lacks_only_its_end_ends_once(monkeypatch):
    """Bytes that its replica still sends do not become part of the next answer."""
    monkeypatch.setattr(proxied, "STOPPED_S", 0.0)

    async def hang(replica: FakeReplica, asked: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(b"data: [DONE]\n\n"))
        await asyncio.sleep(60)

    async with routing(1, router_continue_streams=True) as it:
        (replica,) = it.fleet
        replica.answer = hang
        asked = asyncio.create_task(it.post(BODIES[COMPLETION], COMPLETION))
        await until_async(lambda: any(one.begun for one in it.router.proxied))
        it.router._on_gone(it.router.pool.replicas[0])
        assert events(await asked) == ["[DONE]"]
        await until_async(lambda: replica.gone == 1, 20)


async def test_a_client_that_does_not_read_is_not_generated_for_again(monkeypatch):
    monkeypatch.setattr(router, "SWEEP_S", 0.02)
    choice = {"index": 0, "text": "a", "finish_reason": None}
    event = {"id": "1", "object": "o", "created": 1, "model": "m" * 100_000, "choices": [choice]}
    piece = chunk(b"data: %b\n\n" % json.dumps(event).encode())

    async def answer(replica: FakeReplica, asked: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        while True:
            writer.write(piece)
            await writer.drain()

    async with routing(2, router_continue_streams=True, router_idle_timeout=0.3) as it:
        for replica in it.fleet:
            replica.answer = answer
        body = json.dumps(BODIES[COMPLETION]).encode()
        head = b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n"
        # The reader stops at twice its limit.
        _, writer = await it.raw(head % (COMPLETION.encode(), len(body)) + body)
        await until_async(lambda: it.router.proxied)
        await until_async(lambda: not it.router.proxied)
        assert sum(len(replica.asked) for replica in it.fleet) == 1
        writer.transport.abort()


async def test_an_encoded_stream_passes():
    data = gzip.compress(b"data: 1\n\ndata: [DONE]\n\n")

    async def answer(replica: FakeReplica, asked: Any, writer: asyncio.StreamWriter) -> None:
        head = STREAM.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
        writer.write(head + chunk(data[:9]) + chunk(data[9:]) + END)

    async with routing(1, router_continue_streams=True) as it:
        it.fleet[0].answer = answer
        assert (await it.post(BODIES[CHAT], CHAT)).text == "data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("data", [b"data: 1\r\n\r\n", b": hello\n\n", b"data: {}\n\n"])
async def test_other_servers_events_pass(data):
    async def answer(replica: FakeReplica, asked: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(data) + chunk(data + b"data: [DONE]\n\n") + END)

    async with routing(1, router_continue_streams=True) as it:
        it.fleet[0].answer = answer
        found = await it.post(BODIES[CHAT], CHAT)
        assert found.content == data * 2 + b"data: [DONE]\n\n"


async def test_what_is_no_token_is_not_kept():
    choice = {"index": 0, "text": "a", "finish_reason": None, "token_ids": [-1]}
    event = {"id": "1", "object": "o", "created": 1, "model": "m", "choices": [choice]}
    data = b"data: %b\n\n" % json.dumps(event).encode()

    async def answer(replica: FakeReplica, asked: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(data) + chunk(data + b"data: [DONE]\n\n") + END)

    async with routing(1, router_continue_streams=True) as it:
        it.fleet[0].answer = answer
        assert text(events(await it.post(BODIES[COMPLETION], COMPLETION))) == "aa"


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_no_key_is_sent_twice(path):
    """Some readers take the first of two equal keys, and others refuse both."""
    async with routing(1, router_continue_streams=True) as it:
        it.fleet[0].answer = engine = Engine()
        body = {**BODIES[path], "return_token_ids": None}
        assert (await it.post(body, path)).status_code == 200
        assert engine.asked[0][1]["return_token_ids"] is True
        assert it.fleet[0].asked[0].body.count(b'"return_token_ids"') == 1
        odd = json.dumps(body).replace("token_ids", "\\u0074oken_ids").encode()
        assert (await it.post(odd, path)).status_code == 200
        keys = json.loads(it.fleet[0].asked[1].body, object_pairs_hook=lambda pairs: pairs)
        assert len({key for key, _ in keys}) == len(keys)


@pytest.mark.parametrize("piece", [1, 1000, 65536])
def test_an_event_without_an_end_is_neither_kept_nor_looked_at_again(monkeypatch, piece):
    monkeypatch.setattr(continuation, "LARGEST_EVENT", 1 << 17)
    stream = continuation.continuation(CHAT, json.dumps(BODIES[CHAT]).encode())
    assert stream
    stream.begin(200, {b"transfer-encoding": b"chunked", b"content-type": b"text/event-stream"})
    out, longest, began = 0, 0, time.process_time()
    for _ in range((1 << 18) // piece):
        out += len(stream.passed(b"x" * piece))
        longest = max(longest, len(stream._incoming))
    assert longest <= (1 << 17) + piece
    assert out > 1 << 17
    assert time.process_time() - began < 5
    assert not stream.resume()


async def test_an_event_without_an_end_reaches_the_client_as_it_is():
    sent = b"data: " + b"x" * (3 << 20)

    async def answer(replica, asked, writer):
        writer.write(STREAM)
        for n in range(0, len(sent), 1 << 16):
            writer.write(chunk(sent[n : n + (1 << 16)]))
            await writer.drain()
        writer.write(END)

    async with routing(1, router_continue_streams=True) as it:
        it.fleet[0].answer = answer
        found = await it.post(BODIES[CHAT], CHAT)
        assert found.content == sent


async def test_a_rest_whose_event_has_no_end_is_no_rest(monkeypatch):
    monkeypatch.setattr(continuation, "LARGEST_EVENT", 1 << 10)
    first = Engine()
    first.fails_after = [4]

    async def endless(replica, asked, writer):
        writer.write(STREAM + chunk(b"data: " + b"x" * 5000))
        await asyncio.sleep(1)

    async with routing(2, router_continue_streams=True, routing_strategy="roundrobin") as it:
        answered = []

        async def answer(replica, asked, writer):
            answered.append(replica)
            await (first if len(answered) == 1 else endless)(replica, asked, writer)

        for replica in it.fleet:
            replica.answer = answer
        with pytest.raises(httpx.RemoteProtocolError):
            await it.post(BODIES[CHAT], CHAT)
