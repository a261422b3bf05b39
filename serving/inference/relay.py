# SPDX-License-Identifier: Apache-2.0
"""The sink of a request's engine call: it renders the engine's answer for the client.

A stream that needs no rendering is passed through byte for byte.
"""

import asyncio
import contextlib
import enum
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from handlers.records import Step
from serving import errors
from serving.cancellation import Cancellation, ClientLeft
from serving.engine.base import Call, Engine, Usage
from serving.errors import EngineFailed, ServingError, UserCodeFailed
from serving.inference.prepared import Rendering
from serving.inference.request import NAMED_EVENTS, SSE, InferenceRequest
from serving.lora.adapter import Adapter
from serving.protocol import FORMATTED
from serving.user_code import AT_ONCE, UserCode

log = logging.getLogger(__name__)
T = TypeVar("T")


class State(enum.Enum):
    """The state of the engine's answer."""

    WAITING = enum.auto()
    """It has not begun."""
    STREAMING = enum.auto()
    """It is a stream, whose parts go to the client one by one."""
    DONE = enum.auto()
    """The client was sent its end."""


class _Whole(NamedTuple):
    """A whole answer of the engine's."""

    body: bytes
    content_type: bytes
    headers: Sequence[tuple[bytes, bytes]]


WINDOW = 64
"""Most events that may wait for an output formatter."""


class _Formatting:
    """Passes a stream's events through an output formatter in order. The events that arrive during
    a call of the formatter go together to its next call.

    write: takes the formatted events.
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

    def takes(self) -> bool:
        """Whether add() may be called now."""
        return len(self._pending) < WINDOW

    def add(self, events: list[bytes]) -> None:
        """Queue events for the formatter."""
        self._pending += events
        if self._pending and (not self._task or self._task.done()):
            self._task = asyncio.create_task(self._run())

    async def put(self, events: list[bytes]) -> None:
        """Queue events for the formatter. Back-pressure: wait while more than WINDOW are queued."""
        self.add(events)
        while len(self._pending) > WINDOW and not self._cancellation.cause:
            self._fewer.clear()
            await self._fewer.wait()

    async def drained(self) -> None:
        """Wait until all events are written, or the request has ended because that failed."""
        if self._task:
            await asyncio.wait([self._task])

    def end(self) -> None:
        """Stop formatting."""
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
    """The sink of a request's engine call (base.Sink).

    adapter: the adapter of the call; clients never see its inner name.
    """

    def __init__(
        self, request: InferenceRequest, rendering: Rendering, adapter: Adapter | None
    ) -> None:
        self.usage = Usage()
        """The engine's usage, once it has begun."""
        # The request
        self._client = request.client
        self._writer = request.answer
        self._cancellation = request.cancellation
        # The answer
        self._framing, self._reply, self._steps, self._formatter, self._formatted = rendering
        self._names = _names(adapter)
        self._formatting = (
            _Formatting(self._formatter, self._write_formatted, self._cancellation)
            if self._formatter
            else None
        )
        """The formatter's queue for a stream."""
        self._passthrough = (
            not self._formatter and not self._reply and self._framing in (SSE, NAMED_EVENTS)
        )
        """Whether a stream is passed through byte for byte."""
        self._state = State.WAITING
        self._head: list[tuple[bytes, bytes]] | None = None
        """The headers of a stream until the first byte of its body is sent. Until then an error can
        replace them.
        """
        self._whole: _Whole | None = None
        self._error: ServingError | None = None
        """The error that the engine ended the call with."""

    async def run(self, engine: Engine, call: Call) -> None:
        """Let the engine answer. Raises ServingError if no part was sent yet, and ClientLeft."""
        try:
            await self._answered_by(engine, call)
        finally:
            if self._formatting:
                self._formatting.end()
        cause = self._cancellation.cause
        match self._state:
            case State.DONE:
                return
            case _ if isinstance(cause, ClientLeft):
                raise cause
            case _ if error := cause or self._error:
                await self._fail(error)
            case _ if self._whole:
                await self._answer(self._whole)
            case _:
                await self._fail(
                    EngineFailed("the engine ended the answer early; the server's log says why")
                )

    async def _answered_by(self, engine: Engine, call: Call) -> None:
        try:
            await engine.generate(call, self)
        except Exception:
            log.exception("the engine raised while it answered a request")
        if self._formatting:
            with contextlib.suppress(ServingError, ClientLeft), self._cancellation.raising():
                await self._formatting.drained()  # the events before the engine stopped

    # The engine's calls

    def begin(self, usage: Usage) -> None:
        self.usage = usage

    async def answer(
        self,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self._whole = _Whole(self._public(body), content_type, headers)

    def stream(self) -> None:
        self._state = State.STREAMING
        self._head = [(b"content-type", self._framing.content_type)]
        if self._formatted:
            self._head.append((FORMATTED, b"true"))

    async def event(self, event: bytes) -> None:
        if self._cancellation.cause:
            return
        if self._formatting:
            await self._formatting.put(self._events(event))
        elif body := self._rendered(self._framed, event):
            await self._send_body(body, more=True)

    async def step(self, step: Step) -> None:
        if self._cancellation.cause:
            return
        if body := self._rendered(self._stepped, step):
            await self._send_body(body, more=True)

    # The engine asks for these once. No call stands between a token and the connection that is not
    # needed.

    @property
    def takes(self) -> Callable[[], bool]:
        return self._formatting.takes if self._formatting else self._writer.takes

    @property
    def write(self) -> Callable[[bytes], None]:
        if self._formatting:
            return self._write_to_formatter
        return self._write_framed if self._names or not self._passthrough else self._writer.write

    @property
    def write_step(self) -> Callable[[Step], None]:
        return self._stepper(self._writer.write)

    async def fail(self, error: ServingError) -> None:
        if self._state is State.STREAMING and isinstance(error, EngineFailed):
            error = EngineFailed("the engine failed while it generated; the server's log says why")
        self._error = error

    async def end(self) -> None:
        if self._formatting:
            await self._formatting.drained()
        if not self._cancellation.cause:
            await self._send_body(b"", more=False)

    # The client's answer

    def _write_to_formatter(self, event: bytes) -> None:
        assert self._formatting
        self._formatting.add(self._events(event))

    def _write_framed(self, event: bytes) -> None:
        self._writer.write(self._framed(event))

    def _stepper(self, write: Callable[[bytes], object]) -> Callable[[Step], None]:
        assert self._steps
        _, before, after = self._framing
        return functools.partial(self._steps.step, before=before, after=after, write=write)

    def _rendered(self, render: Callable[[T], bytes], part: T) -> bytes:
        """Return a rendered part of the answer. A failure of our rendering cancels the request, and
        does not count as the engine's.
        """
        try:
            return render(part)
        except Exception:
            self._cancellation.cancel(errors.unforeseen())
            return b""

    def _framed(self, event: bytes) -> bytes:
        """Return the client's form of one of the engine's events."""
        event = self._public(event)
        if self._passthrough:
            return event
        return b"".join(self._framing.frame(it) for it in _data(event) if it != b"[DONE]")

    def _stepped(self, step: Step) -> bytes:
        parts: list[bytes] = []
        self._stepper(parts.append)(step)
        return parts[0]

    def _events(self, event: bytes) -> list[bytes]:
        """Return what an output formatter gets of one of the engine's events."""
        return [b"data: %b\n\n" % data for data in _data(self._public(event))]

    async def _write_formatted(self, texts: list[bytes]) -> None:
        if not (body := b"".join([self._framing.text(text) for text in texts if text])):
            return
        if self._head is None and self._writer.takes():
            self._writer.write(body)
        else:
            await self._send_body(body, more=True)

    def _public(self, part: bytes) -> bytes:
        """Return a part of an answer with the adapter's public name instead of its inner name."""
        return part.replace(*self._names) if self._names else part

    async def _fail(self, error: ServingError) -> None:
        """Send an error as an event if the stream has begun. Otherwise raise it."""
        if self._state is not State.STREAMING or self._head is not None:
            raise error
        self._client.record.error = error
        event = self._framing.frame(self._client.errors.event(error))
        end = b"data: [DONE]\n\n" if self._passthrough and self._framing is SSE else b""
        await self._send_body(event + end, more=False)

    async def _answer(self, whole: _Whole) -> None:
        body, kind, headers = whole
        if self._formatter:
            with self._cancellation.raising():
                body = await self._formatter.format_answer(body)
        elif self._reply:
            body = self._reply.whole(body)
        if self._formatter or self._reply:
            kind, headers = b"application/json", ()
        self._head = [
            *((b"content-type", kind), (b"content-length", b"%d" % len(body))),
            *headers,
        ]
        await self._send_body(body, more=False)

    async def _send_body(self, body: bytes, more: bool) -> None:
        if not more:
            self._state = State.DONE
        if self._head is not None:
            head, self._head = self._head, None
            await self._writer({"type": "http.response.start", "status": 200, "headers": head})
        await self._writer({"type": "http.response.body", "body": body, "more_body": more})


def _names(adapter: Adapter | None) -> tuple[bytes, bytes] | None:
    """Return the engine's and the client's name of an adapter, as they appear in an answer."""
    if not adapter:
        return None
    return b'"model":"%b"' % adapter.inner.encode(), b'"model":"%b"' % adapter.name.encode()


def _data(event: bytes) -> list[bytes]:
    """Return the data of the SSE events in `event`, which may have several."""
    if event.startswith(b"data: ") and event.find(b"\n\n") == len(event) - 2:
        return [event[6:-2]]  # most of them
    return [it.removeprefix(b"data: ") for it in event.split(b"\n\n") if it.startswith(b"data: ")]
