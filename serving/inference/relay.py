# SPDX-License-Identifier: Apache-2.0
"""One request's passage through the engine.

It is given to the engine's ASGI app in this process, and what comes back is rendered. A stream that
needs no rendering is passed on byte for byte.
"""

import asyncio
import contextlib
import enum
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from handlers.records import EngineCall, Step
from serving import errors
from serving.cancellation import Cancellation, ClientLeft
from serving.engine.base import CANCELLATION, STEPS
from serving.engine.vllm_errors import from_engine
from serving.errors import EngineFailed, NotFound, ServingError, UserCodeFailed
from serving.http.bodies import WRITER
from serving.inference.limits import HEADERS
from serving.inference.request import NAMED_EVENTS, SSE, InferenceRequest
from serving.lora.adapter import Adapter
from serving.protocol import FORMATTED, TRACE_CONTEXT
from serving.user_code import AT_ONCE, UserCode

log = logging.getLogger(__name__)


class State(enum.Enum):
    """What is known of the engine's answer."""

    WAITING = enum.auto()
    """Nothing."""
    STREAMING = enum.auto()
    """Events, which go to the client one by one."""
    PASSING = enum.auto()
    """A whole answer that goes to the client as it comes."""
    COLLECTING = enum.auto()
    """A whole answer that is rendered when it is there."""
    REFUSED = enum.auto()
    """An error, which is collected too."""
    DONE = enum.auto()
    """The client has its end."""


_IN_BAND = (b'data: {"error"', b"event: error\n")
"""How the engine begins an event that is an error: OpenAI's way, and Anthropic's."""

WINDOW = 64
"""Events that may wait for an output formatter."""

_NEXT = {
    State.WAITING: {State.STREAMING, State.PASSING, State.COLLECTING, State.REFUSED},
    State.STREAMING: {State.DONE},
    State.PASSING: {State.DONE},
    State.COLLECTING: {State.DONE},
    State.REFUSED: set[State](),
    State.DONE: set[State](),
}


class _Formatting:
    """A stream's events on their way through an output formatter: in their order, several at a time
    where they come faster than it makes them.

    write: takes what was made of them.
    """

    def __init__(
        self,
        formatter: UserCode,
        write: Callable[[list[bytes]], Awaitable[None]],
        cancellation: Cancellation,
    ) -> None:
        self._formatter = formatter
        self._write = write
        self._cancellation = cancellation
        self._pending: deque[bytes] = deque()
        self._fewer = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def put(self, events: list[bytes]) -> None:
        """Have these formatted; wait while too many are."""
        self._pending += events
        if self._pending and (not self._task or self._task.done()):
            self._task = asyncio.create_task(self._run())
        while len(self._pending) > WINDOW and not self._cancellation.cause:
            self._fewer.clear()
            await self._fewer.wait()

    async def drained(self) -> None:
        """Wait until all are written, or the request was ended because they cannot be."""
        if self._task:
            await asyncio.wait([self._task])

    def end(self) -> None:
        """Format no more."""
        if self._task:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._pending and not self._cancellation.cause:
                count = min(len(self._pending), AT_ONCE)
                events = [self._pending.popleft() for _ in range(count)]
                texts, failure = await self._formatter.format_events(events)
                await self._write(texts)
                if failure:
                    raise failure
                self._fewer.set()
        except UserCodeFailed as failure:
            self._cancellation.cancel(failure)
        except Exception:
            self._cancellation.cancel(errors.unforeseen())
        finally:
            self._fewer.set()


class Relay:
    """One request's passage through the engine.

    adapter: the one the call goes to, whose inner name no client sees. formatter: it has the last
    word on the answer, in the place of the call's own reply. context: the headers of its trace, of
    which the engine's work is a part; where there are none, the client's are passed on. formatted:
    whether a model.py has made the call or makes its answer, which a stream's head then says.
    """

    def __init__(
        self,
        request: InferenceRequest,
        call: EngineCall,
        adapter: Adapter | None,
        formatter: UserCode | None,
        context: Sequence[tuple[bytes, bytes]] = (),
        *,
        formatted: bool,
    ) -> None:
        # The request
        self._client = request.client
        self._client_send = request.send
        self._client_writer = None if formatter else request.writer
        self._cancellation = request.cancellation
        self._framing = request.framing
        # The engine's call
        self._call = call
        self._context = context
        self._given = False
        self._adapter = adapter
        # The answer
        self._formatter = formatter
        self._formatted = formatted
        self._formatting = (
            _Formatting(formatter, self._write_formatted, self._cancellation) if formatter else None
        )
        """Of a stream."""
        self._reply = None if formatter else call.reply
        self._verbatim = (
            not formatter and call.reply is None and request.framing in (SSE, NAMED_EVENTS)
        )
        """Whether a stream goes to the client byte for byte."""
        self._has_steps = False
        """Whether the engine has a stream rendered here, step by step, before it sends it."""
        self._state = State.WAITING
        self._head: Message | None = None
        """Not sent before the first byte of the body is there: it may yet become an error's."""
        self._parts: list[bytes] = []
        """Of an answer that is collected."""
        self._pending = b""
        """The beginning of an event whose end is to come."""
        self._told = False
        """Whether the stream has an error in it."""

    async def run(self, engine: ASGIApp) -> None:
        """Have the engine answer. Raises ServingError where nothing has been sent yet, and
        ClientLeft.
        """
        try:
            await self._given_to(engine)
        finally:
            if self._formatting:
                self._formatting.end()
        cause = self._cancellation.cause
        match self._state:
            case State.DONE:
                return
            case _ if isinstance(cause, ClientLeft):
                raise cause
            case _ if cause:
                await self._fail(cause)
            case State.REFUSED:
                raise self._refusal()
            case State.STREAMING | State.WAITING:
                await self._fail(EngineFailed("the engine broke off; the server's log says why"))
            case State.COLLECTING:
                await self._answer(await self._rendered())

    async def _given_to(self, engine: ASGIApp) -> None:
        try:
            await engine(self._engine_scope(), self._receive, self._send)
        except Exception:
            # Starlette raises an unforeseen exception once more after it has answered 500 for it.
            log.exception("the engine raised while it answered a request")
        if self._formatting:
            with contextlib.suppress(ServingError, ClientLeft), self._cancellation.raising():
                await self._formatting.drained()  # what came before the engine broke off

    def _enter(self, state: State) -> None:
        if state not in _NEXT[self._state]:
            raise RuntimeError(f"an answer cannot go from {self._state} to {state}")
        self._state = state

    def _engine_scope(self) -> Scope:
        scope = self._client.scope
        passed = HEADERS
        added = []
        if self._call.content_type or self._call.path != scope["path"]:
            # On /invocations every body is JSON, whatever its content type says; vLLM insists.
            passed = HEADERS - {b"content-type", b"content-length"}
            added.append((b"content-type", self._call.content_type or b"application/json"))
        if self._context:
            passed = passed.difference(TRACE_CONTEXT)
            added += self._context
        headers = [header for header in scope["headers"] if header[0] in passed] + added
        more: dict[str, Any] = {}
        if self._call.steps and not self._formatter:
            more[STEPS] = self._step
        if self._client_writer:
            more[WRITER] = self
        return {
            "type": "http",
            "http_version": scope["http_version"],
            "method": scope["method"],
            "scheme": scope["scheme"],
            "client": scope["client"],
            "server": scope["server"],
            "query_string": scope["query_string"],
            # Below version 2.4 a streaming answer listens for the client's leaving, and a
            # request's end is heard; from there on Starlette would notice only when it sends.
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "path": self._call.path,
            "raw_path": self._call.path.encode(),
            "root_path": "",
            "headers": headers,
            CANCELLATION: self._cancellation,
            **more,
        }

    async def _receive(self) -> Message:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self._cancellation.heard()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._adapter:
            message = _with_public_name(message, self._adapter)
        if message["type"] == "http.response.start":
            self._start(message)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._state is State.STREAMING:
            if not self._cancellation.cause:
                await self._stream(body, more)
        elif self._state is State.PASSING:
            if not (self._head and self._cancellation.cause):
                await self._send_body(body, more)
        else:
            self._parts.append(body)

    def _start(self, message: Message) -> None:
        headers = dict(message["headers"])
        if message["status"] >= 400:
            self._enter(State.REFUSED)
        elif headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._enter(State.STREAMING)
            headers[b"content-type"] = self._framing.content_type
            if self._formatted:
                headers[FORMATTED] = b"true"
            message = {**message, "headers": list(headers.items())}
        else:
            self._enter(State.COLLECTING if self._formatter or self._reply else State.PASSING)
        self._head = message

    async def _stream(self, body: bytes, more: bool) -> None:
        if self._told and not self._verbatim:
            body = b""  # an error is the last line
        elif self._formatting:
            if not body.startswith(_IN_BAND):
                events = [b"data: %b\n\n" % event for event in self._events(body)]
                await self._formatting.put(events)
                if more:
                    return
                body = b""
            await self._formatting.drained()
            if self._cancellation.cause:
                return
        if body.startswith(_IN_BAND):
            error = self._in_band(body)
            if self._head:
                self._cancellation.cancel(error)
                return
            body = self._error_event(error)
        elif not self._formatting and body:
            try:
                body = self._framed(body)
            except Exception:  # of our own reply: the engine is not to blame
                self._cancellation.cancel(errors.unforeseen())
                return
        if body or not more:
            await self._send_body(body, more)

    def _framed(self, body: bytes) -> bytes:
        """What the client gets of the engine's events."""
        if self._verbatim or self._has_steps:
            return body
        return b"".join(self._render(data) for data in self._events(body))

    def takes(self) -> bool:
        """Whether the engine can write an event now, past `_send` (Writer)."""
        return (
            self._state is State.STREAMING
            and not self._head
            and not self._told
            and not self._cancellation.cause
            and self._client_writer is not None
            and self._client_writer.takes()
        )

    def write(self, part: bytes) -> None:
        """Write one, which is no error."""
        assert self._client_writer
        if self._adapter:
            part = _public(part, self._adapter)
        self._client_writer.write(self._framed(part))

    async def _write_formatted(self, texts: list[bytes]) -> None:
        if body := b"".join(self._framing.text(text) for text in texts if text):
            await self._send_body(body, more=True)

    async def _rendered(self) -> bytes:
        """The answer that was collected, as the client gets it."""
        answer = b"".join(self._parts)
        if self._formatter:
            with self._cancellation.raising():
                return await self._formatter.format_answer(answer)
        assert self._reply
        return self._reply.whole(answer)

    def _events(self, body: bytes) -> list[bytes]:
        """The data of the server-sent events in `body`. vLLM sends each as a body of its own."""
        *whole, self._pending = (self._pending + body).split(b"\n\n")
        return [event.removeprefix(b"data: ") for event in whole if event.startswith(b"data: ")]

    def _step(self, step: Step) -> bytes:
        assert self._call.steps
        self._has_steps = True
        try:
            return b"".join(map(self._framing.frame, self._call.steps.step(step)))
        except Exception:  # of our own reply: the engine is not to blame
            self._cancellation.cancel(errors.unforeseen())
            return b""

    def _render(self, data: bytes) -> bytes:
        if self._reply:
            return b"".join(self._framing.frame(line) for line in self._reply.event(data))
        return b"" if data == b"[DONE]" else self._framing.frame(data)

    def _in_band(self, body: bytes) -> ServingError:
        """An error of the engine's after its first byte, which stands in the stream."""
        data = body.partition(b"data: ")[2].partition(b"\n\n")[0]
        try:
            status = int(msgspec.json.decode(data)["error"]["code"])
        except (msgspec.DecodeError, LookupError, TypeError, ValueError):
            status = 500
        error = from_engine(status, data, self._call.body)
        if isinstance(error, EngineFailed):
            error = EngineFailed("the engine failed while it generated; the server's log says why")
        return error

    def _error_event(self, error: ServingError) -> bytes:
        self._client.record.error = error
        self._told = True
        return self._framing.frame(self._client.errors.event(error))

    async def _fail(self, error: ServingError) -> None:
        """Answer with an error: in band where the stream has begun, else by raising it."""
        if self._head or self._state is not State.STREAMING:
            raise error
        end = b"data: [DONE]\n\n" if self._verbatim and self._framing is SSE else b""
        await self._send_body(self._error_event(error) + end, more=False)

    def _refusal(self) -> ServingError:
        assert self._head
        status = self._head["status"]
        error = from_engine(status, b"".join(self._parts), self._call.body)
        if isinstance(error, NotFound) and str(error) == "Not Found":
            return NotFound(f"the model does not answer {self._call.path}")
        return error

    async def _answer(self, body: bytes) -> None:
        self._head = {
            "type": "http.response.start",
            "status": 200,
            "headers": json_headers(body),
        }
        await self._send_body(body, more=False)

    async def _send_body(self, body: bytes, more: bool) -> None:
        if not more:
            self._enter(State.DONE)
        if self._head:
            await self._client_send(self._head)
            self._head = None
        await self._client_send({"type": "http.response.body", "body": body, "more_body": more})


def json_headers(body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]


def _with_public_name(message: Message, adapter: Adapter) -> Message:
    """The engine's message with the adapter's own name in it: a body, or the head of one."""
    if message["type"] == "http.response.body":
        return {**message, "body": _public(message.get("body", b""), adapter)}
    headers = [header for header in message["headers"] if header[0] != b"content-length"]
    return {**message, "headers": headers}


def _public(body: bytes, adapter: Adapter) -> bytes:
    inner, name = adapter.inner.encode(), adapter.name.encode()
    if not body.startswith((b'{"error"', b'data: {"error"')):
        inner, name = b'"model":"%b"' % inner, b'"model":"%b"' % name
    return body.replace(inner, name)
