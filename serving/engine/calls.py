# SPDX-License-Identifier: Apache-2.0
"""In the server's process: calls, answered by vLLM's serving objects without its HTTP app.

A Route has the reader of a call's body, the serving object that answers, and the conversion of its
answer to bytes. Completions and chats reach the sink as steps, or as events with tokens written in
streams.py; on the other routes the sink gets the bytes of vLLM's answers. vLLM makes all decisions:
each call uses a copy of the serving object with a separate engine client (CallClient), so all of
vLLM's requests to the engine belong to a known call.

A request of one token takes about 0.8 of plain vLLM's CPU time (docs/explanation/benchmarks.md).
"""

import asyncio
import contextlib
import copy
import functools
import json
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
)
from typing import Any, NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from serving.cancellation import ClientLeft
from serving.engine import error_handlers
from serving.engine.base import Call, Pace, Prefilled, Sink, Tokens, Usage
from serving.engine.streams import Events, Results, Steps, Stream, chosen
from serving.engine.vllm_errors import from_engine
from serving.errors import BadRequest, EngineFailed, NotFound, ServingError
from serving.protocol import CHAT_COMPLETIONS, COMPLETIONS, MESSAGES, REQUEST_ID, VLLM_SESSION_ID

SHORT = 4096
"""Bytes of a body up to which its prompt is made into tokens on the event loop. On the ceiling
bench completions took 0.73 of plain vLLM's CPU time with it, and 0.81 without, in two runs.
"""
_WRITTEN = (COMPLETIONS, CHAT_COMPLETIONS)
"""The paths whose streams are written here, token by token."""
_ERROR = "event: error\n"
"""The beginning of an event by which vLLM's converter of Messages reports an exception."""


class Route(NamedTuple):
    """The way to answer calls of a path.

    read: makes vLLM's model of a call's request. serving: vLLM's object that answers. create:
    calls that object, or a copy of it, with a stand-in for the HTTP request. dump: arguments of
    model_dump_json() for the answer. event: makes an event of a stream's item.
    """

    read: Callable[[Call], Any]
    serving: Any
    create: Callable[[Any, Any, "StandIn"], Awaitable[Any]]
    dump: Mapping[str, Any] = {}
    event: Callable[[Any], str] = str


class Calls:
    """Answers calls with vLLM's serving objects.

    in_flight: the engine's name of a request → its call, for the output processor. prefilled:
    returns the engine's prefill work so far.
    """

    def __init__(
        self,
        client: Any,
        args: Any,
        routes: Mapping[str, Route],
        in_flight: dict[str, "CallClient"],
        prefilled: Callable[[], Prefilled],
    ) -> None:
        self.routes = routes
        self._client = client
        self._keep_alive = float(args.sse_keep_alive_interval)
        # A client's template has no limit on its time, and would hold the event loop.
        self._prompts = None if args.trust_request_chat_template else _Prompts(client.renderer)
        self._in_flight = in_flight
        self._prefilled = prefilled

    async def generate(self, call: Call, sink: Sink) -> Usage:
        """As Engine.generate()."""
        usage = Usage()
        sink.begin(usage)
        client = CallClient(self._client, call, usage, self._in_flight, self._prefilled)
        ending = call.cancellation
        try:
            with ending.raising():
                await self._answer(call, sink, client)
                if ending.cause:  # an interruption by what the sink did comes with the next await
                    await asyncio.sleep(0)
        except (ServingError, ClientLeft) as cause:
            if cause is not ending.cause:
                raise
        finally:
            await client.close()
        return usage

    async def _answer(self, call: Call, sink: Sink, client: "CallClient") -> None:
        try:
            route = self.routes.get(call.path)
            if not route:
                raise NotFound(f"the model does not answer {call.path}")
            if not (call.is_json or call.file is not None):
                raise BadRequest("the Content-Type of the body has to be application/json")
            request = route.read(call)
            raw = StandIn(call, client, self._prompts)
            serving = raw.own(route.serving)
            if call.path in _WRITTEN and request.stream and not self._keep_alive:
                client.writer = chosen(request, serving, sink, call.steps)
            answer = await route.create(serving, request, raw)
            if not call.cancellation.cause:  # vLLM makes an answer of an interruption
                await self._pass_on(answer, route, serving, call, sink, client)
        except ServingError as error:
            if error is call.cancellation.cause:
                raise
            await sink.fail(error)
        except Exception as error:
            await sink.fail(client.failure or _refusal(*error_handlers.described(error), call))
            if not client.failure and not isinstance(error, error_handlers.EXPECTED):
                raise

    async def _pass_on(
        self, answer: Any, route: Route, serving: Any, call: Call, sink: Sink, client: "CallClient"
    ) -> None:
        if isinstance(answer, ErrorResponse):
            await sink.fail(_refusal(*_told(answer), call))
        elif isinstance(answer, Response):
            kind = answer.headers.get("content-type", "application/octet-stream").encode()
            named = (b"content-type", b"content-length")
            more = [it for it in answer.raw_headers if it[0] not in named]
            await sink.answer(await _body(answer), kind, more)
        elif isinstance(answer, BaseModel):
            await sink.answer(answer.model_dump_json(**route.dump).encode())
        else:
            sink.stream()
            if isinstance(stream := client.stream, Steps):
                await stream.run(functools.partial(client.require_success, serving))
            else:
                await self._events(answer, route, call, sink, client)
            if call.cancellation.cause:
                return
            if client.failure:
                await sink.fail(client.failure)
            else:
                await sink.end()

    async def _events(
        self,
        answer: AsyncGenerator[Any, None],
        route: Route,
        call: Call,
        sink: Sink,
        client: "CallClient",
    ) -> None:
        """Give the sink the events that vLLM renders; other events of the stream bypass vLLM."""
        stream = client.stream if isinstance(client.stream, Events) else None
        if call.path in _WRITTEN:
            answer = with_sse_keep_alive(answer, self._keep_alive)
        async with contextlib.aclosing(answer) as events:
            async for it in events:
                event = route.event(it)
                if call.path == MESSAGES and event.startswith(_ERROR):
                    client.failure = client.failure or EngineFailed("the engine failed")
                if client.failure:
                    return
                data = event.encode()
                if stream:
                    stream.rendered(data)
                await sink.event(data)
                if call.cancellation.cause:
                    return


class CallClient:
    """vLLM's client of its engine, for one call: all requests through it belong to the call.

    writer: makes a stream that writes the call's tokens, if vLLM does not render all of them.
    stream: the stream that it has made. failure: the error that vLLM puts into the call's stream.
    is_constrained: whether a request of the call has a constraint on its answer.
    """

    writer: Callable[[Results], Stream] | None = None
    stream: Stream | None = None
    failure: ServingError | None = None
    is_constrained = False

    def __init__(
        self,
        client: Any,
        call: Call,
        usage: Usage,
        in_flight: dict[str, "CallClient"],
        prefilled: Callable[[], Prefilled],
    ) -> None:
        self._client = client
        self._call = call
        self._usage = usage
        self._in_flight = in_flight
        self._prefilled = prefilled
        self._names: dict[str, str] = {}
        """vLLM's name of a request → the engine's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    # what vLLM's serving objects call

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> Results | Stream:
        name = self._name(request_id)
        results: Results = self._client.generate(prompt, sampling_params, name, **more)
        if not self.writer:
            return results
        self.stream = self.writer(results)
        return self.stream

    def encode(self, prompt: Any, pooling_params: Any, request_id: str, **more: Any) -> Results:
        results: Results
        results = self._client.encode(prompt, pooling_params, self._name(request_id), **more)
        return results

    async def abort(self, request_id: str | list[str], *rest: Any, **more: Any) -> None:
        names = [request_id] if isinstance(request_id, str) else request_id
        await self._client.abort([self._names.get(it, it) for it in names], *rest, **more)

    def stream_error(self, message: str | Exception, *rest: Any, **more: Any) -> str:
        """Replaces create_streaming_error_response(). The result is not sent."""
        answer = create_error_response(message, *rest, **more)
        self.failure = self.failure or _refusal(*_told(answer), self._call)
        return json.dumps(answer.model_dump())

    def watch(self, parser: Any) -> None:
        """Record the parser that vLLM uses for the call's answer."""
        if parsed_by := getattr(self.stream, "parsed_by", None):
            parsed_by(parser)

    # what the output processor calls

    def check(self, request: Any) -> None:
        """Raise EngineFailed for a request that would share the caches of other tenants."""
        if self._call.salt is not None and request.cache_salt != self._call.salt:
            raise EngineFailed("vLLM has lost the salt of a request")

    def begin(self, state: Any, request: Any) -> None:
        """Count the engine's work for a request."""
        self._usage.sources.append(
            functools.partial(_tokens, state, time.monotonic(), self._prefilled)
        )
        self._usage.paces.append(functools.partial(_pace, state))
        if getattr(request.sampling_params, "structured_outputs", None):
            self.is_constrained = True
        if self.stream:
            self.stream.begin(state, request)

    def require_success(self, serving: Any, finish_reason: str | None) -> None:
        """Raise vLLM's exception for a request that has failed in the engine."""
        serving._raise_if_error(finish_reason, self._call.request_id)

    async def close(self) -> None:
        """End the call: the engine stops all work for it."""
        for name in self._names.values():
            self._in_flight.pop(name, None)
        stream, self.stream, self.writer = self.stream, None, None
        if stream:
            await stream.aclose()

    def _name(self, request_id: str) -> str:
        """A unique name of a request for the engine. Two clients may choose the same name."""
        name, number = request_id, 1
        while self._in_flight.get(name, self) is not self:
            number += 1
            name = f"{request_id}-{number}"
        self._names[request_id] = name
        self._in_flight[name] = self
        return name


class StandIn(Request):
    """The stand-in that vLLM's serving objects get instead of an HTTP request."""

    def __init__(self, call: Call, client: CallClient, prompts: "_Prompts | None") -> None:
        headers = {REQUEST_ID.decode(): call.request_id, **(call.trace or {})}
        if call.session:
            headers[VLLM_SESSION_ID.decode()] = call.session
        raw = [(key.encode(), it.encode("latin-1")) for key, it in headers.items()]
        super().__init__({"type": "http", "headers": raw, "state": {}})
        self.call = call
        self.client_of_call = client
        self._prompts = prompts if call.path in _WRITTEN else None

    def own(self, serving: Any) -> Any:
        """A copy of a serving object that uses the engine client of this call."""
        mine = copy.copy(serving)
        mine.engine_client = self.client_of_call
        mine.create_streaming_error_response = self.client_of_call.stream_error
        name = self.call.name_medium
        if not (name or self._prompts):
            return mine
        mine.online_renderer = renderer = copy.copy(serving.online_renderer)
        if name:
            renderer.name_medium = name
        if self._prompts:
            renderer.renderer = self._prompts.renderer(is_short=self.call.size <= SHORT)
        return mine


class _Prompts:
    """Tokenizes short prompts on the event loop, while no thread tokenizes others.

    vLLM uses a thread, twice for a chat. For a short prompt, the switch to the thread and back
    takes longer than the work. vLLM has a tokenizer for each thread and one more.
    """

    def __init__(self, renderer: Any) -> None:
        self.in_threads = 0
        self._short, self._long = _Renderer(renderer, self, True), _Renderer(renderer, self, False)

    def renderer(self, is_short: bool) -> "_Renderer":
        return self._short if is_short else self._long


class _Renderer:
    """vLLM's renderer of prompts, with another tokenization."""

    def __init__(self, renderer: Any, prompts: _Prompts, is_short: bool) -> None:
        self._renderer = renderer
        self._prompts = prompts
        self._is_short = is_short

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_cmpl_async(self, prompts: Any, *rest: Any, **more: Any) -> Any:
        if self._is_at_once:
            return self._renderer.render_cmpl(prompts, *rest, **more)
        with self._in_thread():
            return await self._renderer.render_cmpl_async(prompts, *rest, **more)

    async def render_chat_async(self, conversations: Any, *rest: Any, **more: Any) -> Any:
        if self._is_at_once and _are_texts(conversations):
            return self._renderer.render_chat(conversations, *rest, **more)
        with self._in_thread():
            return await self._renderer.render_chat_async(conversations, *rest, **more)

    @property
    def _is_at_once(self) -> bool:
        return self._is_short and not self._prompts.in_threads

    @contextlib.contextmanager
    def _in_thread(self) -> Iterator[None]:
        self._prompts.in_threads += 1
        try:
            yield
        finally:
            self._prompts.in_threads -= 1


def _are_texts(conversations: Any) -> bool:
    """Whether they have only text. Media take longer."""
    return all(
        isinstance(message.get("content"), str)
        for conversation in conversations
        for message in conversation
    )


def _told(answer: ErrorResponse) -> tuple[int, str, str | None]:
    return answer.error.code, answer.error.message, answer.error.param


def _refusal(status: int, message: str, parameter: str | None, call: Call) -> ServingError:
    return from_engine(status, message, parameter, call)


async def _body(answer: Response) -> bytes:
    if (parts := getattr(answer, "body_iterator", None)) is None:
        return bytes(answer.body)
    return b"".join([it async for it in _bytes(parts)])


async def _bytes(parts: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for part in parts:
        yield part.encode() if isinstance(part, str) else bytes(part)


def _tokens(state: Any, began: float, prefilled: Callable[[], Prefilled]) -> Tokens:
    """A request's tokens so far. began: the monotonic time when vLLM got the request.

    Tokens count as in vLLM's series: a prompt counts once it is computed, and only once for all of
    its `n` answers.
    """
    if state.is_prefilling:
        first = not state.request_index
        return Tokens(_computed_about(state.prompt_len, began, prefilled()) if first else 0)
    generated = state.detokenizer.num_output_tokens() if state.detokenizer else 0
    if state.request_index:  # its prompt is the first one's
        return Tokens(generated=generated)
    return Tokens(state.prompt_len, state.num_cached_tokens, generated)


def _computed_about(length: int, began: float, before: Prefilled) -> int:
    """An estimate of the computed tokens of a prompt before its first token. vLLM computes a long
    prompt in chunks and reports none of them, so the estimate uses the time and the prefill speed.
    """
    if not before.seconds:
        return 0
    return min(length, int((time.monotonic() - began) * before.tokens / before.seconds))


def _pace(state: Any) -> Pace | None:
    stats = state.stats  # None where the operator has switched vLLM's statistics off
    if stats is None or not stats.num_generation_tokens:
        return None
    further = stats.num_generation_tokens - 1
    between = (stats.last_token_ts - stats.first_token_ts) / further if further else None
    return Pace(stats.arrival_time + stats.first_token_latency, between)
