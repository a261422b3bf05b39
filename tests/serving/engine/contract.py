# SPDX-License-Identifier: Apache-2.0
"""The contract of every engine behind the port (serving.engine.base).

The CHECKS run for the tests' engine (test_contract.py), for vLLM, and for vLLM's engine core
without a model (tests/e2e/test_contract.py).
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from serving.cancellation import Cancellation, ClientLeft
from serving.engine.base import Call, Usage
from serving.errors import BadRequest, EngineFailed, NotFound, NotReady, ServingError, TimedOut
from serving.protocol import CHAT_COMPLETIONS, COMPLETIONS
from tests.support.harness.wait import until_async

LONG = 24
"""Tokens of an answer that an event interrupts in its middle."""
LIMIT_S = 60


class Subject:
    """An engine, and the requests that make it do what the checks need."""

    engine: Any
    adapter: str | None = None
    """The inner name of an adapter that it has."""

    def body(self, tokens: int) -> dict[str, Any]:
        """A completion of this number of tokens."""
        return {"prompt": " ".join(["a"] * tokens), "max_tokens": tokens, "ignore_eos": True}

    def faulty(self) -> dict[str, Any]:
        """A completion that fails within its stream."""
        raise NotImplementedError

    def is_idle(self) -> bool:
        """Whether it has no work."""
        raise NotImplementedError

    async def kill(self) -> None:
        """Make it die."""
        raise NotImplementedError


class Sink:
    """Takes an answer, and notes each call. keeps_up: whether events can be written at once. at: is
    called after each note with the number of notes.
    """

    def __init__(
        self,
        *,
        keeps_up: Callable[[], bool] = lambda: False,
        at: Callable[[int], Awaitable[None] | None] = lambda _: None,
    ) -> None:
        self.notes: list[str] = []
        self.events: list[bytes] = []
        self.body = b""
        self.error: ServingError | None = None
        self.usage = Usage()
        self._keeps_up = keeps_up
        self._at = at
        self.inside = 0
        """The number of calls that wait."""

    def note(self, name: str) -> Any:
        self.notes.append(name)
        return self._at(len(self.notes))

    async def wait(self, name: str) -> None:
        assert not self.inside, "two calls at once"
        self.inside += 1
        try:
            if waits := self.note(name):
                await waits
        finally:
            self.inside -= 1

    def begin(self, usage: Usage) -> None:
        self.usage = usage
        self.note("begin")

    async def answer(self, body: bytes, content_type: bytes = b"", headers: Any = ()) -> None:
        self.body = body
        await self.wait("answer")

    def stream(self) -> None:
        self.note("stream")

    async def event(self, event: bytes) -> None:
        self.events.append(event)
        await self.wait("event")

    async def step(self, step: Any) -> None:
        raise AssertionError("this sink takes no steps")

    def takes(self) -> bool:
        return not self.inside and bool(self.events) and self._keeps_up()

    def write(self, event: bytes) -> None:
        self.events.append(event)
        self.note("write")

    def write_step(self, step: Any) -> None:
        raise AssertionError("this sink takes no steps")

    async def fail(self, error: ServingError) -> None:
        self.error = error
        await self.wait("fail")

    async def end(self) -> None:
        await self.wait("end")

    @property
    def text(self) -> str:
        """The text of a stream."""
        data = [event.removeprefix(b"data: ") for event in self.events if event]
        chunks = [json.loads(it) for it in data if it.strip() != b"[DONE]"]
        return "".join(it["text"] for chunk in chunks for it in chunk["choices"])


async def asked(
    subject: Subject,
    body: dict[str, Any],
    sink: Sink,
    cancellation: Cancellation | None = None,
    path: str = COMPLETIONS,
    **more: Any,
) -> Usage:
    """Make a call, which must be answered within LIMIT_S."""
    call = Call(path, body, 10, cancellation or Cancellation(), "mine", **more)
    await asyncio.wait_for(subject.engine.generate(call, sink), LIMIT_S)
    return sink.usage


async def a_whole_answer_comes_once(subject: Subject) -> None:
    sink = Sink()
    usage = await asked(subject, subject.body(4), sink)
    assert sink.notes == ["begin", "answer"]
    assert json.loads(sink.body)["choices"][0]["finish_reason"] == "length"
    assert usage.tokens.generated == 4
    assert usage.tokens.prompt > 0


async def a_stream_comes_in_order(subject: Subject) -> None:
    sink = Sink()
    usage = await asked(subject, subject.body(6) | {"stream": True}, sink)
    first, second, *events, last = sink.notes
    assert (first, second, last) == ("begin", "stream", "end")
    assert {*events} == {"event"}
    assert sink.events[-1] == b"data: [DONE]\n\n"
    assert usage.tokens.generated == 6


async def what_is_written_at_once_is_in_order(subject: Subject) -> None:
    """Events stay in order, whichever of the two ways each of them takes."""
    texts = []
    for keeps_up in (lambda: False, lambda: True):
        sink = Sink(keeps_up=keeps_up)
        body = subject.body(LONG) | {"stream": True, "temperature": 0}
        await asked(subject, body, sink)
        assert sink.notes[-1] == "end"
        texts.append(sink.text)
    assert "write" in sink.notes
    assert texts[0] == texts[1]


async def the_engine_waits_for_its_sink(subject: Subject) -> None:
    go_on = asyncio.Event()

    async def held(count: int) -> None:
        if count == 4:
            await go_on.wait()

    def at(count: int) -> Awaitable[None] | None:
        return held(count) if count == 4 else None

    sink = Sink(keeps_up=lambda: True, at=at)
    body = subject.body(LONG) | {"stream": True, "temperature": 0}
    # The first event that is awaited is the third note.
    sink._keeps_up = lambda: len(sink.notes) > 4
    answering = asyncio.create_task(asked(subject, body, sink))
    await until_async(lambda: len(sink.notes) == 4)
    await asyncio.sleep(0.3)  # it could go on, if it did not wait
    assert len(sink.notes) == 4
    go_on.set()
    usage = await answering
    assert usage.tokens.generated == LONG
    whole = Sink()
    await asked(subject, body, whole)
    assert sink.text == whole.text


async def a_call_ends_wherever_it_is_cancelled(subject: Subject) -> None:
    """Before it begins, while it waits, and at each call of the sink."""
    for cause in (ClientLeft(), TimedOut(3), NotReady("stopping")):
        for place in range(7):
            cancellation = Cancellation()
            if place == 0:
                cancellation.cancel(cause)
            ends: list[int] = []

            def at(
                count: int,
                place: int = place,
                cancellation: Cancellation = cancellation,
                cause: Any = cause,
                ends: list[int] = ends,
            ) -> None:
                ends.append(count)
                if count == place:
                    cancellation.cancel(cause)

            sink = Sink(keeps_up=lambda: True, at=at)
            body = subject.body(LONG) | {"stream": True}
            usage = await asked(subject, body, sink, cancellation)
            assert not {"answer", "end", "fail"} & {*sink.notes}
            assert len(sink.notes) <= place + 10  # events that were still in flight
            assert usage.tokens.generated < LONG
            await until_async(subject.is_idle)
            await asyncio.sleep(0)  # no interruption remains


async def a_call_ends_while_the_engine_works(subject: Subject) -> None:
    for stream in (True, False):
        cancellation, sink = Cancellation(), Sink()
        body = subject.body(100) | {"stream": stream}
        answering = asyncio.create_task(asked(subject, body, sink, cancellation))
        await until_async(lambda: not subject.is_idle())
        cancellation.cancel(ClientLeft())
        await answering
        assert not {"answer", "end", "fail"} & {*sink.notes}
        await until_async(subject.is_idle)


async def an_error_comes_alone(subject: Subject) -> None:
    cases: Sequence[tuple[str, dict[str, Any], type[ServingError]]] = (
        (COMPLETIONS, {"prompt": "a", "max_tokens": "many"}, BadRequest),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "many", "stream": True}, BadRequest),
        (COMPLETIONS, {"prompt": "a", "model": "no such"}, NotFound),
        (CHAT_COMPLETIONS, {"messages": 5}, BadRequest),
        ("/v1/nothing", {}, NotFound),
    )
    for path, body, kind in cases:
        sink = Sink()
        usage = await asked(subject, body, sink, path=path)
        assert sink.notes == ["begin", "fail"], (body, sink.notes)
        assert type(sink.error) is kind, sink.error
        assert usage.tokens.generated == 0


async def an_error_ends_a_stream(subject: Subject) -> None:
    sink = Sink()
    await asked(subject, subject.faulty() | {"stream": True}, sink)
    assert sink.notes[:2] == ["begin", "stream"]
    assert sink.notes[-1] == "fail"
    assert {*sink.notes[2:-1]} <= {"event", "write"}
    assert isinstance(sink.error, ServingError)
    await until_async(subject.is_idle)


async def what_breaks_off_is_counted(subject: Subject) -> None:
    cancellation = Cancellation()

    def at(count: int) -> None:
        if count == 5:
            cancellation.cancel(ClientLeft())

    sink = Sink(at=at)
    usage = await asked(subject, subject.body(LONG) | {"stream": True}, sink, cancellation)
    await until_async(subject.is_idle)
    tokens = usage.tokens
    assert tokens.prompt > 0
    assert 0 < tokens.generated < LONG
    await asyncio.sleep(0.05)
    assert usage.tokens == tokens


async def calls_of_one_name_are_counted_apart(subject: Subject) -> None:
    sinks = [Sink(), Sink()]
    bodies = [subject.body(3), subject.body(9) | {"stream": True}]
    found = await asyncio.gather(*(asked(subject, *it) for it in zip(bodies, sinks, strict=True)))
    assert [usage.tokens.generated for usage in found] == [3, 9]


async def an_adapter_answers_while_it_is_there(subject: Subject) -> None:
    if not (name := subject.adapter):
        pytest.skip("this engine has no adapters")
    sink = Sink()
    body = subject.body(LONG) | {"stream": True}
    usage = await asked(subject, body, sink, adapter=name)
    assert usage.tokens.generated == LONG
    assert b'"model":"%b"' % name.encode() in sink.events[0]
    sink = Sink()
    await asked(subject, body, sink, adapter="none@1")
    assert isinstance(sink.error, NotFound)
    assert "none@1" not in str(sink.error)  # its inner name


async def a_dead_engine_says_so(subject: Subject) -> None:
    assert subject.engine.failure is None
    sink = Sink()
    answering = asyncio.create_task(asked(subject, subject.body(100) | {"stream": True}, sink))
    await until_async(lambda: len(sink.notes) > 2)
    await subject.kill()
    await until_async(lambda: subject.engine.failure is not None, seconds=LIMIT_S)
    answering.cancel() if not isinstance(sink.error, EngineFailed) else None
    await asyncio.wait([answering], timeout=LIMIT_S)
    assert answering.done()
    assert "answer" not in sink.notes


CHECKS: Sequence[Callable[[Subject], Awaitable[None]]] = (
    a_whole_answer_comes_once,
    a_stream_comes_in_order,
    what_is_written_at_once_is_in_order,
    the_engine_waits_for_its_sink,
    a_call_ends_wherever_it_is_cancelled,
    a_call_ends_while_the_engine_works,
    an_error_comes_alone,
    an_error_ends_a_stream,
    what_breaks_off_is_counted,
    calls_of_one_name_are_counted_apart,
    an_adapter_answers_while_it_is_there,
    a_dead_engine_says_so,
)
"""The last one ends the engine."""
