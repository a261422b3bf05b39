"""What a request asks for: its session, its adapter, its format; and that it is admitted.

Requests for the engine pass through here and nowhere else. exchange.py has the rest of their way.
"""

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from handlers import embeddings, lmi, openai, payloads
from handlers.records import EngineCall, FormatError, read
from lmi_config.options import Settings
from serving import errors, guard
from serving.adapters import Adapter, Adapters
from serving.cache_salt import salted, with_text
from serving.engine import Engine
from serving.errors import (
    BadRequest,
    NotFound,
    NotReady,
    ServingError,
    TimedOut,
    TooLarge,
)
from serving.exchange import JSON_LINES, SSE, Exchange, Framing
from serving.handling import Handling
from serving.lifecycle import Lifecycle
from serving.media import inlined
from serving.sessions import Sessions
from serving.user_code import UserCode

Parse = Callable[[bytes], EngineCall]


class Front:
    """What stands before the engine. `engine` is set when there is one."""

    def __init__(self, lifecycle: Lifecycle, settings: Settings) -> None:
        self.lifecycle = lifecycle
        self._settings = settings
        self.model_names = settings.model_names
        self._tenant = (settings.cache_salt_header or "").lower().encode()
        self.engine: Engine | None = None
        self._sessions = settings.enable_stateful_sessions and Sessions(
            Path(settings.sessions_path), settings.sessions_expiration, settings.max_sessions
        )
        self._properties = settings.properties
        self._under_way: set[_UnderWay] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> Engine:
        """The engine. Raises NotReady where there is none, or none any more."""
        self.lifecycle.require_ready()
        assert self.engine is not None
        return self.engine

    def require_adapters(self) -> Adapters:
        """The registry. Raises BadRequest where there is none."""
        if not self.ready.adapters:
            raise BadRequest("LoRA is not enabled. Set OPTION_ENABLE_LORA=true.")
        return self.ready.adapters

    async def body(self, scope: Scope, receive: Receive) -> bytes:
        """A request's whole body. Raises TooLarge where it is larger than the operator allows."""
        return await _read_body(scope, receive, self._settings.max_request_size)

    def require_model(self, scope: Scope) -> None:
        """Raise NotFound where the path names a model, and it is another one."""
        model = scope["path_params"].get("model", self.model_names[0])
        if model not in self.model_names:
            raise NotFound(f"model {model!r:.140} is not here; it is {self.model_names[0]}")

    async def openai(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one of the engine's own paths."""
        self.lifecycle.require_ready()
        body = await self.body(scope, receive)
        asked = self._one_adapter(body, scope)
        exchange = Exchange(scope, receive, self._in_session(scope, send), SSE)
        await self._exchange(exchange, scope, body, openai.on(scope["path"]), asked)

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer /v1/models: the engine's models, and adapters by their own names."""
        engine = self.ready
        parts: list[bytes] = []

        async def keep(message: Message) -> None:
            parts.append(message.get("body", b""))

        await engine.app(scope, receive, keep)
        found = msgspec.json.decode(b"".join(parts))
        base = [model for model in found["data"] if not model.get("parent")]
        found["data"] = base + [
            {**base[0], "id": it.name, "root": it.src, "parent": base[0]["id"]}
            for it in (engine.adapters.listed() if engine.adapters else ())
        ]
        await JSONResponse(found)(scope, receive, send)

    async def kv_event_sources(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer /kv_event_sources as the engine does: where each rank's KV events are."""
        await self.ready.app(scope, receive, send)

    async def parameters(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer /execution-parameters: how batch transform should send its records.

        SageMaker allows 100 MB for all that is under way together.
        """
        transforms = min(self.ready.concurrency, self._settings.job_queue_size, 100)
        found = {
            "MaxConcurrentTransforms": transforms,
            "BatchStrategy": "MULTI_RECORD",
            "MaxPayloadInMB": min(100 // transforms, self._settings.max_request_size // 10**6) or 1,
        }
        await JSONResponse(found)(scope, receive, send)

    async def invocations(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer /invocations: the body says which format it is."""
        engine = self.ready
        self.require_model(scope)
        body = await self.body(scope, receive)
        if self._sessions and b"requestType" in body and (command := _command(body)):
            await self._session(command, scope)(scope, receive, send)
            return
        send = self._in_session(scope, send)
        if engine.code and "handle" in engine.code.functions:
            handling = Handling(engine.code, self._properties, scope, receive, send)
            with self._admitted(handling):
                if await handling.answered(body):
                    return
        with _understood():
            requests = payloads.requests(body, _header(scope, b"content-type").decode("latin-1"))
        if len(requests) > 1:
            await self._lines(requests, scope, receive, send)
            return
        (body,) = requests
        asked = self._adapter(body, scope)
        if isinstance(asked, list):
            with _understood():
                parts = lmi.split(body, len(asked))
            answers = await self._together(parts, asked, scope, receive)
            found = b"[" + b",".join(answers) + b"]"
            await Response(found, media_type="application/json")(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, self._framing(scope))
        await self._exchange(exchange, scope, body, self._parse, asked)

    def _framing(self, scope: Scope) -> Framing:
        accept = _header(scope, b"accept")
        if accept in (b"", b"*/*"):
            accept = self._settings.default_accept.encode()
        return SSE if b"text/event-stream" in accept else JSON_LINES

    async def _lines(
        self, requests: list[bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer several requests, a line for each in their order; an error is a line too."""
        headers = [(b"content-type", JSON_LINES.content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        answers: deque[asyncio.Task[bytes]] = deque()

        async def tell_first() -> None:
            part = await answers.popleft() + b"\n"
            await send({"type": "http.response.body", "body": part, "more_body": True})

        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                answers.append(tasks.create_task(self._line(request, scope, receive)))
                if len(answers) >= self.ready.concurrency:
                    await tell_first()
            while answers:
                await tell_first()
        await send({"type": "http.response.body", "body": b""})

    async def _line(self, request: bytes, scope: Scope, receive: Receive) -> bytes:
        try:
            with _understood():
                keys = read(_read_keys, request)
            if bytes(keys.stream) not in (b"", b"null", b"false"):
                raise BadRequest("one of several lines cannot be streamed", "stream")
            asked = self._one_adapter(request, scope)
            return await self._whole(request, asked, scope, receive)
        except ServingError as error:
            failure = error
        except Exception:
            failure = errors.unforeseen()
        return errors.body(failure, scope["path"])

    async def _together(
        self, requests: list[bytes], adapters: list[str], scope: Scope, receive: Receive
    ) -> list[bytes]:
        """The answers to several requests at once. Raises the first error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [
                    tasks.create_task(self._whole(request, adapter, scope, receive))
                    for request, adapter in zip(requests, adapters, strict=True)
                ]
        except* ServingError as group:
            failure = group.exceptions[0]
        else:
            return [answer.result() for answer in answers]
        raise failure

    async def _whole(
        self, request: bytes, asked: str | None, scope: Scope, receive: Receive
    ) -> bytes:
        """The body of the answer to a request that is not streamed."""
        parts = bytearray()

        async def keep(message: Message) -> None:
            parts.extend(message.get("body", b""))

        exchange = Exchange(scope, receive, keep, JSON_LINES)
        await self._exchange(exchange, scope, request, self._parse, asked)
        return bytes(parts)

    async def _exchange(
        self, exchange: Exchange, scope: Scope, body: bytes, parse: Parse, asked: str | None
    ) -> None:
        """asked: as _adapter() has it."""
        engine = self.ready  # asked again: reading the body took its time
        with self._admitted(exchange):
            async with self._using(asked) as adapter:
                code = [it for it in (adapter.code if adapter else None, engine.code) if it]
                if formatter := _having(code, "input"):
                    body = await formatter.input(body)
                with _understood():
                    call = parse(body)
                call = await self._prepared(call, scope, asked, adapter)
                await exchange.run(engine.app, call, adapter, _having(code, "output"))

    @contextlib.asynccontextmanager
    async def _using(self, asked: str | None) -> AsyncIterator[Adapter | None]:
        if asked:
            async with self.require_adapters().using(asked) as adapter:
                yield adapter
        else:
            yield None

    async def _prepared(
        self, call: EngineCall, scope: Scope, asked: str | None, adapter: Adapter | None
    ) -> EngineCall:
        """The call with what only the server knows: the adapter's inner name, salts, media."""
        settings = self._settings
        guard.check(call.body, settings.trust_request_internals)
        allowed = settings.allowed_media_domains
        body = await inlined(call.body, allowed, settings.max_request_size)
        tenant = _header(scope, self._tenant).decode("latin-1") if self._tenant else None
        body = salted(body, tenant, adapter.inner if adapter else None)
        if adapter or asked == "":
            body = with_text(body, "model", adapter.inner if adapter else self.model_names[0])
        return dataclasses.replace(call, body=body)

    def _parse(self, body: bytes) -> EngineCall:
        """Read a request of any format. Raises FormatError."""
        keys = read(_read_keys, body)
        given = [key for key in payloads.KEYS if bytes(getattr(keys, key)) not in (b"", b"null")]
        match given[:1]:  # LMI asks for the keys in this order
            case ["prompt"]:
                return openai.on("/v1/completions")(body)
            case ["inputs"] if self.ready.embeds:
                return embeddings.parse(body, self._settings.normalize)
            case ["inputs"]:
                return lmi.parse(body)
            case ["messages"]:
                return openai.on("/v1/chat/completions")(body)
        raise FormatError("the body should have one of the keys prompt, inputs or messages")

    def _session(self, command: str, scope: Scope) -> Response:
        """Answer SageMaker's calls that begin and end a session."""
        assert self._sessions
        if command == "NEW_SESSION":
            session, told = self._sessions.create()
            answer, headers = f"Session {session} created", dict.fromkeys(_NEW_SESSION, told)
        elif command == "CLOSE":
            session = _header(scope, _SESSION).decode("latin-1")
            if not session:
                raise BadRequest("X-Amzn-SageMaker-Session-Id should name the session to close")
            self._sessions.close(session)
            answer, headers = f"Session {session} closed", {_CLOSED_SESSION: session}
        else:
            raise BadRequest(
                f"requestType={command!r:.100}; it should be NEW_SESSION or CLOSE", "requestType"
            )
        return JSONResponse({"result": answer}, headers=headers)

    def _in_session(self, scope: Scope, send: Send) -> Send:
        """Check the session that a request names. Returns what tells the client of a new one."""
        named = _header(scope, _SESSION).decode("latin-1")
        if not named or not self._sessions:
            return send
        if named != "NEW_SESSION":
            self._sessions.use(named)
            return send
        _, told = self._sessions.create()
        more = [(name.lower().encode(), told.encode()) for name in _NEW_SESSION]

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        return telling

    def _adapter(self, body: bytes, scope: Scope) -> str | list[str] | None:
        """The adapter that a request asks for: its name, "" for the base model by name, one of
        these for each of its inputs, or None where it says nothing of adapters.

        The header comes before the body's `adapters`, and that before `model`. Raises BadRequest
        for an adapter that is not here, and NotFound for an adapter's inner name: the model is
        never taken in an adapter's place, and no version for another.
        """
        named: str | list[str] | None = _header(scope, _ADAPTER).decode("latin-1") or None
        # vLLM reads bodies with Python's json, which takes more for JSON than JSON is. What this
        # reader refuses goes no further, or the engine would see names and salts that we did not.
        with _understood():
            names = read(_read_names, body)
        if not named:
            named = names.adapters
            adapters = self.ready.adapters
            if named is None and names.model and adapters:
                if "@" in names.model:
                    raise NotFound(f"The model {names.model!r:.140} does not exist.")
                return names.model if names.model in adapters else None
        if named is None:
            return None
        for name in named if isinstance(named, list) else [named]:
            if name and name not in self.require_adapters():
                raise BadRequest(f"adapter {name!r:.140} is not registered", "adapters")
        return named

    def _one_adapter(self, body: bytes, scope: Scope) -> str | None:
        """As _adapter() has it, for a request with one answer. Raises BadRequest for a list."""
        asked = self._adapter(body, scope)
        if isinstance(asked, list):
            raise BadRequest("adapters should be a string", "adapters")
        return asked

    @contextlib.contextmanager
    def _admitted(self, exchange: "_UnderWay") -> Iterator[None]:
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
_SESSION = b"x-amzn-sagemaker-session-id"
# LMI and SageMaker's guide have the first name, AWS's library for containers the second.
_NEW_SESSION = ("X-Amzn-SageMaker-Session-Id", "X-Amzn-SageMaker-New-Session-Id")
_CLOSED_SESSION = "X-Amzn-SageMaker-Closed-Session-Id"


class _UnderWay(Protocol):
    def abort(self, error: ServingError) -> None: ...


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
    requestType: msgspec.Raw = msgspec.Raw()  # noqa: N815 - LMI's name
    stream: msgspec.Raw = msgspec.Raw()


_read_keys = msgspec.json.Decoder(_Keys).decode


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Raise what a format does not allow as a BadRequest."""
    try:
        yield
    except FormatError as error:
        raise BadRequest(str(error), error.parameter) from None


def _command(body: bytes) -> str | None:
    """The requestType of a body that asks for nothing else."""
    try:
        keys = _read_keys(body)
        if keys.prompt or keys.inputs or keys.messages:
            return None
        return msgspec.json.decode(keys.requestType, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _having(code: list[UserCode], function: str) -> UserCode | None:
    """The first that has the function: an adapter's own comes before the model's."""
    return next((it for it in code if function in it.functions), None)


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
