# SPDX-License-Identifier: Apache-2.0
"""In the server's process: chats, completions and embeddings without FastAPI, and tokens without
pydantic.

A request is given to vLLM's own serving objects (0.32), and what they answer is written. All that
is decided is decided by vLLM: a body that its models refuse goes to its app, which says why, and of
a stream only the tokens between the first and the last are written here, into the event that vLLM
itself made of the first one. A completion of one token takes 0.6 to 0.85 of the server's CPU time
with vLLM's app, and a streamed token 0.73 to 0.78 (docs/explanation/benchmarks.md).
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError
from vllm.parser.abstract_parser import DelegatingParser
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from handlers.records import Step
from serving.cancellation import ClientLeft
from serving.engine import error_handlers
from serving.engine.base import CANCELLATION, STEPS
from serving.errors import ServingError
from serving.protocol import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS

Write = Callable[[bytes], Awaitable[None]]

_encode = msgspec.json.encode

_is_direct: ContextVar[bool] = ContextVar("is_direct", default=False)
"""Whether the request under way came past vLLM's app."""
_render: ContextVar[Callable[[Step], bytes] | None] = ContextVar("render", default=None)
"""What renders the steps of its stream."""

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
    "calls of tools, reasoning": _parses,
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


class Stream:
    """A stream of one sequence. vLLM renders its first token and its last one, and what else there
    is; the tokens between are written into the event that vLLM made of the first.

    Iterated by vLLM's generator, it has the results that vLLM is to render.

    render: vLLM's generator of events over results. results: vLLM's; pairs of a prompt's number and
    a result where `paired`. key: what stands before a token's text in an event. has_blanks: whether
    a token without a text has an event.
    """

    def __init__(
        self,
        render: Callable[["Stream"], AsyncGenerator[str, None]],
        results: AsyncGenerator[Any, None],
        key: bytes,
        *,
        paired: bool = False,
        has_blanks: bool = True,
    ) -> None:
        self._render = render
        self._results = results
        self._key = key
        self._paired = paired
        self._has_blanks = has_blanks
        self._event: tuple[bytes, bytes] | None = None
        """What stands around a token's text, once vLLM has rendered one."""
        self._text = ""
        """Of the result that vLLM has last."""
        self._unseen: list[int] = []
        """Tokens that vLLM's generator has not seen. It counts them with the last result."""

    async def run(self, write: Write) -> None:
        """Write all events."""
        self._write = write
        async with (
            contextlib.aclosing(self._results),
            contextlib.aclosing(self._render(self)) as events,
        ):
            async for event in events:
                data = event.encode()
                self._event = self._event or self._around(data)
                await write(data)

    def _around(self, event: bytes) -> tuple[bytes, bytes] | None:
        # A text cannot have the key in it: its quotes would be escaped.
        before, key, after = event.partition(self._key)
        text = _encode(self._text)
        return (before + key, after[len(text) :]) if after.startswith(text) and key else None

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        while True:
            found = await anext(self._results)
            (output,) = (found[1] if self._paired else found).outputs
            if output.finish_reason is not None or not self._event:
                output.token_ids = [*self._unseen, *output.token_ids]
                self._unseen, self._text = [], output.text
                return found
            self._unseen += output.token_ids
            before, after = self._event
            if output.text or self._has_blanks:
                await self._write(before + _encode(output.text) + after)


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

        if not _is_direct.get() or not _is_plain(request, self):
            return render(result_generator)
        has_blanks = self.parser_cls is None
        return Stream(render, result_generator, b'"delta":{"content":', has_blanks=has_blanks)


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

        if render_step := _render.get():
            return self._steps(render_step, result_generator, request_id, more["tokenizer"])
        if not _is_direct.get() or not _is_plain(request, self):
            return render(result_generator)
        return Stream(render, result_generator, b'"text":', paired=True)

    async def _steps(
        self,
        render: Callable[[Step], bytes],
        results: AsyncIterator[tuple[int, Any]],
        request_id: str,
        tokenizer: Any,
    ) -> AsyncGenerator[bytes, None]:
        has_begun = False
        try:
            async for _, result in results:
                (output,) = result.outputs
                self._raise_if_error(output.finish_reason, request_id)
                if not has_begun:
                    self._keep_chosen_logprobs(result.request_id)
                    if not output.text and not output.token_ids:
                        continue  # a part of the prompt was computed
                yield render(
                    Step(
                        output.text,
                        output.token_ids,
                        _own_texts(output, tokenizer),
                        _logprobs(output),
                        output.finish_reason,
                        output.stop_reason,
                        None if has_begun else len(result.prompt_token_ids),
                    )
                )
                has_begun = True
        except GenerationError as error:
            yield (
                b"data: %b\n\n"
                % self._convert_generation_error_to_streaming_response(error).encode()
            )
        except Exception as error:
            yield b"data: %b\n\n" % self.create_streaming_error_response(error).encode()

    def _keep_chosen_logprobs(self, request_id: str) -> None:
        outputs = self.engine_client.output_processor
        for name in outputs.external_req_ids.get(request_id, ()):
            # It has no place to hand in a class either. Ours adds no state.
            processor = outputs.request_states[name].logprobs_processor
            processor.__class__, processor.logprobs = ChosenLogprobs, []


class ChosenLogprobs(LogprobsProcessor):  # type: ignore[misc]  # vLLM is not type-checked
    """Keeps each chosen token's log probability alone, as a number. vLLM makes objects of all that
    the engine sends, and a text for each.
    """

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        self.logprobs += logprobs_lists.logprobs[:, 0].tolist()


def _logprobs(output: Any) -> list[float]:
    """The log probabilities of an output's tokens, as low as vLLM tells of."""
    # Results that came before the first one was looked at are vLLM's.
    return [
        max(it if isinstance(it, float) else it[token].logprob, -9999.0)
        for token, it in zip(output.token_ids, output.logprobs or (), strict=False)
    ]


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
            from serving.engine.pooling_requests import EmbeddingRequest

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
        is_direct, render = _is_direct.set(True), _render.set(scope.get(STEPS))
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
            _is_direct.reset(is_direct)
            _render.reset(render)

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

        if isinstance(answer, Stream):
            await answer.run(write)
        else:
            async with contextlib.aclosing(answer):
                async for event in answer:
                    await write(event if isinstance(event, bytes) else event.encode())
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
