# SPDX-License-Identifier: Apache-2.0
"""In the server's process: a stream's tokens. Most of them are written without a turn of the event
loop.

A streamed token takes 0.4 to 0.6 of plain vLLM's CPU time (docs/explanation/benchmarks.md).
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

import msgspec
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from handlers.records import Step
from serving import errors
from serving.engine.patches.outputs.processor import ChosenLogprobs, is_quick

LOWEST = -9999.0
"""The lowest log probability in an answer, as in vLLM's: JSON has no infinity."""
Results = AsyncGenerator[Any, None]
"""vLLM's results of one request."""


class Stream:
    """vLLM's results of a prompt with one answer.

    As long as the client keeps up, vLLM delivers results directly to the sink while the call's task
    waits. The task gets the others, and always the first one and the last.

    call: base.Call. sink: of the call (base.Sink). answer: turns results into events or steps.
    prompt: the prompt's number. takes: whether the client keeps up. waits: whether the call's task
    waits for a result after it has had one with a token; vLLM may then write results itself.
    """

    def __init__(self, call: Any, sink: Any, answer: Any, prompt: int, results: Results) -> None:
        self.takes: Callable[[], bool] = sink.takes
        self.waits = False
        self._answer = answer
        self._token = answer.token
        self._write = sink.write_step if call.steps else sink.write
        self._cancellation = call.cancellation
        self._prompt = prompt
        self._results = results
        self._has_begun = False
        self._state: Any = None

    def begin(self, state: Any, request: Any) -> None:
        """Get the results of a request that the engine is being given. state: vLLM's of it."""
        if state.stream_interval > 1:
            return
        self._state = state
        state.stream = self
        if isinstance(self._answer, Steps) and is_quick():
            state.logprobs_processor = ChosenLogprobs.of(request)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        self.waits = self._has_begun
        try:
            result = await anext(self._results)
        finally:
            self.waits = False
        self._has_begun = self._has_begun or bool(result.outputs[0].token_ids)
        return result

    async def aclose(self) -> None:
        """Break the reference cycle with vLLM's state, and end the engine's work on the request."""
        if self._state:
            self._state.stream = None  # they would keep each other
            self._state = None
        await self._results.aclose()

    def write(self, text: str, token_ids: Sequence[int], logprobs: Any) -> None:
        """Write new text. logprobs: of these tokens."""
        part = self._token(text, token_ids, logprobs, self._prompt)
        if not part:
            return
        try:
            self._write(part)
        except Exception:  # a failure of the sink's is not the engine's
            self.waits = False
            self._cancellation.cancel(errors.unforeseen())


class Part(msgspec.Struct, gc=False):
    """The tokens of a sequence since its last result, in the form of vLLM's outputs."""

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
        step = self.token(output.text, output.token_ids, output.logprobs, prompt)
        if not self._has_begun:
            self._has_begun, step.prompt_tokens = True, len(result.prompt_token_ids)
        step.finish_reason, step.stop_reason = output.finish_reason, output.stop_reason
        return step

    def token(self, text: str, token_ids: Sequence[int], logprobs: Any, prompt: int) -> Step:
        own = [text]
        if len(token_ids) != 1:
            own = convert_ids_list_to_tokens(self._tokenizer, [*token_ids])
        return Step(text, token_ids, own, _chosen(token_ids, logprobs))

    def end(self) -> Iterable[Any]:
        return ()


def _chosen(token_ids: Sequence[int], logprobs: Any) -> list[float]:
    """The log probabilities of these tokens."""
    found = [
        it if isinstance(it, float) else it[token].logprob
        for token, it in zip(token_ids, logprobs or (), strict=False)
    ]
    return [max(it, LOWEST) for it in found]
