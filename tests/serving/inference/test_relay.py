# SPDX-License-Identifier: Apache-2.0
"""Streams: their steps, and the cause of an early end."""

import asyncio
import json

import pytest

from handlers.records import Step
from serving.inference.relay import WINDOW
from serving.observability.access_log import AccessRecord
from serving.user_code import AT_ONCE, Limits, start_user_code
from tests.fake_engine import streaming
from tests.serving.conftest import running
from tests.serving.inference.test_requests import OUTPUT, coded
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

FIRST = b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n'
STEP = Step("a", (1,), ("a",), (-0.5,))
BROKEN = Step(None, (1,), finish_reason="stop")  # type: ignore[arg-type]


def answer_with(served, answer):
    served.engine.answers = dict.fromkeys(served.engine.answers, answer)


async def test_steps_go_to_the_client_as_they_are_rendered():
    last = Step("bc", (2, 3), ("b", "c"), (-1.0, None), "length")
    async with running() as served:
        answer_with(served, streaming(STEP, last))
        answer = await served.invoke({"inputs": "x", "stream": True})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    tokens = [(it["token"]["id"], it["token"]["text"], it["token"]["logprob"]) for it in lines]
    assert tokens == [(1, "a", -0.5), (2, "b", -1.0), (3, "c", None)]
    assert [it["generated_text"] for it in lines] == [None, None, "abc"]


@pytest.mark.parametrize("accept", ["text/event-stream", "application/jsonlines"])
async def test_what_is_written_at_once_is_framed_and_in_order(accept):
    took = []

    async def answer(call, sink, usage):
        sink.stream()
        took.append(sink.takes())  # it may yet become an error
        await sink.event(FIRST)
        took.append(sink.takes())
        sink.write(FIRST.replace(b'"a"', b'"b"'))
        sink.write(b"")  # is not the end
        await sink.event(FIRST.replace(b'"a"', b'"c"'))
        await sink.end()
        took.append(sink.takes())

    async with running() as served:
        answer_with(served, answer)
        found = await served.invoke({"prompt": "x", "stream": True}, headers={"accept": accept})
    lines = [line.removeprefix("data: ") for line in found.text.splitlines() if line]
    assert [json.loads(line)["choices"][0]["text"] for line in lines] == ["a", "b", "c"]
    assert found.text.startswith("data: ") == (accept == "text/event-stream")
    assert took == [False, True, False]


async def test_what_wraps_an_answer_sees_all_of_its_parts_or_none(monkeypatch):
    """CORSMiddleware wraps `send`. The record and the session change the head only."""
    took, messages = [], []

    async def answer(call, sink, usage):
        sink.stream()
        for _ in range(3):
            took.append(sink.takes())
            await sink.event(FIRST)
        await sink.end()

    async def head(record, message):
        messages.append(message["type"])
        return await original(record, message)

    original = AccessRecord.head
    monkeypatch.setattr(AccessRecord, "head", head)
    for allowed, expected in (((), [False, True, True]), (("https://a.example",), [False] * 3)):
        async with running(cors_allowed_origin=allowed) as served:
            answer_with(served, answer)
            headers = {"origin": "https://a.example"} if allowed else {}
            found = await served.invoke({"prompt": "x", "stream": True}, headers=headers)
        assert (found.text.count('"a"'), took) == (3, expected)
        took.clear()
    assert set(messages) == {"http.response.start"}


@pytest.mark.parametrize("begun", [(), (STEP,)])
@pytest.mark.parametrize(
    ("last", "message", "log"),
    [
        (
            BROKEN,
            "the server failed on this request; its log says why",
            "a request failed unexpectedly",
        ),
        (
            RuntimeError("boom"),
            "the engine ended the answer early; the server's log says why",
            "the engine raised while it answered a request",
        ),
    ],
)
async def test_who_is_blamed_for_a_stream_that_breaks_off(caplog, begun, last, message, log):
    """Either our own reply, which cannot render a step, or the engine."""
    async with running() as served:
        answer_with(served, streaming(*begun, last))
        answer = await served.invoke({"inputs": "a", "stream": True})
        assert answer.status_code == (200 if begun else 500)
        assert message in answer.text.splitlines()[-1]
    logged = {"a request failed unexpectedly", "the engine raised while it answered a request"}
    assert logged & {record.message for record in caplog.records} == {log}


class Counted:
    """Streams this number of events, and counts those that were taken, and those of them that it
    wrote without waiting. A few come at once, as in vLLM's steps.
    """

    def __init__(self, events):
        self.events = events
        self.taken, self.written, self.ended = 0, 0, False

    async def __call__(self, call, sink, usage):
        sink.stream()
        try:
            for number in range(self.events):
                event = b'data: {"n": %d}\n\n' % number
                if number % 3 and sink.takes():
                    sink.write(event)
                    self.written += 1
                else:
                    await sink.event(event)
                self.taken += 1
            await sink.end()
        finally:
            self.ended = True


async def test_an_output_formatter_gets_events_in_order_and_holds_a_bounded_number(tmp_path):
    events = 3 * (WINDOW + AT_ONCE)
    async with running() as served, coded(served, tmp_path, OUTPUT) as held:
        engine = Counted(events)
        answer_with(served, engine)
        answering = asyncio.create_task(served.invoke({"prompt": "a", "stream": True}))
        await held.entered()
        await until_async(lambda: engine.taken >= WINDOW)
        await asyncio.sleep(0.2)  # it could go on, if it did not wait
        assert engine.taken <= WINDOW + AT_ONCE + 2
        assert 0 < engine.written < engine.taken
        assert held.calls == 1
        held.go()
        answer = await answering
    assert answer.headers["x-slipway-formatted"] == "true"
    lines = answer.text.split()
    assert lines == [it for number in range(events) for it in ("data:", '{"n":', f"{number}}}")]


COUNTING = """
from djl_python.output_formatter import output_formatter

state = {"n": 0}

@output_formatter
%sdef render(output):
    state["n"] += 1
    return state
"""


@pytest.mark.parametrize("kind", ["", "async "])
async def test_each_event_has_what_the_formatter_returned_for_it(tmp_path, kind):
    """Also if it returns the same object again, with other contents."""
    async with running() as served, coded(served, tmp_path, COUNTING % kind):
        answer_with(served, Counted(40))
        answer = await served.invoke({"prompt": "a", "stream": True})
    found = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line]
    assert [it["n"] for it in found] == [*range(1, 41)]


UNTELLABLE = """
from djl_python.output_formatter import output_formatter

class Untellable(Exception):
    def __str__(self):
        raise self

@output_formatter
def render(output):
    if "20" in output:
        raise Untellable
    return output
"""


async def test_an_exception_that_cannot_be_told_ends_its_stream_at_its_event(tmp_path):
    async with running() as served, coded(served, tmp_path, UNTELLABLE):
        answer_with(served, Counted(40))
        answer = await served.invoke({"prompt": "a", "stream": True}, timeout=20)
    *events, error = (line for line in answer.text.splitlines() if line)
    assert [json.loads(it.removeprefix("data: "))["n"] for it in events] == [*range(20)]
    assert "Untellable: its __str__ raises Untellable (model.py, line 11)" in error


TOGETHER = """
import threading
from djl_python.output_formatter import output_formatter

together = threading.Barrier(4, timeout=20)

@output_formatter
def render(output):
    together.wait()
    return output
"""


async def test_streams_do_not_wait_for_each_others_formatter(tmp_path):
    async with running() as served, coded(served, tmp_path, TOGETHER):
        answer_with(served, Counted(1))
        answers = [served.invoke({"prompt": "a", "stream": True}) for _ in range(4)]
        found = await asyncio.gather(*answers)
    assert {it.text.strip() for it in found} == {'data: {"n": 0}'}


async def test_an_output_formatter_that_stalls_with_a_full_window_ends_the_request(tmp_path):
    (tmp_path / "model.py").write_text(OUTPUT)
    limits = Limits(formatter_s=1, handler_s=1, memory=0)
    async with running() as served:
        code = await start_user_code(tmp_path, tmp_path, limits)
        assert code
        served.pipeline.code = code
        try:
            engine = Counted(1000)
            answer_with(served, engine)
            answer = await served.invoke({"prompt": "a", "stream": True})
            assert answer.status_code == 424
            assert "it took longer than" in answer.text
            await until_async(lambda: engine.ended)
        finally:
            served.pipeline.code = None
            await code.stop()
