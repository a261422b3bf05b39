"""A request's way to the engine and back.

Requests for the engine pass through here and nowhere else: they are admitted, counted, given to the
engine's ASGI app in this process, and what comes back is rendered. A stream that needs no rendering
is passed on byte for byte.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from handlers import lmi, openai
from handlers.records import EngineCall, FormatError
from lmi_config.options import Settings
from serving import errors
from serving.adapters import Adapter, Adapters
from serving.cache_salt import salted, with_text
from serving.errors import (
    BadRequest,
    EngineFailed,
    NotFound,
    NotReady,
    ServingError,
    TimedOut,
    TooLarge,
)
from serving.lifecycle import Lifecycle

log = logging.getLogger(__name__)


class Front:
    """What stands before the engine. `engine` is set when there is one."""

    def __init__(self, lifecycle: Lifecycle, settings: Settings) -> None:
        self.lifecycle = lifecycle
        self._settings = settings
        self.model_names = settings.model_names
        self._tenant = (settings.cache_salt_header or "").lower().encode()
        self.engine: ASGIApp | None = None
        self.adapters: Adapters | None = None
        self._under_way: set[Exchange] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def require_adapters(self) -> Adapters:
        """The registry. Raises BadRequest where there is none."""
        if not self.adapters:
            raise BadRequest("LoRA is not enabled. Set OPTION_ENABLE_LORA=true.")
        return self.adapters

    async def openai(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one of the engine's own paths."""
        self.lifecycle.require_ready()
        body = await _read_body(scope, receive, self._settings.max_request_size)
        asked = self._adapter(body, scope)
        if isinstance(asked, list):
            raise BadRequest("adapters should be a string", "adapters")
        call = EngineCall(scope["path"], body)
        await self._exchange(call, asked, scope, receive, send, SSE)

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer /v1/models: the engine's models, and adapters by their own names."""
        if not self.adapters:
            await self.openai(scope, receive, send)
            return
        self.lifecycle.require_ready()
        assert self.engine is not None
        parts: list[bytes] = []

        async def keep(message: Message) -> None:
            parts.append(message.get("body", b""))

        await self.engine(scope, receive, keep)
        found = msgspec.json.decode(b"".join(parts))
        base = [model for model in found["data"] if not model.get("parent")]
        found["data"] = base + [
            {**base[0], "id": it.name, "root": it.src, "parent": base[0]["id"]}
            for it in self.adapters.listed()
        ]
        response = Response(msgspec.json.encode(found), media_type="application/json")
        await response(scope, receive, send)

    async def invocations(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer /invocations: the body says which format it is."""
        self.lifecycle.require_ready()
        body = await _read_body(scope, receive, self._settings.max_request_size)
        asked = self._adapter(body, scope)
        try:
            if isinstance(asked, list):
                calls = [lmi.parse(part) for part in lmi.split(body, len(asked))]
                await self._together(calls, asked, scope, receive, send)
                return
            call = _parse(body)
        except FormatError as error:
            raise BadRequest(str(error), error.parameter) from None
        framing = SSE if b"text/event-stream" in _header(scope, b"accept") else JSON_LINES
        await self._exchange(call, asked, scope, receive, send, framing)

    async def _together(
        self,
        calls: list[EngineCall],
        adapters: list[str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answer several calls at once with the list of their answers, or with the first error."""
        answers = [bytearray() for _ in calls]

        def keep(answer: bytearray) -> Send:
            async def add(message: Message) -> None:
                answer.extend(message.get("body", b""))

            return add

        try:
            async with asyncio.TaskGroup() as tasks:
                for call, adapter, answer in zip(calls, adapters, answers, strict=True):
                    exchange = self._exchange(
                        call, adapter, scope, receive, keep(answer), JSON_LINES
                    )
                    tasks.create_task(exchange)
        except* ServingError as group:
            failure = group.exceptions[0]
        else:
            body = b"[" + b",".join(answers) + b"]"
            await Response(body, media_type="application/json")(scope, receive, send)
            return
        raise failure

    async def _exchange(
        self,
        call: EngineCall,
        asked: str | None,
        scope: Scope,
        receive: Receive,
        send: Send,
        framing: "Framing",
    ) -> None:
        """asked: as _adapter() has it."""
        self.lifecycle.require_ready()  # again: reading the body took its time
        assert self.engine is not None
        exchange = Exchange(scope, receive, send, framing)
        with self._admitted(exchange):
            if asked and self.adapters:
                async with self.adapters.using(asked) as adapter:
                    call = self._salted(call, scope, adapter.inner)
                    await exchange.run(self.engine, _for_model(call, adapter.inner), adapter)
            else:
                if asked == "":
                    call = _for_model(call, self.model_names[0])
                await exchange.run(self.engine, self._salted(call, scope, None))

    def _salted(self, call: EngineCall, scope: Scope, adapter: str | None) -> EngineCall:
        if not call.body:
            return call
        tenant = _header(scope, self._tenant).decode("latin-1") if self._tenant else None
        return dataclasses.replace(call, body=salted(call.body, tenant, adapter))

    def _adapter(self, body: bytes, scope: Scope) -> str | list[str] | None:
        """The adapter that a request asks for: its name, "" for the base model by name, one of
        these for each of its inputs, or None where it says nothing of adapters.

        The header comes before the body's `adapters`, and that before `model`. Raises BadRequest
        for an adapter that is not here, and NotFound for an adapter's inner name: the model is
        never taken in an adapter's place, and no version for another.
        """
        named: str | list[str] | None = _header(scope, _ADAPTER).decode("latin-1") or None
        if not named:
            try:
                names = _read_names(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                if "$.adapters" in str(error):
                    raise BadRequest(str(error), "adapters") from None
                return None  # who reads the whole of it says what is wrong with it
            named = names.adapters
            if named is None and names.model and self.adapters:
                if "@" in names.model:
                    raise NotFound(f"The model {names.model!r:.140} does not exist.")
                return names.model if names.model in self.adapters else None
        if named is None:
            return None
        for name in named if isinstance(named, list) else [named]:
            if name and name not in self.require_adapters():
                raise BadRequest(f"adapter {name!r:.140} is not registered", "adapters")
        return named

    @contextlib.contextmanager
    def _admitted(self, exchange: "Exchange") -> Iterator[None]:
        """Count a request as under way. Raises NotReady where too many are."""
        limit = self._settings.job_queue_size
        if len(self._under_way) >= limit:
            raise NotReady(f"{limit} requests are under way; SERVING_JOB_QUEUE_SIZE sets the limit")
        self._under_way.add(exchange)
        self._idle.clear()
        timer = None
        if timeout := self._settings.predict_timeout:
            error = TimedOut(timeout)
            timer = asyncio.get_running_loop().call_later(timeout, exchange.abort, error)
        try:
            yield
        finally:
            if timer:
                timer.cancel()
            self._under_way.discard(exchange)
            if not self._under_way:
                self._idle.set()

    async def drained(self, deadline: float) -> bool:
        """Wait until no request is under way, for at most `deadline` seconds; say whether so."""
        try:
            await asyncio.wait_for(self._idle.wait(), deadline)
        except TimeoutError:
            return False
        return True

    def abort(self) -> int:
        """End every request under way with an error, and say how many there were."""
        for exchange in self._under_way:
            exchange.abort(NotReady("the server is stopping"))
        return len(self._under_way)


_ADAPTER = b"x-amzn-sagemaker-adapter-identifier"


class _Names(msgspec.Struct):
    """What of a body can name an adapter."""

    adapters: str | list[str] | None = None
    model: str | None = None


_read_names = msgspec.json.Decoder(_Names).decode


class _Keys(msgspec.Struct):
    """The keys that tell one format from another. The rest of the body is skipped, not read."""

    prompt: msgspec.Raw = msgspec.Raw()
    inputs: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


_read_keys = msgspec.json.Decoder(_Keys).decode

# LMI asks for the keys in this order.
_FORMATS: tuple[tuple[str, Callable[[bytes], EngineCall]], ...] = (
    ("prompt", openai.completions),
    ("inputs", lmi.parse),
    ("messages", openai.chat),
)


def _parse(body: bytes) -> EngineCall:
    try:
        keys = _read_keys(body)
        for key, parse in _FORMATS:
            if bytes(getattr(keys, key)) not in (b"", b"null"):
                return parse(body)
    except msgspec.ValidationError:
        raise FormatError("the body should be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise FormatError("the body is nested too deeply") from None
    raise FormatError("the body should have one of the keys prompt, inputs or messages")


class Framing(NamedTuple):
    """How the JSON objects of a stream are told apart."""

    content_type: bytes
    before: bytes
    after: bytes

    def frame(self, data: bytes) -> bytes:
        return self.before + data + self.after


JSON_LINES = Framing(b"application/jsonlines", b"", b"\n")
SSE = Framing(b"text/event-stream; charset=utf-8", b"data: ", b"\n\n")


class Exchange:
    """One request's passage through the engine.

    framing: how the client wants a stream told.
    """

    _call: EngineCall

    def __init__(self, scope: Scope, receive: Receive, send: Send, framing: Framing) -> None:
        self._adapter: Adapter | None = None
        self._scope = scope
        self._client_receive = receive
        self._client_send = send
        self._framing = framing
        self._untouched = False
        self._asked = False
        self._client_gone = False
        self._aborted: ServingError | None = None
        self._over: asyncio.Future[None] | None = None
        self._status = 0
        self._streaming = False
        self._finished = False
        self._parts: list[bytes] = []
        self._pending = b""

    async def run(self, engine: ASGIApp, call: EngineCall, adapter: Adapter | None = None) -> None:
        """Have the engine answer. Raises ServingError where nothing has been sent yet.

        adapter: the one the call goes to, whose inner name no client sees.
        """
        self._call = call
        self._adapter = adapter
        self._untouched = call.reply is None and self._framing is SSE
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
        elif self._call.reply:
            await self._answer(self._call.reply.whole(b"".join(self._parts)))

    def abort(self, error: ServingError) -> None:
        """Make the engine believe that the client has gone, which ends its work on the request."""
        self._aborted = error
        if self._over and not self._over.done():
            self._over.set_result(None)

    def _engine_scope(self) -> Scope:
        scope = self._scope
        headers = scope["headers"]
        if self._call.path != scope["path"]:
            # On /invocations every body is JSON, whatever its content type says; vLLM insists.
            changed = (b"content-type", b"content-length")
            headers = [header for header in headers if header[0] not in changed]
            headers.append((b"content-type", b"application/json"))
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
        elif self._call.reply is None:
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
            await self._client_send({**message, "headers": list(headers.items())})
        elif self._status < 400 and self._call.reply is None and not self._aborted:
            await self._client_send(message)

    async def _stream(self, body: bytes, more: bool) -> None:
        if body.startswith(b'data: {"error"'):
            body = self._in_band(body)
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

    def _in_band(self, body: bytes) -> bytes:
        """An error of the engine's after its first byte, told in the stream."""
        data = body.removeprefix(b"data: ").partition(b"\n\n")[0]
        try:
            status = int(msgspec.json.decode(data)["error"]["code"])
        except (msgspec.DecodeError, LookupError, TypeError, ValueError):
            status = 500
        error = errors.from_engine(status, data, self._call.body)
        if isinstance(error, EngineFailed):
            error = EngineFailed("the engine failed while it generated; the server's log says why")
        return self._told(error)

    def _told(self, error: ServingError) -> bytes:
        path = self._scope["path"]
        return self._framing.frame(msgspec.json.encode(errors.body(error, path)))

    async def _fail(self, error: ServingError) -> None:
        """Tell an error of our own: in band where the stream has begun, else by raising it."""
        if not self._streaming:
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
        await self._client_send({"type": "http.response.body", "body": body, "more_body": more})


def _for_model(call: EngineCall, name: str) -> EngineCall:
    return dataclasses.replace(call, body=with_text(call.body, "model", name))


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


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body. Raises TooLarge when it has more than `limit` bytes.

    A body that is too large but not absurdly so is read to its end all the same: a client that is
    still sending would not see the answer.
    """
    length = _header(scope, b"content-length")
    announced = int(length) if length.isdigit() else 0
    if announced > 4 * limit:
        raise TooLarge(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the client left before it had sent the whole body")
        size += len(message.get("body", b""))
        if size <= limit:
            parts.append(message.get("body", b""))
        elif size > 4 * limit:
            raise TooLarge(limit)
        if not message.get("more_body", False):
            break
    if size > limit:
        raise TooLarge(limit)
    return parts[0] if len(parts) == 1 else b"".join(parts)
