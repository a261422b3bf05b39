# SPDX-License-Identifier: Apache-2.0
"""In the server's process: chats, completions and embeddings without FastAPI, and tokens without
pydantic.

A request is given to vLLM's own serving objects (0.32), and what they answer is written. All that
is decided is decided by vLLM: a body that its models refuse goes to its app, which says why, and of
a stream only the tokens between the first and the last are written here, into the event that vLLM
itself made of the first one. A request of one token takes about 0.8 of plain vLLM's CPU time,
and a streamed token 0.5 to 0.6 (docs/explanation/benchmarks.md).
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput
from vllm.parser.abstract_parser import DelegatingParser
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState
from vllm.v1.outputs import LogprobsLists

from handlers.records import Step
from serving.cancellation import ClientLeft
from serving.engine import error_handlers
from serving.engine.base import CANCELLATION, STEPS
from serving.errors import ServingError
from serving.http.bodies import WRITER, Writer
from serving.protocol import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS

Write = Callable[[bytes], Awaitable[None]]

_encode = msgspec.json.encode


class _Way(NamedTuple):
    """How a request's stream is written that came past vLLM's app. render: makes of a step what is
    written, where it needs no more. writer: writes events where they come.
    """

    render: Callable[[Step], bytes] | None
    writer: Writer | None


_way: ContextVar[_Way | None] = ContextVar("way", default=None)
"""The way of the request under way; None where it went through vLLM's app."""
WRITTEN: ContextVar["Written | None"] = ContextVar("written", default=None)
"""The stream of the request that the engine is being given."""

_is_short: ContextVar[bool] = ContextVar("is_short", default=False)
SHORT = 4096
"""Bytes of a body up to which its prompt is made into tokens on the event loop. On the ceiling
bench completions took 0.73 of plain vLLM's CPU time with it, and 0.81 without, in two runs.
"""


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


class Written:
    """A stream of one sequence, whose results become events here: where vLLM puts them while the
    request's task waits for one, as long as the client keeps up, and else in that task. So most
    tokens take no turn of the event loop of their own.

    results: vLLM's; pairs of a prompt's number and a result where `paired`. writer: what writes
    events where they come, where there is such.
    """

    def __init__(
        self, results: AsyncGenerator[Any, None], writer: Writer | None, *, paired: bool = False
    ) -> None:
        self._results = results
        self._writer = writer
        self._paired = paired
        self._waits = False
        self.queue: Any = None
        """vLLM's place for results of which the request's task has not heard yet."""

    def begin(self, state: Any) -> None:
        """Get the results of a request that the engine is being given. state: vLLM's of it."""
        self.queue = state.queue
        # There is no place to hand in a class here either. Ours add no more than this.
        self.queue.__class__, self.queue.written = Collector, self
        state.__class__, state.written = Followed, self

    def end(self) -> None:
        """Let go of what has hold of it."""
        self.queue = None

    async def run(self, write: Write) -> None:
        """Write all events."""
        raise NotImplementedError

    def event(self, output: Any, prompt: Sequence[int]) -> bytes | None:
        """What is written of an output, or None where vLLM is to render it. prompt: its tokens."""
        raise NotImplementedError

    def is_next(self) -> bool:
        """Whether what comes now can be written at once."""
        writer = self._writer
        return bool(self._waits and self.queue.output is None and writer and writer.takes())

    def needs_no_result(self) -> bool:
        """Whether it is written at once of a Part, without a result of vLLM's."""
        return self.is_next()

    def take(self, result: Any) -> bool:
        """Write what has just come, where it can be. Returns whether it is done with."""
        (output,) = result.outputs
        if output.finish_reason is not None or not self.is_next():
            return False
        return self.write_now(output, result.prompt_token_ids)

    def write_now(self, output: Any, prompt: Sequence[int]) -> bool:
        """Write what is_next. Returns whether it is done with."""
        if (event := self.event(output, prompt)) is None:
            return False
        assert self._writer
        self._writer.write(event)
        return True

    async def _next(self) -> Any:
        self._waits = True
        try:
            found = await anext(self._results)
        finally:
            self._waits = False
        return found[1] if self._paired else found


class Collector(RequestOutputCollector):  # type: ignore[misc]  # vLLM is not type-checked
    """Where vLLM puts results for a request's task, but for those that are written at once."""

    written: Written

    def put(self, output: Any) -> None:
        try:
            if isinstance(output, RequestOutput) and self.written.take(output):
                return
        except Exception as error:  # it would end the reading of all results
            output = error
        super().put(output)


class Part(NamedTuple):
    """What a sequence has got since its last result, as vLLM's outputs have it. logprobs: of these
    tokens and all before them.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: None = None
    stop_reason: None = None


class Followed(RequestState):  # type: ignore[misc]  # vLLM is not type-checked
    """vLLM's state of a request, which makes no result of what needs none: that takes half the time
    in which vLLM reads a token.
    """

    written: Written

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        written = self.written
        if finish_reason is None and self.stream_interval == 1 and written.needs_no_result():
            text = self.detokenizer.get_next_output_text(False, True)
            part = Part(text, new_token_ids, self.logprobs_processor.logprobs)
            try:
                written.write_now(part, self.prompt_token_ids)
            except Exception as error:  # it would end the reading of all results
                self.queue.put(error)
            return None
        return super().make_request_output(
            new_token_ids, pooling_output, finish_reason, *rest, **more
        )


class Stream(Written):
    """vLLM renders its first token and its last one, and what else there is; the tokens between are
    written into the event that vLLM made of the first.

    Iterated by vLLM's generator, it has the results that vLLM is to render.

    render: vLLM's generator of events over results.
    """

    KEY = b'"text":'
    """What stands before a result's value in an event."""

    def __init__(
        self,
        render: Callable[["Stream"], AsyncGenerator[str, None]],
        results: AsyncGenerator[Any, None],
        writer: Writer | None,
        *,
        paired: bool = False,
    ) -> None:
        super().__init__(results, writer, paired=paired)
        self._render = render
        self._event: tuple[bytes, bytes] | None = None
        """What stands around a value, once vLLM has rendered one."""
        self._given: bytes | None = None
        """The value of the result that vLLM has last."""
        self._unseen: list[int] = []
        """Tokens that vLLM's generator has not seen. It counts them with the last result."""

    async def run(self, write: Write) -> None:
        self._write = write
        async with (
            contextlib.aclosing(self._results),
            contextlib.aclosing(self._render(self)) as events,
        ):
            async for event in events:
                data = event.encode()
                self._event = self._event or self._around(data)
                await write(data)

    def needs_no_result(self) -> bool:
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
        if not self._event or (value := self.value(output, prompt)) is None:
            return None
        self._unseen += output.token_ids
        before, after = self._event
        return before + value + after if value else b""

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        while True:
            result = await self._next()
            (output,), prompt = result.outputs, result.prompt_token_ids
            if output.finish_reason is not None or (event := self.event(output, prompt)) is None:
                self.give(output)
                return (0, result) if self._paired else result
            if event:
                await self._write(event)

    def give(self, output: Any) -> None:
        """Have vLLM see an output, with the tokens that it has not seen."""
        self._given = _encode(output.text)
        output.token_ids = [*self._unseen, *output.token_ids]
        self._unseen = []


class Deltas(Stream):
    """A chat's stream, whose values are deltas. Where vLLM has a parser make them of tokens, they
    are written as far as they are text or reasoning; vLLM renders others, of what that parser said.

    parses: whether a token has to be parsed. has_blanks: whether a token without a text has an
    event, where it has not.
    """

    KEY = b'"delta":'

    def __init__(
        self,
        render: Callable[["Stream"], AsyncGenerator[str, None]],
        results: AsyncGenerator[Any, None],
        writer: Writer | None,
        request: Any,
        *,
        parses: bool,
        has_blanks: bool,
    ) -> None:
        super().__init__(render, results, writer)
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

    def end(self) -> None:
        super().end()
        self._parse = None

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

    def needs_no_result(self) -> bool:
        return not self._parse and super().needs_no_result()

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


def _is_plain(request: Any, serving: Any) -> bool:
    return not any(asked(request, serving) for asked in VLLM_RENDERS.values())


class Chats(OpenAIServingChat):  # type: ignore[misc]  # vLLM is not type-checked
    """vLLM's chats, whose streams can be written past its rendering."""

    def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, *rest: Any, **more: Any
    ) -> Any:
        vllms = super().chat_completion_stream_generator

        def render(results: Any) -> AsyncGenerator[str, None]:
            return vllms(request, results, *rest, **more)  # type: ignore[no-any-return]

        if not (way := _way.get()) or not _is_plain(request, self):
            return render(result_generator)
        return Deltas(
            *(render, result_generator, way.writer, request),
            parses=_parses(request, self),
            has_blanks=self.parser_cls is None,
        )

    def _make_parser(self, *rest: Any, **more: Any) -> Any:
        parser = super()._make_parser(*rest, **more)
        if isinstance(written := WRITTEN.get(), Deltas):
            written.parsed_by(parser)
        return parser


class Completions(OpenAIServingCompletion):  # type: ignore[misc]  # vLLM is not type-checked
    """vLLM's completions; the same. Of a stream that is rendered elsewhere there are no events, but
    its steps.
    """

    def completion_stream_generator(
        self,
        request: Any,
        engine_inputs: Any,
        result_generator: Any,
        request_id: str,
        *rest: Any,
        **more: Any,
    ) -> Any:
        vllms = super().completion_stream_generator

        def render(results: Any) -> AsyncGenerator[str, None]:
            events: AsyncGenerator[str, None]
            events = vllms(request, engine_inputs, results, request_id, *rest, **more)
            return events

        if not (way := _way.get()):
            return render(result_generator)
        if way.render:
            tokenizer = more["tokenizer"]
            return Steps(self, way.render, result_generator, way.writer, request_id, tokenizer)
        if not _is_plain(request, self):
            return render(result_generator)
        return Stream(render, result_generator, way.writer, paired=True)


class Steps(Written):
    """A stream of which there are no events, but its steps.

    serving: the object that answers with it. render: makes of a step what is written.
    """

    def __init__(
        self,
        serving: Any,
        render: Callable[[Step], bytes],
        results: AsyncGenerator[tuple[int, Any], None],
        writer: Writer | None,
        request_id: str,
        tokenizer: Any,
    ) -> None:
        super().__init__(results, writer, paired=True)
        self._serving = serving
        self._render = render
        self._request_id = request_id
        self._tokenizer = tokenizer
        self._has_begun = False

    def begin(self, state: Any) -> None:
        super().begin(state)
        processor = state.logprobs_processor
        processor.__class__, processor.logprobs = ChosenLogprobs, []

    async def run(self, write: Write) -> None:
        serving = self._serving
        try:
            async with contextlib.aclosing(self._results):
                with contextlib.suppress(StopAsyncIteration):
                    while True:
                        result = await self._next()
                        (output,) = result.outputs
                        serving._raise_if_error(output.finish_reason, self._request_id)
                        if event := self.event(output, result.prompt_token_ids):
                            await write(event)
        except GenerationError as error:
            message = serving._convert_generation_error_to_streaming_response(error)
            await write(b"data: %b\n\n" % message.encode())
        except Exception as error:
            await write(b"data: %b\n\n" % serving.create_streaming_error_response(error).encode())

    def event(self, output: Any, prompt: Sequence[int]) -> bytes:
        if not (self._has_begun or output.text or output.token_ids):
            return b""  # a part of the prompt was computed
        prompt_tokens = None if self._has_begun else len(prompt)
        self._has_begun = True
        logprobs = output.logprobs or ()
        logprobs = logprobs[len(logprobs) - len(output.token_ids) :]
        return self._render(
            Step(
                output.text,
                output.token_ids,
                _own_texts(output, self._tokenizer),
                [max(it, -9999.0) for it in logprobs],  # as low as vLLM tells of
                output.finish_reason,
                output.stop_reason,
                prompt_tokens,
            )
        )


class ChosenLogprobs(LogprobsProcessor):  # type: ignore[misc]  # vLLM is not type-checked
    """Keeps each chosen token's log probability alone, as a number. vLLM makes objects of all that
    the engine sends, and a text for each.
    """

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        self.logprobs += logprobs_lists.logprobs[:, 0].tolist()


def _own_texts(output: Any, tokenizer: Any) -> list[str]:
    """The text of each of an output's tokens, where it has several."""
    if len(output.token_ids) == 1:
        return [output.text]
    return convert_ids_list_to_tokens(tokenizer, [*output.token_ids])  # type: ignore[no-any-return]


def render_short_prompts_here(renderer: Any) -> None:
    """Have short prompts made into tokens where their request is, while no other is under way.

    vLLM has a thread do it, twice for a chat. For a short prompt the way there and back takes more
    than the work. Its tokenizers are several, one for each thread and one more.
    """
    pool = renderer._executor
    threaded = pool.submit
    under_way: set[Future[Any]] = set()

    def submit(call: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        if not _is_short.get() or under_way:
            found: Future[Any] = threaded(call, *args, **more)
            under_way.add(found)
            found.add_done_callback(under_way.discard)
            return found
        found = Future()
        try:
            found.set_result(call(*args, **more))
        except Exception as error:
            found.set_exception(error)
        return found

    pool.submit = submit


class _Route(NamedTuple):
    """read: makes vLLM's model of a body. create: the method of the serving object."""

    read: Callable[[Any], Any]
    create: Callable[[Any, Request], Awaitable[Any]]
    short: int = SHORT


class Direct:
    """vLLM's app, past which requests go that bring their Cancellation along."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        state, args = app.state, app.state.args
        self._routes: dict[str, _Route] = {}
        if getattr(state, "enable_server_load_tracking", False) or args.sse_keep_alive_interval:
            return  # vLLM's app does both
        if not args.trust_request_chat_template:  # one of a client's may take for ever
            render_short_prompts_here(state.engine_client.renderer)
        if chat := getattr(state, "openai_serving_chat", None):
            # vLLM makes these objects from its arguments, and there is no place to hand in a
            # class. Ours add methods only, no state that __init__ would have to make.
            chat.__class__ = Chats
            read = ChatCompletionRequest.model_validate
            self._routes[CHAT_COMPLETIONS] = _Route(read, chat.create_chat_completion)
        if completion := getattr(state, "openai_serving_completion", None):
            completion.__class__ = Completions
            read = CompletionRequest.model_validate
            self._routes[COMPLETIONS] = _Route(read, completion.create_completion)
        if embedding := getattr(state, "serving_embedding", None):
            # It imports what only such a model needs.
            from serving.engine.requests.pooling import EmbeddingRequest

            # A short body may have many inputs, and their vectors are long: to write them is work
            # for a thread.
            read = TypeAdapter(EmbeddingRequest).validate_python
            self._routes[EMBEDDINGS] = _Route(read, embedding, short=0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, ending = self._routes.get(scope["path"]), scope.get(CANCELLATION)
        headers = dict(scope["headers"])
        if not route or not ending or not _is_json(headers.get(b"content-type", b"")):
            await self._app(scope, receive, send)
            return
        message = await receive()
        try:
            # As vLLM's app reads it; model_validate_json saves 2 µs of 20.
            request = route.read(json.loads(message["body"]))
        except Exception:  # vLLM's app says what is wrong
            await self._app(scope, _again(message, receive), send)
            return
        way = _way.set(_Way(scope.get(STEPS), scope.get(WRITER)))
        _is_short.set(len(message["body"]) <= route.short)
        raw = Request({**scope, "app": self._app}, receive)
        try:
            with ending.raising():
                await self._answer(route, request, raw, send)
                if ending.cause:  # an interruption by what `send` did comes with the next await
                    await asyncio.sleep(0)
        except (ServingError, ClientLeft) as cause:
            if cause is not ending.cause:
                raise
        finally:
            _way.reset(way)

    async def _answer(self, route: _Route, request: Any, raw: Request, send: Send) -> None:
        try:
            answer = await route.create(request, raw)
        except Exception as error:
            await (await error_handlers.answer(raw, error))(raw.scope, raw.receive, send)
            if not isinstance(error, error_handlers.EXPECTED):
                raise
            return
        if isinstance(answer, Response):
            await answer(raw.scope, raw.receive, send)
            return
        if isinstance(answer, BaseModel):
            is_error = isinstance(answer, ErrorResponse)
            status = answer.error.code if is_error else 200  # type: ignore[attr-defined]
            body = answer.model_dump_json().encode()
            await send(_head(status, b"application/json", len(body)))
            await send({"type": "http.response.body", "body": body})
            return
        await send(_head(200, b"text/event-stream; charset=utf-8"))

        async def write(event: bytes) -> None:
            await send({"type": "http.response.body", "body": event, "more_body": True})

        if isinstance(answer, Written):
            before = WRITTEN.set(answer)
            try:
                await answer.run(write)
            finally:
                WRITTEN.reset(before)
                answer.end()
        else:
            async with contextlib.aclosing(answer):
                async for event in answer:
                    await write(event.encode())
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


def _head(status: int, kind: bytes, length: int | None = None) -> Message:
    headers = [(b"content-type", kind)]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    return {"type": "http.response.start", "status": status, "headers": headers}


def _again(message: Message, receive: Receive) -> Receive:
    """What receives this message first."""
    messages = iter([message])

    async def again() -> Message:
        return next(messages, None) or await receive()

    return again
