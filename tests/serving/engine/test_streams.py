# SPDX-License-Identifier: Apache-2.0
"""Tokens are written to the client where vLLM produces them. tests/e2e/test_calls.py checks with an
engine that their events equal vLLM's own.
"""

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from handlers.records import Step
from serving.cancellation import Cancellation
from serving.engine.patches.outputs import arrays
from serving.engine.patches.outputs.processor import State, Texts
from serving.engine.texts.completions import Completions
from serving.engine.texts.generation import Asked
from serving.engine.texts.streams import Part, Steps, Stream
from serving.errors import ServerFailed
from serving.protocol import COMPLETIONS
from tests.serving.conftest import running
from tests.serving.inference.test_walk import SERVING, entered

pytestmark = pytest.mark.anyio


def test_every_character_is_written_as_vllm_writes_it():
    path: Any = SimpleNamespace(by_id=lambda _: False, include_usage=lambda _: (False, False))
    answer: Any = Completions.answer(path, CompletionRequest(prompt="a", stream=True))
    answer.begin(Asked('"text":', '{"text":"a"}', [{}], None))

    def rendered(text: str) -> bytes:
        none = {"finish_reason": None, "stop_reason": None, "prompt_token_ids": None}
        choice = CompletionResponseStreamChoice(
            index=0, text=text, logprobs=None, token_ids=None, **none
        )
        chunk = CompletionStreamResponse(**answer._head, choices=[choice])
        return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()

    every = [chr(it) for it in range(sys.maxunicode + 1) if not 0xD800 <= it < 0xE000]
    pieces = ["".join(every[start : start + 5000]) for start in range(0, len(every), 5000)]
    for text in ("", "a", *pieces, '{"text":"a"}', "data: \n\n"):
        assert answer.part(Part(text, [1], None), None, 0) == rendered(text)
        assert answer.token(text, [1], None, 0) == rendered(text)


class Told:
    """A detokenizer whose texts the test sets."""

    text = ""

    def get_next_output_text(self, finished, delta):
        text, self.text = self.text, ""
        return text

    def num_output_tokens(self):
        return 0


class Client:
    """A stream to a client, which accepts events while it keeps up: its sink, and its answer."""

    task: asyncio.Task[None]

    def __init__(self, stream: Callable[[Any], Stream] | None = None) -> None:
        """stream: renders vLLM's results."""
        self.keeps_up, self.fails, self.breaks = True, False, False
        self.read = asyncio.Event()
        self.got: list[str] = []
        self.in_task: list[str] = []
        sink: Any = self
        self.call: Any = SimpleNamespace(steps=False, cancellation=Cancellation())
        self.stream = (
            stream(self.results()) if stream else Stream(self.call, sink, self, 0, self.results())
        )
        none = SimpleNamespace(
            logprobs=None,
            cumulative_logprob=None,
            pop_prompt_logprobs=lambda: None,
            pop_prompt_token_id_logprobs=lambda: None,
        )
        kind, self.texts = RequestOutputKind.DELTA, Told()
        self.queue = RequestOutputCollector(kind, "a")
        self.state: Any = State(
            *("a", "a", None, 0, None, kind, None, [1], None, none, self.texts),
            *(None, 0.0, self.queue, False, 1),
        )
        asked: Any = SimpleNamespace(sampling_params=SamplingParams(logprobs=0))
        self.stream.begin(self.state, asked)

    async def results(self):
        """The results, as vLLM takes them from their queue."""
        ended = False
        while not ended:
            result = self.queue.get_nowait() or await self.queue.get()
            ended = result.finished
            yield result

    def takes(self):
        return self.keeps_up

    def token(self, text, token_ids, logprobs, prompt):
        if self.fails:
            raise RuntimeError("boom")
        return text

    def write(self, event):
        if self.breaks:
            raise RuntimeError("boom")
        self.got.append(event)

    async def run(self):
        async for result in self.stream:
            self.in_task.append(result.outputs[0].text)
            if not self.keeps_up:
                await self.read.wait()
            self.got.append(result.outputs[0].text)

    async def feed(self, *texts, end=None):
        """Deliver these outputs as vLLM does. The stream's task runs after the last one."""
        for text in texts:
            self.texts.text += text
            if result := self.state.make_request_output([1], None, end, None):
                self.state.queue.put(result)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
async def client():
    it = Client()
    it.task = asyncio.create_task(it.run())
    await asyncio.sleep(0)
    await it.feed("-")
    yield it
    it.task.cancel()
    await asyncio.wait([it.task])


async def test_a_token_that_comes_while_its_request_waits_is_written_at_once(client):
    await client.feed("a", "b")
    assert client.got == ["-", "a", "b"]
    await client.feed("c", end=FinishReason.STOP)
    assert client.got == ["-", "a", "b", "c"]
    assert client.in_task == ["-", "c"]


async def test_tokens_of_a_client_that_does_not_keep_up_are_joined(client):
    await client.feed("a")
    client.keeps_up = False
    await client.feed("b")
    await client.feed("c", "d")
    assert client.got == ["-", "a"]
    client.keeps_up = True
    await client.feed("e")  # its task has not run yet
    assert client.got == ["-", "a"]
    client.read.set()
    await client.feed()
    await client.feed("f")
    assert "".join(client.got) == "-abcdef"
    assert client.in_task == ["-", "b", "cde"]


async def test_an_event_that_cannot_be_made_breaks_off_its_stream_alone(client):
    client.fails = True
    await client.feed("a")
    with pytest.raises(RuntimeError, match="boom"):
        await client.task


async def test_a_sink_that_fails_cancels_its_call_and_is_not_called_again(client, caplog):
    client.breaks = True
    await client.feed("a")
    assert isinstance(client.call.cancellation.cause, ServerFailed)
    assert [it.message for it in caplog.records] == ["a request failed unexpectedly"]
    assert not client.stream.waits
    assert not client.queue.get_nowait()  # the engine has not failed


async def test_a_stream_begins_in_its_task_with_its_first_token(client):
    """vLLM may report a prompt before its first token."""
    client.task.cancel()
    await asyncio.wait([client.task])
    other = Client()
    other.task = asyncio.create_task(other.run())
    await asyncio.sleep(0)
    for tokens in ([], [1], [2]):
        other.texts.text = f"{tokens}"
        if result := other.state.make_request_output(tokens, None, None, None):
            other.state.queue.put(result)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert other.got == ["[]", "[1]", "[2]"]
    assert other.in_task == ["[]", "[1]"]
    other.task.cancel()
    await asyncio.wait([other.task])


def test_the_text_of_a_token_is_looked_up_once():
    asked = []

    class Tokenizer:
        name = "a"

        def decode(self, token_ids, **more):
            asked.append(token_ids)
            return f"{token_ids}{more}"

    texts = Texts(Tokenizer())
    assert [texts.decode([5]), texts.decode([5]), texts.decode([5, 6]), texts.name] == [
        *("[5]{}", "[5]{}", "[5, 6]{}", "a"),
    ]
    assert texts.decode([5], skip_special_tokens=True) == "[5]{'skip_special_tokens': True}"
    assert asked == [[5], [5, 6], [5]]


def test_arrays_are_decoded_as_by_vllm():
    rng = np.random.default_rng(0)
    logprobs = [
        LogprobsLists(
            rng.integers(0, 99, (tokens, count)),
            rng.random((tokens, count), np.float32),
            np.arange(tokens),
        )
        for tokens, count in ((1, 1), (2, 3), (1, 200), (0, 1))  # 200 take a separate frame
    ]
    outputs = [EngineCoreOutput("a", [1], it) for it in logprobs]
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs, timestamp=1.0))
    assert len(frames) > 1
    theirs = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    ours = arrays.Decoder(EngineCoreOutputs).decode(frames)
    for one, other in zip(theirs.outputs, ours.outputs, strict=True):
        for it, that in zip(one.new_logprobs, other.new_logprobs, strict=True):
            np.testing.assert_array_equal(it, that)
            assert it is None or it.dtype == that.dtype


async def test_the_engine_is_told_of_a_stream_that_is_broken_off(client):
    processor = OutputProcessor(None, log_stats=False)
    processor.request_states["a"] = client.state
    processor.external_req_ids["a"] = ["a"]
    assert processor.abort_requests(["a"], internal=True) == ["a"]
    await client.task
    assert not processor.has_unfinished_requests()


LMI = {"inputs": "a", "stream": True}


@pytest.mark.parametrize(("path", "rendered"), [("/invocations", ["lmi"]), (COMPLETIONS, [])])
async def test_a_token_takes_four_stays_without_a_return(path, rendered):
    """From vLLM's output to the client's connection."""
    walks: list[list[str]] = []

    async def answer(call, sink, usage):
        none: Any = None
        events: Any = SimpleNamespace()
        events.part = events.token = lambda *_: b"data: b\n\n"
        made = Steps(none) if call.steps else events
        it = Client(lambda results: Stream(call, sink, made, 0, results))
        sink.stream()
        if call.steps:
            await sink.step(Step("a", [1], ["a"], [-1.0]))
        else:
            await sink.event(b"data: a\n\n")
        for text in ("a", "b"):
            waiting = asyncio.create_task(anext(it.stream))
            await asyncio.sleep(0)
            it.texts.text = text
            with entered(SERVING.parent / "handlers") as rooms:
                result = it.state.make_request_output([1], None, None, None)
            if not result:
                walks.append(rooms)
                waiting.cancel()
                break
            it.queue.put(result)
            first = await waiting
            made.part(first.outputs[0], first, 0)
        await sink.end()

    async with running() as served:
        served.engine.answers[COMPLETIONS] = answer
        body = LMI if path == "/invocations" else {"prompt": "a", "stream": True}
        assert "b" in (await served.post(path, body)).text
    (walk,) = walks
    assert walk == [
        "engine/patches/outputs/processor",
        "engine/texts/streams",
        *rendered,
        "http/connections",
    ]
