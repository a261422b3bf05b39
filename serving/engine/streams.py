# SPDX-License-Identifier: Apache-2.0
"""In the server's process: a stream's tokens without pydantic.

All that is decided is decided by vLLM, which renders the first token of a stream and the last. The
tokens between are written here, into the event that vLLM itself made of the first one. A streamed
token takes 0.5 to 0.6 of plain vLLM's CPU time (docs/explanation/benchmarks.md).
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.parser.abstract_parser import DelegatingParser
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from handlers.records import Step
from serving.engine.base import Sink
from serving.engine.patches.outputs.chat_parsers import Chats
from serving.engine.patches.outputs.processor import ChosenLogprobs, is_quick

_encode = msgspec.json.encode

Results = AsyncGenerator[Any, None]
"""vLLM's results of one request."""


def _has_prompts(request: Any) -> bool:
    prompt = getattr(request, "prompt", None)
    several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    return several or bool(getattr(request, "prompt_embeds", None))


def _parses(request: Any, serving: Any) -> bool:
    """Whether vLLM's parsers may make of a token anything else than its text. Those of calls do not
    where a request has no tools, but look at all that came before with each token.
    """
    parser = getattr(serving, "parser_cls", None)
    if parser is None:
        return False
    passes_on = (
        parser.parse_delta is DelegatingParser.parse_delta
        and not parser.reasoning_parser_cls
        and not parser.tool_parser_cls.engine_based_streaming
        and request.tool_choice == "none"
    )
    return not passes_on


VLLM_RENDERS: Mapping[str, Callable[[Any, Any], object]] = {
    "a log of outputs": lambda request, chat: getattr(chat, "enable_log_outputs", False),
    "usage in each event": lambda request, serving: (
        serving.enable_force_include_usage
        or (request.stream_options and request.stream_options.continuous_usage_stats)
    ),
    "several choices": lambda request, _: (request.n or 1) > 1,
    "several prompts": lambda request, _: _has_prompts(request),
    "log probabilities": lambda request, _: (
        request.logprobs is not None and request.logprobs is not False
    ),
    "token ids": lambda request, _: request.return_token_ids,
    "an echo": lambda request, _: request.echo,
    "beam search": lambda request, _: request.use_beam_search,
}
"""What a request, or the server, may ask for in every event of a stream → whether it does. vLLM
renders all events of such a stream.
"""


def chosen(
    request: Any, serving: Any, sink: Sink, steps: bool
) -> "Callable[[Results], Stream] | None":
    """What writes the tokens of a request for a stream, given its results. None where vLLM renders
    all of its events.

    request: vLLM's model of it. serving: vLLM's object that answers it. steps: whether the sink
    takes steps.
    """
    if steps and is_quick():
        return lambda results: Steps(results, sink, serving.renderer.tokenizer)
    if any(asked(request, serving) for asked in VLLM_RENDERS.values()):
        return None
    if not hasattr(request, "messages"):
        return lambda results: Events(results, sink)
    parses = _parses(request, serving)
    if parses and not isinstance(serving, Chats):  # which would hand out the parser
        return None
    has_blanks = getattr(serving, "parser_cls", None) is None
    return lambda results: Deltas(results, sink, request, parses=parses, has_blanks=has_blanks)


class Stream:
    """A stream of one sequence, whose results go to the sink here: where vLLM puts them while the
    request's task waits for one, as long as the client keeps up, and else in that task. So most
    tokens take no turn of the event loop of their own.
    """

    def __init__(self, results: Results, sink: Sink) -> None:
        self._results = results
        self._sink = sink
        self._waits = False
        self._state: Any = None
        self.queue: Any = None
        """vLLM's place for results of which the request's task has not heard yet."""

    def begin(self, state: Any, request: Any) -> None:
        """Get the results of a request that the engine is being given. state: vLLM's of it."""
        self._state, self.queue = state, state.queue
        state.stream = self

    async def aclose(self) -> None:
        """Let go of what has hold of it. The engine works on the request no more."""
        if self._state:
            self._state.stream = None  # they would keep each other
            self._state = self.queue = None
        await self._results.aclose()

    def put(self, output: Any, prompt: Sequence[int]) -> bool:
        """Write an output without waiting. Returns False where vLLM is to render it. prompt: its
        tokens.
        """
        raise NotImplementedError

    def is_next(self) -> bool:
        """Whether what comes now can be written at once."""
        return self._waits and self.queue.output is None and self._sink.takes()

    def needs_no_output(self) -> bool:
        """Whether it is written at once of a Part, without an output of vLLM's."""
        return self.is_next()

    def write_part(
        self, text: str, token_ids: list[int], logprobs: Any, prompt: Sequence[int]
    ) -> None:
        """Write what needs_no_output()."""
        self.put(Part(text, token_ids, logprobs), prompt)

    def take(self, result: Any) -> bool:
        """Write what has just come, where it can be. Returns whether it is done with."""
        (output,) = result.outputs
        if output.finish_reason is not None or not self.is_next():
            return False
        return self.put(output, result.prompt_token_ids)

    async def _next(self) -> Any:
        self._waits = True
        try:
            return await anext(self._results)
        finally:
            self._waits = False


class Part(NamedTuple):
    """What a sequence has got since its last result, as vLLM's outputs have it. logprobs: of these
    tokens and all before them.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: None = None
    stop_reason: None = None


class Events(Stream):
    """vLLM renders its first token and its last one, and what else there is; the tokens between are
    written into the event that vLLM made of the first.

    Iterated by vLLM's generator of events, it has the results that vLLM is to render.
    """

    KEY = b'"text":'
    """What stands before a result's value in an event."""

    def __init__(self, results: Results, sink: Sink) -> None:
        super().__init__(results, sink)
        self._event: tuple[bytes, bytes] | None = None
        """What stands around a value, once vLLM has rendered one."""
        self._given: bytes | None = None
        """The value of the result that vLLM has last."""
        self._unseen: list[int] = []
        """Tokens that vLLM's generator has not seen. It counts them with the last result."""

    def rendered(self, event: bytes) -> None:
        """Learn from an event that vLLM has rendered."""
        self._event = self._event or self._around(event)

    def needs_no_output(self) -> bool:
        return self._event is not None and self.is_next()

    def value(self, output: Any, prompt: Sequence[int]) -> bytes | None:
        """What an event has of an output. None where vLLM is to render it, b"" for no event."""
        return _encode(output.text)

    def _around(self, event: bytes) -> tuple[bytes, bytes] | None:
        # A text cannot have the key in it: its quotes would be escaped.
        before, key, after = event.partition(self.KEY)
        value = self._given
        return (before + key, after[len(value) :]) if value and after.startswith(value) else None

    def event(self, output: Any, prompt: Sequence[int]) -> bytes | None:
        """What is written of an output, or None where vLLM is to render it."""
        if not self._event or (value := self.value(output, prompt)) is None:
            return None
        self._unseen += output.token_ids
        before, after = self._event
        return before + value + after if value else b""

    def put(self, output: Any, prompt: Sequence[int]) -> bool:
        if (event := self.event(output, prompt)) is None:
            return False
        if event:
            self._sink.write(event)
        return True

    def __aiter__(self) -> "Events":
        return self

    async def __anext__(self) -> Any:
        while True:
            result = await self._next()
            (output,), prompt = result.outputs, result.prompt_token_ids
            if output.finish_reason is not None or (event := self.event(output, prompt)) is None:
                self.give(output)
                return result
            if event:
                await self._sink.event(event)

    def give(self, output: Any) -> None:
        """Have vLLM see an output, with the tokens that it has not seen."""
        self._given = _encode(output.text)
        output.token_ids = [*self._unseen, *output.token_ids]
        self._unseen = []


class Deltas(Events):
    """A chat's stream, whose values are deltas. Where vLLM has a parser make them of tokens, they
    are written as far as they are text or reasoning; vLLM renders others, of what that parser said.

    parses: whether a token has to be parsed. has_blanks: whether a token without a text has an
    event, where it has not.
    """

    KEY = b'"delta":'

    def __init__(
        self, results: Results, sink: Sink, request: Any, *, parses: bool, has_blanks: bool
    ) -> None:
        super().__init__(results, sink)
        self._request = request
        self._parses = parses
        self._has_blanks = has_blanks
        self._parse: Callable[..., Any] | None = None
        self._aside: tuple[Any, Exception | None] | None = None
        """What the parser made of a result that vLLM is to render: a delta, or an error."""
        self._later: list[Any] = []
        """Results that came while that one waited. vLLM would join them to it."""
        self._tokens: list[int] = []
        """Those of the result that vLLM has last."""

    def parsed_by(self, parser: Any) -> None:
        """vLLM's generator uses this parser, which is to see each result once."""
        if self._parses:
            self._parse, parser.parse_delta = parser.parse_delta, self._delta

    async def aclose(self) -> None:
        self._parse = None
        await super().aclose()

    def _delta(self, **given: Any) -> Any:
        """What vLLM's generator gets of its parser."""
        if self._aside:
            (delta, error), self._aside = self._aside, None
            if error:
                raise error
        else:
            assert self._parse
            delta = self._parse(**given | {"delta_token_ids": self._tokens})
        self._given = delta and _text_delta(delta)
        return delta

    def needs_no_output(self) -> bool:
        return not self._parse and super().needs_no_output()

    def value(self, output: Any, prompt: Sequence[int]) -> bytes | None:
        if not self._parse:
            return _encode({"content": output.text}) if output.text or self._has_blanks else b""
        try:
            delta = self._parse(
                delta_text=output.text,
                delta_token_ids=[*output.token_ids],
                request=self._request,
                prompt_token_ids=prompt,
                finished=False,
            )
        except Exception as error:
            self._aside = None, error
            return None
        if delta is None:
            return b""
        if not (value := _text_delta(delta)):
            self._aside = delta, None
        return value

    def event(self, output: Any, prompt: Sequence[int]) -> bytes | None:
        return None if self._aside else super().event(output, prompt)

    def take(self, result: Any) -> bool:
        if self._aside or self._later:
            self._later.append(result)
            return True
        return super().take(result)

    async def __anext__(self) -> Any:
        later, self._later = self._later, []
        for result in later:
            self.queue.put(result)
        return await super().__anext__()

    def give(self, output: Any) -> None:
        self._tokens = [*output.token_ids]
        super().give(output)
        self._given = None if self._parse else _encode({"content": output.text})


def _text_delta(delta: Any) -> bytes | None:
    """A delta of text or reasoning as vLLM writes it; None for others."""
    if type(delta) is not DeltaMessage or delta.tool_calls:
        return None
    names = delta.model_fields_set - {"tool_calls"}  # which are not written where there are none
    if not names or names - {"content", "reasoning"}:
        return None
    return _encode({it: getattr(delta, it) for it in ("content", "reasoning") if it in names})


class Steps(Stream):
    """A stream of which the sink gets steps, and vLLM renders nothing."""

    def __init__(self, results: Results, sink: Sink, tokenizer: Any) -> None:
        super().__init__(results, sink)
        self._tokenizer = tokenizer
        self._has_begun = False

    def begin(self, state: Any, request: Any) -> None:
        super().begin(state, request)
        state.logprobs_processor = ChosenLogprobs.of(request)

    async def run(self, require: Callable[[str | None], None]) -> None:
        """Give the sink all steps. require: raises an exception for the reason of a failed end."""
        with contextlib.suppress(StopAsyncIteration):
            while True:
                result = await self._next()
                (output,) = result.outputs
                require(output.finish_reason)
                if step := self._step(output, result.prompt_token_ids):
                    await self._sink.step(step)

    def put(self, output: Any, prompt: Sequence[int]) -> bool:
        if step := self._step(output, prompt):
            self._sink.write_step(step)
        return True

    def _step(self, output: Any, prompt: Sequence[int]) -> Step | None:
        if not (self._has_begun or output.text or output.token_ids):
            return None  # a part of the prompt was computed
        prompt_tokens = None if self._has_begun else len(prompt)
        self._has_begun = True
        logprobs = output.logprobs or ()
        logprobs = logprobs[len(logprobs) - len(output.token_ids) :]
        return Step(
            output.text,
            output.token_ids,
            _own_texts(output, self._tokenizer),
            [max(it, -9999.0) for it in logprobs],  # as low as vLLM tells of
            output.finish_reason,
            output.stop_reason,
            prompt_tokens,
        )


def _own_texts(output: Any, tokenizer: Any) -> list[str]:
    """The text of each of an output's tokens, where it has several."""
    if len(output.token_ids) == 1:
        return [output.text]
    return convert_ids_list_to_tokens(tokenizer, [*output.token_ids])  # type: ignore[no-any-return]
