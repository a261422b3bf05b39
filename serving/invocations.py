"""What a request asks for: its session, its adapter, its format; and that it is admitted.

Requests for the engine pass through here and nowhere else. exchange.py has the rest of their way.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from handlers import embeddings, lmi, openai, payloads
from handlers.records import EngineCall, FormatError, read
from lmi_config.options import Settings
from serving import bodies, errors, guard
from serving.adapters import Adapter, Adapters
from serving.bodies import Asked, header
from serving.cache_salt import salted, with_text
from serving.engine import Engine
from serving.error_rates import ErrorRates
from serving.errors import (
    BadRequest,
    NotFound,
    NotReady,
    ServingError,
    TimedOut,
)
from serving.exchange import JSON_LINES, SSE, ClientLeft, Exchange, Framing
from serving.handling import Handling
from serving.lifecycle import Lifecycle
from serving.media import inlined
from serving.retries import Retries, Run
from serving.sessions import Sessions
from serving.turns import QUEUED, Turns
from serving.user_code import UserCode

Parse = Callable[[bytes], EngineCall]

AHEAD = 0.25
"""Sequences that the engine is given beside those it works on, as a share of these."""


class Front:
    """What stands before the engine. `engine` is set when there is one."""

    def __init__(self, lifecycle: Lifecycle, settings: Settings) -> None:
        self.lifecycle = lifecycle
        self._settings = settings
        self.model_names = settings.model_names
        self._tenant = (settings.cache_salt_header or "").lower().encode()
        self.engine: Engine | None = None
        self.codes = errors.codes(settings)
        self._turns = Turns(self._share, settings.job_queue_size)
        QUEUED.set_function(self._queued)
        self._retries = Retries(self._turns.require_place)
        self.error_rates = ErrorRates(settings)
        self._sessions = settings.enable_stateful_sessions and Sessions(
            Path(settings.sessions_path), settings.sessions_expiration, settings.max_sessions
        )
        self._properties = settings.properties
        self._under_way: set[_UnderWay] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def _queued(self) -> int:
        adapters = self.engine and self.engine.adapters
        return self._turns.waiting + (adapters.waiting if adapters else 0)

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
        return await bodies.whole(scope, receive, self._settings.max_request_size)

    def require_model(self, scope: Scope) -> None:
        """Raise NotFound where the path names a model, and it is another one."""
        model = scope["path_params"].get("model", self.model_names[0])
        if model not in self.model_names:
            raise NotFound(f"model {model!r:.140} is not here; it is {self.model_names[0]}")

    async def openai(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one of the engine's own paths."""
        self.lifecycle.require_ready()
        body = await self.body(scope, receive)

        async def run(receive: Receive, send: Send) -> None:
            asked = self._asked_once(body, scope)
            send = self._in_session(scope, send)
            exchange = Exchange(scope, receive, send, SSE, self.codes)
            await self._exchange(exchange, scope, body, openai.on(scope["path"]), asked)

        await self._once(run, scope, body, receive, send)

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
        if self._sessions and b"requestType" in body and (command := bodies.command(body)):
            await self._session(command, scope)(scope, receive, send)
            return
        if engine.code and "handle" in engine.code.functions:
            self._turns.require_place(len(self._under_way) - self._turns.going)
            send = self._in_session(scope, send)
            handling = Handling(engine.code, self._properties, scope, receive, send, self.codes)
            with self._admitted(handling, self._settings.stream_timeout):
                if await handling.answered(body):
                    return
            await self._invoked(body, scope, receive, send)
            return

        async def run(receive: Receive, send: Send) -> None:
            await self._invoked(body, scope, receive, self._in_session(scope, send))

        await self._once(run, scope, body, receive, send)

    async def _invoked(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        with _understood():
            requests = payloads.requests(body, header(scope, b"content-type").decode("latin-1"))
        if len(requests) > 1:
            await self._lines(requests, scope, receive, send)
            return
        (body,) = requests
        asked = self._asked(body, scope)
        if isinstance(asked, list):
            with _understood():
                parts = lmi.split(body, len(asked))
            answers = await self._together(parts, asked, scope, receive)
            found = b"[" + b",".join(answers) + b"]"
            await Response(found, media_type="application/json")(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, self._framing(scope), self.codes)
        await self._exchange(exchange, scope, body, self._parse, asked)

    async def _once(
        self, run: Run, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        """Have a request answered, or share the answer to an equal one that is under way."""
        if key := self._retry_key(scope, body):
            await self._retries.answer(key, run, receive, send)
        else:
            await run(receive, send)

    def _retry_key(self, scope: Scope, body: bytes) -> Hashable:
        """What a retry of a request has in common with it, or None where none would be known.

        A stream is not shared: what its client has had already is not kept for another.
        """
        found = header(scope, _INFERENCE_ID)
        if not 0 < len(found) <= 64 or header(scope, _SESSION) == b"NEW_SESSION":
            return None
        if bodies.streamed(body):
            return None
        names = (_ADAPTER, _SESSION, b"accept", b"content-type", self._tenant)
        headers = tuple(header(scope, name) for name in names if name)
        return found, scope["path"], headers, hashlib.sha256(body).digest()

    def _framing(self, scope: Scope) -> Framing:
        accept = header(scope, b"accept")
        if accept in (b"", b"*/*"):
            accept = self._settings.default_accept.encode()
        return SSE if b"text/event-stream" in accept else JSON_LINES

    async def _lines(
        self, requests: list[bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer several requests, a line for each in their order; an error is a line too.

        Only one line waits for the engine at a time. It is not refused: the first one may be.
        """
        self._turns.require_place(self._turns.waiting)
        at_once = self.ready.concurrency
        headers = [(b"content-type", JSON_LINES.content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        answers: deque[asyncio.Task[bytes]] = deque()

        async def tell_first() -> None:
            part = await answers.popleft() + b"\n"
            await send({"type": "http.response.body", "body": part, "more_body": True})

        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                going = asyncio.Event()
                answers.append(tasks.create_task(self._line(request, scope, receive, going)))
                await going.wait()
                if len(answers) >= at_once:
                    await tell_first()
            while answers:
                await tell_first()
        await send({"type": "http.response.body", "body": b""})

    async def _line(
        self, request: bytes, scope: Scope, receive: Receive, going: asyncio.Event
    ) -> bytes:
        try:
            asked = self._asked_once(request, scope)
            if asked.stream:
                raise BadRequest("one of several lines cannot be streamed", "stream")
            return await self._whole(request, asked, scope, receive, going)
        except ServingError as error:
            failure = error
        except Exception:
            failure = errors.unforeseen()
        finally:
            going.set()
        return errors.body(failure, scope["path"], self.codes)

    async def _together(
        self, requests: list[bytes], adapters: list[str], scope: Scope, receive: Receive
    ) -> list[bytes]:
        """The answers to several requests at once. Raises the first error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [
                    tasks.create_task(
                        self._whole(
                            request, bodies.read_said(request).asked(adapter), scope, receive
                        )
                    )
                    for request, adapter in zip(requests, adapters, strict=True)
                ]
        except* ServingError as group:
            failure = group.exceptions[0]
        else:
            return [answer.result() for answer in answers]
        raise failure

    async def _whole(
        self,
        request: bytes,
        asked: Asked,
        scope: Scope,
        receive: Receive,
        going: asyncio.Event | None = None,
    ) -> bytes:
        """The body of the answer to a request that is not streamed."""
        parts = bytearray()

        async def keep(message: Message) -> None:
            parts.extend(message.get("body", b""))

        exchange = Exchange(scope, receive, keep, JSON_LINES, self.codes)
        await self._exchange(exchange, scope, request, self._parse, asked, going)
        return bytes(parts)

    async def _exchange(
        self,
        exchange: Exchange,
        scope: Scope,
        body: bytes,
        parse: Parse,
        asked: Asked,
        going: asyncio.Event | None = None,
    ) -> None:
        """going: set when the request's turn has come; a request that has it is not refused."""
        engine = self.ready  # asked again: reading the body took its time
        settings = self._settings
        timeout = settings.stream_timeout if asked.stream else settings.whole_timeout
        if going is None:  # one with an adapter may have to wait for its place as well
            places = len(self._under_way) - self._turns.going if asked.adapter else 0
            self._turns.require_place(max(places, self._turns.waiting))
        with contextlib.suppress(ClientLeft), self._admitted(exchange, timeout):
            async with self._using(engine, asked.adapter, exchange) as adapter:
                code = [it for it in (adapter.code if adapter else None, engine.code) if it]
                if formatter := _having(code, "input"):
                    body = await formatter.input(body)
                with _understood():
                    call = parse(body)
                call = await self._prepared(call, scope, asked.adapter, adapter)
                turn = self._turns.ask(asked.adapter or "", asked.sequences, timeout, going is None)
                try:
                    if turn.came:
                        await exchange.wait(turn.came)
                        if engine.failure:
                            raise NotReady("the engine failed while the request waited for it")
                    if going:
                        going.set()
                    await exchange.run(engine.app, call, adapter, _having(code, "output"))
                finally:
                    self._turns.end(turn)

    @contextlib.asynccontextmanager
    async def _using(
        self, engine: Engine, name: str | None, exchange: Exchange
    ) -> AsyncIterator[Adapter | None]:
        if name:
            assert engine.adapters  # else _asked() would have refused the name
            async with engine.adapters.using(name, exchange.wait) as adapter:
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
        tenant = header(scope, self._tenant).decode("latin-1") if self._tenant else None
        body = salted(body, tenant, adapter.inner if adapter else None)
        if adapter:
            scope["slipway.adapter"] = adapter.name  # for the request's line in the log
        if adapter or asked == "":
            body = with_text(body, "model", adapter.inner if adapter else self.model_names[0])
        return dataclasses.replace(call, body=body)

    def _parse(self, body: bytes) -> EngineCall:
        """Read a request of any format. Raises FormatError."""
        said = read(bodies.read_said, body)
        given = [key for key in payloads.KEYS if bodies.given(getattr(said, key))]
        match given[:1]:  # LMI asks for the keys in this order
            case ["prompt"]:
                return openai.on("/v1/completions")(body)
            case ["inputs"] if self.engine and self.engine.embeds:
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
            session = header(scope, _SESSION).decode("latin-1")
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
        named = header(scope, _SESSION).decode("latin-1")
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

    def _asked(self, body: bytes, scope: Scope) -> Asked | list[str]:
        """What a request asks for; only the adapters where it names a list, one for each input.

        The header comes before the body's `adapters`, and that before `model`. Raises BadRequest
        for an adapter that is not here, and NotFound for an adapter's inner name: the model is
        never taken in an adapter's place, and no version for another.
        """
        named: str | list[str] | None = header(scope, _ADAPTER).decode("latin-1") or None
        # vLLM reads bodies with Python's json, which takes more for JSON than JSON is. What this
        # reader refuses goes no further, or the engine would see names and salts that we did not.
        with _understood():
            said = read(bodies.read_said, body)
        if not named:
            named = said.adapters
            adapters = self.ready.adapters
            if named is None and said.model and adapters:
                if "@" in said.model:
                    raise NotFound(f"The model {said.model!r:.140} does not exist.")
                return said.asked(said.model if said.model in adapters else None)
        if named is None:
            return said.asked(None)
        for name in named if isinstance(named, list) else [named]:
            if name and name not in self.require_adapters():
                raise BadRequest(f"adapter {name!r:.140} is not registered", "adapters")
        return named if isinstance(named, list) else said.asked(named)

    def _asked_once(self, body: bytes, scope: Scope) -> Asked:
        """As _asked() has it, for a request with one answer. Raises BadRequest for a list."""
        asked = self._asked(body, scope)
        if isinstance(asked, list):
            raise BadRequest("adapters should be a string", "adapters")
        return asked

    def _share(self) -> int:
        """Sequences that the engine may be asked for at once.

        Some are there before it can work on them, so that it never waits for us. Where it is to
        choose by priority, all are.
        """
        assert self.engine
        concurrency = self.engine.concurrency
        if self._settings.engine.get("scheduling_policy") == "priority":
            return concurrency + self._settings.job_queue_size
        return concurrency + math.ceil(concurrency * AHEAD)

    @contextlib.contextmanager
    def _admitted(self, exchange: "_UnderWay", timeout: int | None) -> Iterator[None]:
        """Count a request as under way, for at most `timeout` seconds."""
        self._under_way.add(exchange)
        self._idle.clear()
        timer = None
        if timeout:
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
_INFERENCE_ID = b"x-amzn-sagemaker-inference-id"
# LMI and SageMaker's guide have the first name, AWS's library for containers the second.
_NEW_SESSION = ("X-Amzn-SageMaker-Session-Id", "X-Amzn-SageMaker-New-Session-Id")
_CLOSED_SESSION = "X-Amzn-SageMaker-Closed-Session-Id"


class _UnderWay(Protocol):
    def abort(self, error: ServingError) -> None: ...


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Raise what a format does not allow as a BadRequest."""
    try:
        yield
    except FormatError as error:
        raise BadRequest(str(error), error.parameter) from None


def _having(code: list[UserCode], function: str) -> UserCode | None:
    """The first that has the function: an adapter's own comes before the model's."""
    return next((it for it in code if function in it.functions), None)
