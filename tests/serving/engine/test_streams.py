# SPDX-License-Identifier: Apache-2.0
"""Events written past vLLM's rendering. That they are vLLM's own is tested in front of an engine
(tests/e2e/test_calls.py).
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from serving.engine.patches.outputs.processor import State
from serving.engine.streams import Deltas, Events, Stream

pytestmark = pytest.mark.anyio


def rendered(text, finish_reason=None):
    choice = CompletionResponseStreamChoice(index=0, text=text, finish_reason=finish_reason)
    chunk = CompletionStreamResponse(
        id='"text":', created=1, model='{"text":"a"}', choices=[choice]
    )
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


class Sink:
    """Takes events; `keeps_up` says whether they can be written at once."""

    def __init__(self):
        self.events = []
        self.keeps_up = False

    def takes(self):
        return self.keeps_up

    def write(self, event):
        self.events.append(event.decode())

    async def event(self, event):
        self.write(event)


async def streamed(outputs, render=rendered):
    """The results that vLLM's rendering gets of these, and the events."""
    got: list[Any] = []
    sink: Any = Sink()

    async def results():
        for text, tokens, reason in outputs:
            output = SimpleNamespace(text=text, token_ids=tokens, finish_reason=reason)
            yield SimpleNamespace(outputs=[output], prompt_token_ids=[1])

    stream = Events(results(), sink)
    async for result in stream:
        (output,) = result.outputs
        got.append((output.text, output.token_ids))
        event = render(output.text, output.finish_reason).encode()
        stream.rendered(event)
        await sink.event(event)
    return got, sink.events


async def test_vllm_renders_the_first_token_and_the_last_which_brings_the_others():
    outputs = [("a", [1], None), ("b", [2], None), ("cd", [3, 4], None), ("", [5], "stop")]
    got, events = await streamed(outputs)
    assert got == [("a", [1]), ("", [2, 3, 4, 5])]
    assert events == [rendered("a"), rendered("b"), rendered("cd"), rendered("", "stop")]


async def test_every_character_is_written_as_vllm_writes_it():
    every = [chr(it) for it in range(sys.maxunicode + 1) if not 0xD800 <= it < 0xE000]
    pieces = ["".join(every[start : start + 5000]) for start in range(0, len(every), 5000)]
    texts = ["", "a", *pieces, '{"text":"a"}', "data: \n\n"]
    _, events = await streamed([*((text, [1], None) for text in texts), ("", [2], "length")])
    assert events[:-1] == [rendered(text) for text in texts]


@pytest.mark.parametrize(
    "render",
    [
        lambda text, _: f"data: {json.dumps({'words': text})}\n\n",
        lambda text, _: f"data: {json.dumps({'text': [text]})}\n\n",
    ],
    ids=["another key", "another value"],
)
async def test_what_is_not_known_is_left_to_vllm(render):
    outputs = [("a", [1], None), ("b", [2], None), ("c", [3], "stop")]
    got, events = await streamed(outputs, render=render)
    assert got == [("a", [1]), ("b", [2]), ("c", [3])]
    assert events == [render(text, None) for text, *_ in outputs]


class Texts:
    """A detokenizer that is told of texts."""

    text = ""

    def get_next_output_text(self, finished, delta):
        text, self.text = self.text, ""
        return text

    def num_output_tokens(self):
        return 0


class Client(Stream):
    """A stream that goes to a client, which takes it while it keeps up."""

    task: asyncio.Task[None]

    def __init__(self, needs_result: bool) -> None:
        self.needs_result = needs_result
        self.keeps_up, self.fails = True, False
        self.read = asyncio.Event()
        self.got: list[str] = []
        self.in_task: list[str] = []
        sink: Any = self
        super().__init__(self.results(), sink)
        none = SimpleNamespace(
            logprobs=None,
            cumulative_logprob=None,
            pop_prompt_logprobs=lambda: None,
            pop_prompt_token_id_logprobs=lambda: None,
        )
        kind, self.texts = RequestOutputKind.DELTA, Texts()
        queue = RequestOutputCollector(kind, "a")
        self.state: Any = State(
            *("a", "a", None, 0, None, kind, None, [1], None, none, self.texts),
            *(None, 0.0, queue, False, 1),
        )
        self.begin(self.state, None)

    async def results(self):
        """As vLLM takes them of their queue."""
        ended = False
        while not ended:
            result = self.queue.get_nowait() or await self.queue.get()
            ended = result.finished
            yield result

    def needs_no_output(self):
        return not self.needs_result and super().needs_no_output()

    def takes(self):
        return self.keeps_up

    def put(self, output, prompt):
        if self.fails:
            raise RuntimeError("boom")
        self.got.append(output.text)
        return True

    async def run(self):
        while True:
            result = await self._next()
            self.in_task.append(result.outputs[0].text)
            if not self.keeps_up:
                await self.read.wait()
            self.got.append(result.outputs[0].text)
            if result.finished:
                return

    async def feed(self, *texts, end=None):
        """vLLM has read these. The stream's task runs after the last one."""
        for text in texts:
            self.texts.text += text
            if result := self.state.make_request_output([1], None, end, None):
                self.state.queue.put(result)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture(params=[False, True], ids=["of parts", "of results"])
async def client(request):
    it = Client(request.param)
    it.task = asyncio.create_task(it.run())
    await asyncio.sleep(0)
    yield it
    it.task.cancel()
    await asyncio.wait([it.task])


async def test_a_token_that_comes_while_its_request_waits_is_written_at_once(client):
    await client.feed("a", "b")
    assert client.got == ["a", "b"]
    await client.feed("c", end=FinishReason.STOP)
    assert client.got == ["a", "b", "c"]
    assert client.in_task == ["c"]


async def test_tokens_of_a_client_that_does_not_keep_up_are_joined(client):
    await client.feed("a")
    client.keeps_up = False
    await client.feed("b")
    await client.feed("c", "d")
    assert client.got == ["a"]
    client.keeps_up = True
    await client.feed("e")  # its task has not gone on yet
    assert client.got == ["a"]
    client.read.set()
    await client.feed()
    await client.feed("f")
    assert "".join(client.got) == "abcdef"
    assert client.in_task == ["b", "cde"]


async def test_an_event_that_cannot_be_made_breaks_off_its_stream_alone(client):
    client.fails = True
    await client.feed("a")
    with pytest.raises(RuntimeError, match="boom"):
        await client.task


async def test_the_engine_is_told_of_a_stream_that_is_broken_off(client):
    processor = OutputProcessor(None, log_stats=False)
    processor.request_states["a"] = client.state
    processor.external_req_ids["a"] = ["a"]
    assert processor.abort_requests(["a"], internal=True) == ["a"]
    await client.task
    assert not processor.has_unfinished_requests()


async def test_a_call_that_vllm_renders_keeps_its_place_and_is_parsed_once():
    seen = []

    def parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, finished):
        seen.append((delta_text, delta_token_ids, finished))
        call = [DeltaToolCall(index=0, function=DeltaFunctionCall(name="f"))]
        return DeltaMessage(tool_calls=call) if delta_text == "f" else DeltaMessage(content="-")

    async def results():
        ended = False
        while not ended:
            result = queue.get_nowait() or await queue.get()
            ended = result.finished
            yield result

    async def run():
        stream.parsed_by(parser)
        async for result in stream:
            (output,) = result.outputs
            ended = output.finish_reason is not None
            delta = parser.parse_delta(
                **{"delta_text": output.text, "delta_token_ids": output.token_ids},
                **{"request": None, "prompt_token_ids": [1], "finished": ended},
            )
            event = b'data: {"delta":%b}' % delta.model_dump_json(exclude_unset=True).encode()
            stream.rendered(event)
            await sink.event(event)

    async def put(*texts, end=None):
        for text in texts:
            output = CompletionOutput(0, text, [len(seen)], None, None, finish_reason=end)
            result = RequestOutput("a", None, [1], None, [output], end is not None)
            if not stream.take(result):
                queue.put(result)
        await asyncio.sleep(0)

    parser = SimpleNamespace(parse_delta=parse_delta)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "a")
    sink: Any = Sink()
    sink.keeps_up = True
    stream = Deltas(results(), sink, None, parses=True, has_blanks=False)
    stream.begin(SimpleNamespace(queue=queue), None)
    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    await put("a")
    await put("b", "f", "c", "d")
    await put("e", end="stop")
    await running
    assert [(text, ended) for text, _, ended in seen] == [
        *(("a", False), ("b", False), ("f", False), ("cd", False), ("e", True)),
    ]
    events, text, call = sink.events, 'data: {"delta":{"content":"-"}}', '"name":"f"'
    assert events[:2] == [text, text]
    assert call in events[2]
    assert events[3:] == [text, text]
