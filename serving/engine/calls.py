# SPDX-License-Identifier: Apache-2.0
"""In the server's process: calls, answered by vLLM without its HTTP app.

Completions and chats are answered by vLLM's client (texts/). On the other routes one of vLLM's
serving objects answers, and the sink gets the bytes of its answer. Each call uses a separate engine
client (CallClient), so all of vLLM's requests to the engine belong to a known call.

A request of one token takes about half of plain vLLM's CPU time (docs/explanation/benchmarks.md).
"""

import asyncio
import contextlib
import copy
import functools
import json
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
)
from typing import Any, NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError, VLLMValidationError

from serving.cancellation import ClientLeft
from serving.engine import error_handlers
from serving.engine.base import Call, Pace, Prefilled, Sink, Tokens, Usage
from serving.engine.patches.frontend.refusals import NO_ANSWER
from serving.engine.texts.streams import Results, Stream
from serving.engine.vllm_errors import from_engine, refused
from serving.errors import BadRequest, EngineFailed, NotFound, ServingError
from serving.protocol import MESSAGES, REQUEST_ID, VLLM_SESSION_ID

log = logging.getLogger(__name__)

_ERROR = "event: error\n"
"""The beginning of the event that vLLM's converter of Messages writes for an exception."""
Way = Callable[[Call, Sink, "CallClient"], Awaitable[None]]
"""Answers a call. Raises vLLM's exceptions, and ServingError."""


class Route(NamedTuple):
    """The way to have one of vLLM's serving objects answer the calls of a path.

    read: makes vLLM's model of a call's request. serving: vLLM's object that answers. create:
    calls that object, or a copy of it, with a stand-in for the HTTP request. dump: arguments of
    model_dump_json() for the answer. event: makes an event of a stream's item.
    """

    read: Callable[[Call], Any]
    serving: Any
    create: Callable[[Any, Any, "RequestStandIn"], Awaitable[Any]]
    dump: Mapping[str, Any] = {}
    event: Callable[[Any], str] = str

    async def __call__(self, call: Call, sink: Sink, client: "CallClient") -> None:
        request = self.read(call)
        raw = RequestStandIn(call, client)
        answer = await self.create(raw.own(self.serving), request, raw)
        if call.cancellation.cause:  # vLLM makes an answer of an interruption
            return
        if isinstance(answer, ErrorResponse):
            raise refused(answer, call)
        if isinstance(answer, Response):
            kind = answer.headers.get("content-type", "application/octet-stream").encode()
            named = (b"content-type", b"content-length")
            more = [it for it in answer.raw_headers if it[0] not in named]
            await sink.answer(await _body(answer), kind, more)
        elif isinstance(answer, BaseModel):
            await sink.answer(answer.model_dump_json(**self.dump).encode())
        else:
            sink.stream()
            await self._pass_on(answer, call, sink, client)

    async def _pass_on(
        self, answer: AsyncGenerator[Any, None], call: Call, sink: Sink, client: "CallClient"
    ) -> None:
        """Give the sink the events that vLLM renders."""
        async with contextlib.aclosing(answer) as events:
            async for it in events:
                event = self.event(it)
                if call.path == MESSAGES and event.startswith(_ERROR):
                    client.failure = client.failure or EngineFailed("the engine failed")
                if client.failure:
                    break
                await sink.event(event.encode())
                if call.cancellation.cause:
                    return
        if call.cancellation.cause:
            return
        if client.failure:
            raise client.failure
        await sink.end()


class Calls:
    """Answers calls.

    routes: path → how it is answered. in_flight: the engine's name of a request → its call, for the
    output processor. prefilled: returns the engine's prefill work so far.
    """

    def __init__(
        self,
        client: Any,
        routes: Mapping[str, Way],
        in_flight: dict[str, "CallClient"],
        prefilled: Callable[[], Prefilled],
    ) -> None:
        self.routes = routes
        self._client = client
        self._in_flight = in_flight
        self._prefilled = prefilled

    async def generate(self, call: Call, sink: Sink) -> None:
        """As Engine.generate()."""
        usage = Usage()
        sink.begin(usage)
        client = CallClient(self._client, call, usage, self._in_flight, self._prefilled)
        ending = call.cancellation
        try:
            with ending.raising():
                await self._answer(call, sink, client)
                if ending.cause:  # an interruption by the sink comes with the next await
                    await asyncio.sleep(0)
        except (ServingError, ClientLeft) as cause:
            if cause is not ending.cause:
                raise
        finally:
            await client.close()

    async def _answer(self, call: Call, sink: Sink, client: "CallClient") -> None:
        try:
            route = self.routes.get(call.path)
            if not route:
                raise NotFound(f"the model does not answer {call.path}")
            if not (call.is_json or call.file is not None):
                raise BadRequest("the Content-Type of the body has to be application/json")
            await route(call, sink, client)
        except ServingError as error:
            if error is call.cancellation.cause:
                raise
            await sink.fail(error)
        except Exception as error:
            described = from_engine(*error_handlers.described(error), call)
            await sink.fail(client.failure or described)
            if not isinstance(error, error_handlers.EXPECTED):
                raise


class CallClient:
    """vLLM's client of its engine, for one call: all requests through it belong to the call.

    failure: the error that vLLM puts into the call's stream. is_constrained: whether a request of
    the call has a constraint on its answer.
    """

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
        self._streams: dict[str, Stream] = {}
        """The engine's name of a request → the stream that writes its tokens."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        stream: Callable[[Results], Stream] | None = None,
        **more: Any,
    ) -> Results | Stream:
        """Generates as vLLM does. stream: makes the stream that writes the request's tokens."""
        name = self._name(request_id)
        results: Results = self._client.generate(prompt, sampling_params, name, **more)
        if not stream:
            return results
        self._streams[name] = found = stream(results)
        return found

    # called by vLLM's serving objects

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
        self.failure = self.failure or refused(answer, self._call)
        return json.dumps(answer.model_dump())

    # called by the output processor

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
        if stream := self._streams.get(request.external_req_id):
            stream.begin(state, request)

    # called by the writers of answers

    def refusal(self, answer: ErrorResponse) -> ServingError:
        """The exception for an error that vLLM has returned."""
        return refused(answer, self._call)

    def require_success(self, finish_reason: str | None) -> None:
        """Raise vLLM's exception for a request that has failed in the engine."""
        if finish_reason != "error":
            return
        if self.is_constrained:
            raise VLLMValidationError(NO_ANSWER)
        log.error("request %s has failed in the engine", self._call.request_id)
        raise GenerationError

    async def close(self) -> None:
        """End the call: the engine stops all work for it."""
        for name in self._names.values():
            self._in_flight.pop(name, None)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
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


class RequestStandIn(Request):
    """The stand-in that vLLM's serving objects get instead of an HTTP request."""

    def __init__(self, call: Call, client: CallClient) -> None:
        headers = {REQUEST_ID.decode(): call.request_id, **(call.trace or {})}
        if call.session:
            headers[VLLM_SESSION_ID.decode()] = call.session
        raw = [(key.encode(), it.encode("latin-1")) for key, it in headers.items()]
        super().__init__({"type": "http", "headers": raw, "state": {}})
        self.call = call
        self.client_of_call = client

    def own(self, serving: Any) -> Any:
        """A copy of a serving object that uses the engine client of this call."""
        mine = copy.copy(serving)
        mine.engine_client = self.client_of_call
        mine.create_streaming_error_response = self.client_of_call.stream_error
        if name := self.call.name_medium:
            mine.online_renderer = copy.copy(serving.online_renderer)
            mine.online_renderer.name_medium = name
        return mine


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
    stats = state.stats  # None if the operator has switched vLLM's statistics off
    if stats is None or not stats.num_generation_tokens:
        return None
    further = stats.num_generation_tokens - 1
    between = (stats.last_token_ts - stats.first_token_ts) / further if further else None
    return Pace(stats.arrival_time + stats.first_token_latency, between)
