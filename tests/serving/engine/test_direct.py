# SPDX-License-Identifier: Apache-2.0
"""Events written past vLLM's rendering. That they are vLLM's own is tested in front of an engine
(tests/e2e/test_direct.py).
"""

import json
import sys
from types import SimpleNamespace

import pytest
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)

from serving.engine.direct import Stream

pytestmark = pytest.mark.anyio


def rendered(text, finish_reason=None):
    choice = CompletionResponseStreamChoice(index=0, text=text, finish_reason=finish_reason)
    chunk = CompletionStreamResponse(
        id='"text":', created=1, model='{"text":"a"}', choices=[choice]
    )
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


async def streamed(outputs, key=b'"text":', render=rendered):
    """The results that vLLM's rendering gets of these, and the events."""
    got, events = [], []

    async def results():
        for text, tokens, reason in outputs:
            output = SimpleNamespace(text=text, token_ids=tokens, finish_reason=reason)
            yield SimpleNamespace(outputs=[output])

    async def vllms(found):
        async for result in found:
            (output,) = result.outputs
            got.append((output.text, output.token_ids))
            yield render(output.text, output.finish_reason)

    async def write(event):
        events.append(event.decode())

    await Stream(vllms, results(), key).run(write)
    return got, events


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
