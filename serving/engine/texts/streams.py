# SPDX-License-Identifier: Apache-2.0
"""In the server's process: a stream's tokens, most of which take no turn of the event loop.

A streamed token takes 0.5 to 0.6 of plain vLLM's CPU time (docs/explanation/benchmarks.md).
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

import msgspec
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from handlers.records import Step
from serving.engine.patches.outputs.processor import ChosenLogprobs, is_quick

LOWEST = -9999.0
"""The lowest log probability in an answer, as in vLLM's: JSON has no infinity."""
Results = AsyncGenerator[Any, None]
"""vLLM's results of one request."""


class Stream:
    """vLLM's results of a prompt with one answer. They go to the sink here, where vLLM puts them
    while the call's task waits for one, as long as the client keeps up. The task gets the others,
    and always the first one and the last.

    sink: of the call (base.Sink). answer: makes what it gets. write: gives that to the sink without
    waiting. prompt: its number.
    """

    def __init__(
        self,
        sink: Any,
        answer: Any,
        write: Callable[[Any], None],
        prompt: int,
        results: Results,
    ) -> None:
        self._sink = sink
        self._answer = answer
        self._write = write
        self._prompt = prompt
        self._results = results
        self._waits = self._has_begun = False
        self._state: Any = None

    def begin(self, state: Any, request: Any) -> None:
        """Get the results of a request that the engine is being given. state: vLLM's of it."""
        self._state = state
        state.stream = self
        if isinstance(self._answer, Steps) and is_quick():
            state.logprobs_processor = ChosenLogprobs.of(request)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        self._waits = True
        try:
            return await anext(self._results)
        finally:
            self._waits, self._has_begun = False, True

    async def aclose(self) -> None:
        """Let go of what has hold of it. The engine works on the request no more."""
        if self._state:
            self._state.stream = None  # they would keep each other
            self._state = None
        await self._results.aclose()

    def needs_no_result(self) -> bool:
        """Whether what comes now is written by write(), without a result of vLLM's."""
        return (
            self._has_begun
            and self._waits
            and self._state.queue.output is None
            and self._sink.takes()
        )

    def write(self, text: str, token_ids: Sequence[int], logprobs: Any) -> None:
        """Write what has come. logprobs: of these tokens."""
        if part := self._answer.part(Part(text, token_ids, logprobs), None, self._prompt):
            self._write(part)


class Part(msgspec.Struct, gc=False):
    """What a sequence has got since its last result, as vLLM's outputs have it."""

    text: str
    token_ids: Sequence[int]
    logprobs: Any
    index: int = 0
    finish_reason: None = None
    stop_reason: None = None


class Steps:
    """Makes steps of a stream's outputs."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_begun = False

    def begin(self, asked: Any) -> None:
        pass

    def part(self, output: Any, result: Any, prompt: int) -> Step | None:
        if not (self._has_begun or output.text or output.token_ids):
            return None  # a part of the prompt was computed
        prompt_tokens = None if self._has_begun else len(result.prompt_token_ids)
        self._has_begun = True
        return Step(
            output.text,
            output.token_ids,
            _own_texts(output, self._tokenizer),
            [max(it, LOWEST) for it in _chosen(output)],
            output.finish_reason,
            output.stop_reason,
            prompt_tokens,
        )

    def end(self) -> Iterable[Any]:
        return ()


def _own_texts(output: Any, tokenizer: Any) -> list[str]:
    """The text of each of an output's tokens, where it has several."""
    if len(output.token_ids) == 1:
        return [output.text]
    return convert_ids_list_to_tokens(tokenizer, [*output.token_ids])  # type: ignore[no-any-return]


def _chosen(output: Any) -> list[float]:
    """The log probabilities of an output's tokens."""
    given = zip(output.token_ids, output.logprobs or (), strict=False)
    return [it if isinstance(it, float) else it[token].logprob for token, it in given]
