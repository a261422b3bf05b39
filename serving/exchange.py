"""One request's passage through the engine.

It is given to the engine's ASGI app in this process, and what comes back is rendered. A stream that
needs no rendering is passed on byte for byte.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable
from typing import NamedTuple, TypeVar

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from handlers.records import LEAN, EngineCall
from serving import errors
from serving.adapters import Adapter
from serving.errors import EngineFailed, NotFound, ServingError, UserCodeFailed
from serving.user_code import UserCode

log = logging.getLogger(__name__)

T = TypeVar("T")


class ClientLeft(Exception):
    """The client left before the engine had its request."""


class Framing(NamedTuple):
    """How the JSON objects of a stream are told apart."""

    content_type: bytes
    before: bytes
    after: bytes

    def frame(self, data: bytes) -> bytes:
        return self.before + data + self.after

    def text(self, text: bytes) -> bytes:
        """What a formatter wrote; it may have made a server-sent event of it already."""
        if self.before and text.startswith(b"data:"):
            return text.rstrip(b"\n") + self.after
        return self.frame(text)


JSON_LINES = Framing(b"application/jsonlines", b"", b"\n")
SSE = Framing(b"text/event-stream; charset=utf-8", b"data: ", b"\n\n")


_STEERING = (b"x-data-parallel-rank", b"x-vllm-priority")
"""Headers by which vLLM lets clients choose their rank and their place in the queue."""


class Exchange:
    """One request's passage through the engine.

    framing: how the client wants a stream told. codes: the statuses of errors.
    """

    _call: EngineCall

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, framing: Framing, codes: errors.Codes
    ) -> None:
        self._adapter: Adapter | None = None
        self._formatter: UserCode | None = None
        self._scope = scope
        self._client_receive = receive
        self._client_send = send
        self._framing = framing
        self._codes = codes
        self._untouched = False
        self._asked = False
        self._client_gone = False
        self._aborted: ServingError | None = None
        self._over: asyncio.Future[None] | None = None
        self._status = 0
        self._streaming = False
        self._head: Message | None = None  # of a stream whose first byte is not there yet
        self._finished = False
        self._parts: list[bytes] = []
        self._pending = b""

    async def wait(self, needed: Awaitable[T]) -> T:
        """Wait for something that the request needs.

        Raises what that raises, what abort() was called with, and ClientLeft; it is cancelled then.
        """
        loop = asyncio.get_running_loop()
        coming = asyncio.ensure_future(needed)
        over = self._over = loop.create_future()
        if self._aborted:
            over.set_result(None)
        leaving = loop.create_task(self._client_leaves())
        try:
            await asyncio.wait({coming, over}, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
        finally:
            coming.cancel()
            leaving.cancel()
            self._over = None
        if self._aborted:
            raise self._aborted
        raise ClientLeft

    async def run(
        self,
        engine: ASGIApp,
        call: EngineCall,
        adapter: Adapter | None = None,
        formatter: UserCode | None = None,
    ) -> None:
        """Have the engine answer. Raises ServingError where nothing has been sent yet.

        adapter: the one the call goes to, whose inner name no client sees. formatter: it has the
        last word on the answer, in the place of the call's own reply.
        """
        self._call = dataclasses.replace(call, reply=None) if formatter else call
        self._adapter = adapter
        self._formatter = formatter
        self._untouched = not formatter and call.reply is None and self._framing is SSE
        try:
            await engine(self._engine_scope(), self._receive, self._send)
        except Exception:
            # Starlette raises an unforeseen exception once more after it has answered 500 for it.
            log.exception("the engine raised while it answered a request")
        if self._client_gone or self._finished:
            return
        if self._aborted:
            await self._fail(self._aborted)
        elif self._status >= 400:
            raise self._refusal()
        elif self._streaming or not self._status:
            await self._fail(EngineFailed("the engine broke off; the server's log says why"))
        elif self._formatter:
            await self._answer(await self._formatter.whole(b"".join(self._parts)))
        elif self._call.reply:
            await self._answer(self._call.reply.whole(b"".join(self._parts)))

    def abort(self, error: ServingError) -> None:
        """Make the engine believe that the client has gone, which ends its work on the request."""
        self._aborted = error
        if self._over and not self._over.done():
            self._over.set_result(None)

    def _engine_scope(self) -> Scope:
        scope = self._scope
        changed = [LEAN, *_STEERING]
        added = [(LEAN, b"1")] if self._call.reply and self._call.lean else []
        if self._call.path != scope["path"]:
            # On /invocations every body is JSON, whatever its content type says; vLLM insists.
            changed += [b"content-type", b"content-length"]
            added.append((b"content-type", b"application/json"))
        headers = [header for header in scope["headers"] if header[0] not in changed] + added
        return {
            "type": "http",
            "http_version": scope["http_version"],
            "method": scope["method"],
            "scheme": scope["scheme"],
            "client": scope["client"],
            "server": scope["server"],
            "query_string": scope["query_string"],
            # Below version 2.4 a streaming answer listens for the client's leaving, and abort()
            # is heard; from there on Starlette would notice only when it sends.
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "path": self._call.path,
            "raw_path": self._call.path.encode(),
            "root_path": "",
            "headers": headers,
        }

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        # Every request waits here until it has ended. Futures by hand: asyncio.wait() costs more
        # than all else that is done for a request.
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        if self._aborted:
            self._over.set_result(None)
        leaving = loop.create_task(self._client_leaves())
        try:
            await self._over
        finally:
            leaving.cancel()
        return {"type": "http.disconnect"}

    async def _client_leaves(self) -> None:
        await self._client_receive()
        self._client_gone = True
        if self._over and not self._over.done():
            self._over.set_result(None)

    async def _send(self, message: Message) -> None:
        if self._adapter:
            message = _with_public_name(message, self._adapter)
        if message["type"] == "http.response.start":
            await self._start(message)
        elif self._status >= 400 or self._aborted:
            self._parts.append(message.get("body", b""))
        elif self._streaming:
            await self._stream(message.get("body", b""), message.get("more_body", False))
        elif self._passes:
            self._finished = not message.get("more_body", False)
            await self._client_send(message)
        else:
            self._parts.append(message.get("body", b""))

    async def _start(self, message: Message) -> None:
        self._status = message["status"]
        headers = dict(message["headers"])
        kind = headers.get(b"content-type", b"")
        self._streaming = self._status < 400 and kind.startswith(b"text/event-stream")
        if self._streaming:
            headers[b"content-type"] = self._framing.content_type
            self._head = {**message, "headers": list(headers.items())}
        elif self._status < 400 and self._passes and not self._aborted:
            await self._client_send(message)

    @property
    def _passes(self) -> bool:
        """Whether an answer that is not a stream goes to the client as the engine made it."""
        return self._call.reply is None and self._formatter is None

    async def _stream(self, body: bytes, more: bool) -> None:
        if body.startswith(b'data: {"error"'):
            error = self._in_band(body)
            if self._head:
                self.abort(error)
                return
            body = self._told(error)
        elif self._formatter:
            try:
                found = [
                    await self._formatter.chunk(b"data: %b\n\n" % it) for it in self._events(body)
                ]
            except UserCodeFailed as failure:
                self.abort(failure)
                return
            body = b"".join(self._framing.text(text) for text in found if text)
        elif not self._untouched:
            body = b"".join(self._render(data) for data in self._events(body))
        if body or not more:
            await self._send_body(body, more)

    def _events(self, body: bytes) -> list[bytes]:
        """The data of the server-sent events in `body`. vLLM sends each as a body of its own."""
        *whole, self._pending = (self._pending + body).split(b"\n\n")
        return [event.removeprefix(b"data: ") for event in whole if event.startswith(b"data: ")]

    def _render(self, data: bytes) -> bytes:
        if self._call.reply:
            return b"".join(self._framing.frame(found) for found in self._call.reply.event(data))
        return b"" if data == b"[DONE]" else self._framing.frame(data)

    def _in_band(self, body: bytes) -> ServingError:
        """An error of the engine's after its first byte, which it tells in the stream."""
        data = body.removeprefix(b"data: ").partition(b"\n\n")[0]
        try:
            status = int(msgspec.json.decode(data)["error"]["code"])
        except (msgspec.DecodeError, LookupError, TypeError, ValueError):
            status = 500
        error = errors.from_engine(status, data, self._call.body)
        if isinstance(error, EngineFailed):
            error = EngineFailed("the engine failed while it generated; the server's log says why")
        return error

    def _told(self, error: ServingError) -> bytes:
        self._scope["slipway.error"] = error
        return self._framing.frame(errors.body(error, self._scope["path"], self._codes))

    async def _fail(self, error: ServingError) -> None:
        """Tell an error of our own: in band where the stream has begun, else by raising it."""
        if self._head or not self._streaming:
            raise error
        end = b"data: [DONE]\n\n" if self._untouched else b""
        await self._send_body(self._told(error) + end, more=False)

    def _refusal(self) -> ServingError:
        error = errors.from_engine(self._status, b"".join(self._parts), self._call.body)
        if isinstance(error, NotFound) and str(error) == "Not Found":
            return NotFound(f"the model does not answer {self._call.path}")
        return error

    async def _answer(self, body: bytes) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._client_send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send_body(body, more=False)

    async def _send_body(self, body: bytes, more: bool) -> None:
        self._finished = not more
        if self._head:
            await self._client_send(self._head)
            self._head = None
        await self._client_send({"type": "http.response.body", "body": body, "more_body": more})


def _with_public_name(message: Message, adapter: Adapter) -> Message:
    """The engine's message with the adapter's own name in it: a body, or the head of one."""
    if message["type"] == "http.response.body":
        inner, name = adapter.inner.encode(), adapter.name.encode()
        body = message.get("body", b"")
        if not body.startswith((b'{"error"', b'data: {"error"')):
            inner, name = b'"model":"%b"' % inner, b'"model":"%b"' % name
        return {**message, "body": body.replace(inner, name)}
    headers = [header for header in message["headers"] if header[0] != b"content-length"]
    return {**message, "headers": headers}
