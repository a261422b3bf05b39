# SPDX-License-Identifier: Apache-2.0
"""The pipeline of every request to the engine. No request reaches the engine past it."""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Send

from handlers import lmi, multipart
from handlers.multipart import Form
from handlers.openai import PROMPT_ALONE
from handlers.records import TOO_DEEP, EngineCall, FormatError
from lmi_config.options.declared import Settings
from lmi_config.plan import kv_tiers
from serving import protocol
from serving.access.limits import Limiter
from serving.aio import in_thread
from serving.cache_hints.hints import Hints
from serving.cache_hints.intent import NO_INTENT, READ_HERE, CacheIntent
from serving.engine.base import HANDED_OVER, Call, Engine, Usage
from serving.engine.none import MESSAGE as NO_ENGINE
from serving.engine.speech import sound
from serving.errors import BadRequest, NotFound, NotReady, Shed
from serving.http.bodies import Bodies, header
from serving.inference import limits, media
from serving.inference.admission import Admission
from serving.inference.coalescing import Coalescer, shared_key
from serving.inference.fields import (
    RequestFields,
    as_structured_outputs,
    bad_request,
    fields,
    fields_of,
    formats,
    guided,
    with_structured_outputs,
)
from serving.inference.queue import QUEUED, SHED, FairQueue, Ticket
from serving.inference.relay import Relay
from serving.inference.request import NAMED_EVENTS, ClientRequest, HttpCall, InferenceRequest
from serving.kv_cache import salt as kv_salt
from serving.kv_cache import transfer as kv_transfer
from serving.kv_cache.salt import Tenants
from serving.lora.adapter import Adapter
from serving.lora.registry import AdapterRegistry
from serving.user_code import UserCode

AHEAD = 0.25
"""Further sequences that the engine gets ahead, as a share of its concurrency."""

OPERATIONS = {
    protocol.CHAT_COMPLETIONS: "chat",
    protocol.RESPONSES: "chat",
    protocol.MESSAGES: "chat",
    protocol.COMPLETIONS: "text_completion",
    protocol.EMBEDDINGS: "embeddings",
}
"""Path of the engine → the operation's name in OpenTelemetry's conventions for generative AI. The
name of other operations is the last part of their path.
"""
LAST = 2**31 - 1
"""vLLM's priority of background requests: vLLM runs low numbers first."""

_NO_ADAPTER: contextlib.nullcontext[Adapter | None] = contextlib.nullcontext(None)


class Pipeline:
    """Answers requests, once there is an engine."""

    def __init__(
        self,
        engine: Engine,
        adapters: AdapterRegistry | None,
        code: UserCode | None,
        settings: Settings,
        limiter: Limiter,
    ) -> None:
        self.engine = engine
        self.adapters = adapters
        self.code = code
        """The model's model.py."""
        self._settings = settings
        self.limiter = limiter
        self._model_name = settings.model_names[0]
        self.model_id = settings.model_id
        """The operator's name of the model, wherever its files are."""
        self._queue = FairQueue(self._capacity)
        self.admission = Admission(
            self._queue, settings.job_queue_size, self._waiting_for_their_adapter
        )
        self.bodies = Bodies(settings.max_request_size)
        self._coalescer = Coalescer(self.admission.require_room)
        self._tenants = Tenants(settings.cache_salt_header)
        self._hints = Hints(settings.session_key)
        QUEUED.set_function(lambda: self.waiting)

    @property
    def waiting(self) -> int:
        """Requests that wait for the engine."""
        return self._queue.waiting + self._waiting_for_their_adapter()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """By tenant and adapter: how many requests wait for the engine, and how many it runs."""
        names = ("tenant", "adapter", "waiting", "in_flight")
        return [
            dict(zip(names, (*lane.rpartition("\0")[::2], *counts), strict=True))
            for lane, counts in self._queue.lanes.items()
        ]

    @property
    def preloads(self) -> bool:
        """Whether adapters are loaded at their registration, unless the request says otherwise."""
        return self._settings.lmi_preload

    @property
    def custom_handler(self) -> UserCode | None:
        """The model's model.py, if it answers requests itself, or None."""
        return self.code if self.code and "handle" in self.code.functions else None

    @property
    def code_failing(self) -> str | None:
        """The reason why the model's model.py cannot answer now, or None."""
        return self.code.failure if self.code else None

    def tenant(self, client: ClientRequest) -> str | None:
        """Return a request's tenant, or None without tenants. Raises BadRequest."""
        return self._tenants.tenant(client.record.caller, client.scope["headers"])

    def require_model(self, client: ClientRequest) -> None:
        """Raise NotPermitted if the client's key does not allow the base model."""
        client.record.caller.require_model(self._settings.model_names)

    @contextlib.asynccontextmanager
    async def received(self, call: HttpCall) -> AsyncIterator[ClientRequest]:
        """Admit a client's request at its head, and yield it once its body has arrived.

        Raises Overloaded and the other errors of the limits and of the body.
        """
        call.record.generates = self._generates(call)
        with self.admission.admitted() as admitted:
            admitted.end_after(self._settings.stream_timeout)  # the longest timeout
            share = self.bodies.share()
            taken = None
            try:
                with admitted.raising():
                    taken = await self.limiter.take(call.record.caller)
                    call.record.headers += taken.headers
                    hand_over = call.record.caller.hand_over
                    front = hand_over.size if hand_over else 0
                    body = await self.bodies.whole(call.scope, call.receive, share, front)
                transfer = None
                if hand_over:
                    transfer, body = kv_transfer.split(body, hand_over)
                admitted.go_on()
                yield ClientRequest(
                    *(call.scope, call.send, admitted, call.record, call.errors, body),
                    writer=call.writer,
                    transfer=transfer,
                )
            finally:
                share.free()
                if taken:
                    self.limiter.give_back(taken)

    def _generates(self, call: HttpCall) -> bool:
        """Whether a request generates text for its client."""
        path, engine = call.scope["path"], self.engine
        return (
            not (engine.embeds or engine.classifies)
            and path not in protocol.NOT_GENERATED
            and call.record.caller.phase != "prefill"
        )

    async def answer_once(
        self,
        client: ClientRequest,
        receive: Receive,
        answer: Callable[[ClientRequest], Awaitable[None]],
    ) -> None:
        """Answer a request, or send the answer of an equal request in flight."""
        admitted, key = client.admitted, None
        prefill = client.record.caller.phase == "prefill"  # its answer is not shared
        if not prefill and 0 < len(header(client.scope, protocol.INFERENCE_ID)) <= 64:
            with admitted.raising():
                key = await shared_key(client, self._tenants)
        if not key:
            with admitted.watching(receive):
                await answer(client)
            return

        async def shared(receive: Receive, send: Send) -> None:
            with self.admission.again(admitted) as again, again.watching(receive):
                again.go_on()
                await answer(client.again(again, send))

        admitted.go()  # the shared call has its own place, and retries have a separate limit
        await self._coalescer.answer(key, shared, receive, client.send)

    async def form(self, client: ClientRequest, path: str) -> Form:
        """Parse a client's form with a file. The form's fields become the request's fields.

        Raises NotFound if the model is not a speech-to-text model, and BadRequest.
        """
        if not self.engine.hears:
            raise NotFound(f"the model does not answer {path}")
        kind = header(client.scope, b"content-type").decode("latin-1")
        try:
            with client.admitted.raising():
                found = await in_thread(multipart.parse, client.body, kind)
        except FormatError as error:
            raise bad_request(error) from None
        client.known = fields(found.json())
        return found

    async def run(self, request: InferenceRequest) -> None:
        """Let the engine answer a request when its turn comes. Raises ServingError and ClientLeft.

        If the request ends early, its waits and the engine's work are cancelled.
        """
        if self.code and self.code.alone:
            raise NotFound(NO_ENGINE)
        if not request.adapter:
            self.require_model(request.client)
        self._limit_time(request)
        async with self._adapter(request) as adapter:
            with request.cancellation.raising():
                request = await self._formatted(request, adapter)
                try:
                    form, call, sequences = await self._engine_call(request, adapter)
                except RecursionError:  # nested parts are read again, with less of the stack left
                    raise BadRequest(TOO_DEEP) from None
                if call.path in protocol.AGENTS_PATHS:
                    request = dataclasses.replace(request, framing=NAMED_EVENTS)
                ticket = await self._turn(request, sequences)
            relay = self._relay(request, form, adapter)
            try:
                if self.engine.failure:
                    raise NotReady("the engine failed while the request waited for it")
                if request.background:
                    request.cancellation.end_after_now(self._settings.stream_timeout)
                request.begun()
                await self._answered(request, call, adapter, relay)
            finally:
                self._queue.leave(ticket)
                self._account(request, adapter, relay.usage)

    def _relay(self, request: InferenceRequest, form: EngineCall, adapter: Adapter | None) -> Relay:
        """Return the sink that renders the engine's answer in the request's format."""
        prefill = request.client.record.caller.phase == "prefill"
        formatter = None if prefill else self._code(adapter, "output")
        formatted = bool(formatter or self._code(adapter, "input"))
        return Relay(request, form, adapter, formatter, formatted=formatted)

    async def _answered(
        self, request: InferenceRequest, call: Call, adapter: Adapter | None, relay: Relay
    ) -> None:
        """Let the engine answer, within a span of the request's trace."""
        call = dataclasses.replace(call, steps=relay.takes_steps)
        trace = request.client.record.trace
        if not trace:
            await relay.run(self.engine, call)
            return
        operation = OPERATIONS.get(call.path) or call.path.rpartition("/")[2]
        model = adapter.name if adapter else self._model_name
        with trace.call(f"{operation} {model}") as span:
            span.note(
                gen_ai__operation__name=operation,
                gen_ai__provider__name="vllm",
                gen_ai__request__model=model,
            )
            if context := span.headers():
                call = dataclasses.replace(call, trace=_texts(context))
            try:
                await relay.run(self.engine, call)
            finally:
                tokens = relay.usage.tokens
                span.note(
                    gen_ai__usage__input_tokens=tokens.prompt,
                    gen_ai__usage__output_tokens=tokens.generated,
                    gen_ai__usage__cache_read__input_tokens=tokens.cached,
                )

    def _account(self, request: InferenceRequest, adapter: Adapter | None, usage: Usage) -> None:
        """Charge a call's tokens to its caller, even if the answer failed.

        A prefill for another server is charged by that server, or by the router. Only a prefill
        that was never answered is charged here.
        """
        client = request.client
        if client.record.caller.phase == "prefill" and client.record.status:
            return
        for pace in [source() for source in usage.paces]:
            if pace:
                client.record.paced(*pace)
        tokens = usage.tokens
        caller = client.record.caller
        tenant = caller.shown_tenant if caller.tenant else self.tenant(client) or ""
        client.record.used(tenant, adapter.name if adapter else "", *tokens)
        self.limiter.charge(client.record.caller, tokens.prompt + tokens.generated)

    def _limit_time(self, request: InferenceRequest) -> None:
        request.cancellation.end_after(self._timeout(request))

    def _timeout(self, request: InferenceRequest) -> int | None:
        """Return the request's timeout in seconds, or None without one."""
        settings = self._settings
        if request.background:
            return None
        return settings.stream_timeout if request.fields.streamed else settings.whole_timeout

    def _adapter(
        self, request: InferenceRequest
    ) -> contextlib.AbstractAsyncContextManager[Adapter | None]:
        """Return a context manager that keeps the request's adapter loaded in the engine."""
        return self._loaded_adapter(request) if request.adapter else _NO_ADAPTER

    @contextlib.asynccontextmanager
    async def _loaded_adapter(self, request: InferenceRequest) -> AsyncIterator[Adapter]:
        adapters, name = self.adapters, request.adapter
        assert adapters  # without a registry adapters_named() refuses the name
        assert name
        if request.refusable:
            self.admission.require_room(self._waiting_for_their_adapter())
        async with contextlib.AsyncExitStack() as stack:
            with request.client.record.part("adapter") as span, request.cancellation.raising():
                if span:
                    known = adapters.get(name)
                    span.note(slipway__adapter=name, slipway__adapter__loaded=known.loaded)
                adapter = await stack.enter_async_context(adapters.using(name))
            yield adapter

    def _code(self, adapter: Adapter | None, function: str) -> UserCode | None:
        """Return the model.py with the function: the adapter's, or else the model's, or None."""
        for code in (adapter.code if adapter else None, self.code):
            if code and function in code.functions:
                return code
        return None

    async def _formatted(
        self, request: InferenceRequest, adapter: Adapter | None
    ) -> InferenceRequest:
        """Return the request after the input formatter, if there is one. Limits and checks apply to
        the formatted request, not to the client's. Raises BadRequest and UserCodeFailed.
        """
        if request.form or request.client.scope["path"] in protocol.UNFORMATTED_PATHS:
            self._require_no_formatter(adapter)
        formatter = self._code(adapter, "input")
        if not formatter:
            if request.raw:
                raise BadRequest(
                    f"the body is {request.content_type:.100}, which only an @input_formatter in "
                    "a model.py reads; send JSON, text/plain, text/csv or application/jsonlines"
                )
            return request
        formatted = await formatter.format_request(request.body, request.content_type)
        request = request.rewritten(formatted)
        self._limit_time(request)
        return request

    def _require_no_formatter(self, adapter: Adapter | None) -> None:
        """Raise BadRequest if a model.py formats requests or answers.

        Formatters only know the formats of completions and chats.
        """
        if self._code(adapter, "input") or self._code(adapter, "output"):
            raise BadRequest(
                "this model's model.py formats requests and answers, which it can do for "
                "completions, chats and /invocations with inputs only"
            )

    async def _engine_call(
        self, request: InferenceRequest, adapter: Adapter | None
    ) -> tuple[EngineCall, Call, int]:
        """Parse a request. Returns its format's call, the engine's call, and the number of
        sequences. In the engine's call the server's values replace the client's. Raises BadRequest
        and NotFound.
        """
        settings = self._settings
        form, found, constraint = self._parsed(request, adapter)
        path, scope = form.path, request.client.scope
        self._check(request, path, found)
        inner = adapter.inner if adapter else None
        salt = kv_salt.digest(self.tenant(request.client), found.salt(), inner)
        nameless = salt and path in protocol.AGENTS_PATHS
        sequences = found.sequences(path)
        if request.form:
            sequences *= await self._windows(request.form)
            body = request.form.values()
        else:
            body = await self._with_media(form, salt)
        if constraint:
            body = with_structured_outputs(body, constraint)
        if not READ_HERE.isdisjoint(body):
            body = {key: it for key, it in body.items() if key not in READ_HERE}
        intent = self._intent(request, path, found)
        caller = request.client.record.caller
        if adapter:
            request.client.record.adapter = adapter.name
        elif request.adapter == "" or (
            # Anthropic's format requires a model, and requests to SageMaker have none.
            not request.parse and path == protocol.MESSAGES and not found.model
        ):
            body["model"] = self._model_name
        else:
            self._require_known(found.model)
        transfer: Mapping[str, object] | None = None
        if caller.phase == "prefill":
            body |= _prompt_alone(path)
            if kv_tiers.transfers(settings):
                transfer = kv_transfer.offered(sequences)
            form = dataclasses.replace(form, reply=None, steps=None)
        elif caller.phase == "decode" and path in PROMPT_ALONE:
            given = request.client.take_transfer() if sequences == 1 else None
            transfer = given or {HANDED_OVER: True}
        call = Call(
            path,
            body,
            len(request.body),
            request.cancellation,
            header(scope, protocol.REQUEST_ID).decode("latin-1"),
            file=request.form.file if request.form else None,
            is_json=self._is_json(request, path),
            adapter=inner,
            salt=None if path in protocol.TOKENIZER_PATHS else salt,
            name_medium=functools.partial(kv_salt.scoped_name, salt) if nameless else None,
            priority=self._priority(request),
            transfer=transfer,
            trace=_texts(it for it in scope["headers"] if it[0] in protocol.TRACE_CONTEXT),
            session=intent.session or None,
            marked=intent.marked > 0,
        )
        return form, call, sequences

    def _intent(self, request: InferenceRequest, path: str, found: RequestFields) -> CacheIntent:
        """Return what the request says of its conversation's KV cache. found: of the engine's call,
        which has the `session_id` of LMI's parameters.
        """
        if path in protocol.NOT_GENERATED:
            return NO_INTENT
        client, keys = request.client, request.fields
        if found.session_id:
            keys = msgspec.structs.replace(keys, session_id=found.session_id)
        low = request.background or client.record.caller.sheddable
        headers, tenant = client.scope["headers"], self.tenant(client)
        intent = self._hints.of(headers, keys, request.body, tenant, low=low)
        answered = client.record.headers
        if header(client.scope, protocol.CACHE) and protocol.CACHE not in dict(answered):
            answered.append((protocol.CACHE, intent.told.encode()))
        return intent

    def _parsed(
        self, request: InferenceRequest, adapter: Adapter | None
    ) -> tuple[EngineCall, RequestFields, str | None]:
        """Parse a request. Returns its format's call, the fields of the engine's call, and the
        GUIDED key of its constraint, which vLLM now calls `structured_outputs`. Raises BadRequest.
        """
        request.fields.require_few_prompts()
        parse = request.parse or request.fields.parser(
            formats(self.engine.embeds, self._settings.normalize, self.engine.classifies),
            anthropic=bool(header(request.client.scope, protocol.ANTHROPIC_VERSION)),
        )
        try:
            form = parse(request.body)
        except FormatError as error:
            raise bad_request(error) from None
        if form.ignored:
            request.client.record.ignored(form.ignored, lmi.KNOWN)
        found = request.fields if isinstance(form.body, bytes) else fields_of(form.body)
        if form.path in protocol.AGENTS_PATHS:
            self._require_no_formatter(adapter)
        constraint = None
        if form.path in (protocol.COMPLETIONS, protocol.CHAT_COMPLETIONS):
            constraint = guided(found)
        if constraint:
            found = as_structured_outputs(found, constraint)
        return form, found, constraint

    async def _with_media(self, form: EngineCall, salt: str | None) -> dict[str, Any]:
        """Return the engine's request as values, with prepared media. Raises BadRequest."""
        sent = form.body
        body = _values(sent) if isinstance(sent, bytes) else sent
        if not isinstance(sent, bytes) or media.may_have_media(sent):
            settings, pairs = self._settings, form.path in protocol.PAIRS_PATHS
            allowed = settings.allowed_media_domains
            await media.prepare(body, allowed, settings.max_request_size, salt, pairs)
        return body

    def _priority(self, request: InferenceRequest) -> int | None:
        """Return the request's priority in the engine's queue; None if its body decides."""
        if self._settings.engine.get("scheduling_policy") != "priority":
            return None
        caller = request.client.record.caller
        if request.background:
            return LAST
        return caller.priority if caller.name or caller.priority else None

    def _is_json(self, request: InferenceRequest, path: str) -> bool:
        """Whether the body is JSON. On /invocations every body is JSON, with any content type."""
        scope = request.client.scope
        kind = header(scope, b"content-type").partition(b";")[0].strip().lower()
        return path != scope["path"] or kind == b"application/json"

    def _require_known(self, model: str | None) -> None:
        """Raise NotFound unless `model` is one of the base model's names. The engine may know other
        names, which neither the registry nor the client's key has checked.
        """
        if model and model not in self._settings.model_names:
            names = ", ".join(self._settings.model_names)
            raise NotFound(
                f"The model `{model:.140}` does not exist. The model here is called {names:.300}: "
                "send one of these or none. OPTION_ENDPOINT_NAME adds the name of an endpoint"
            )

    async def _windows(self, form: Form) -> int:
        """Return the number of sequences of a form's audio: one for each window of the model.

        Raises BadRequest if the file is not audio, or too long.
        """
        try:
            lasts = await in_thread(sound.seconds, form.file, self._settings.max_audio_seconds)
        except sound.SoundError as error:
            raise BadRequest(str(error), "file") from None
        return max(math.ceil(lasts / sound.WINDOW_S), 1)

    def _check(self, request: InferenceRequest, path: str, found: RequestFields) -> None:
        """Raise BadRequest for a call that the engine must not get."""
        limits.check(found, self._settings.trust_request_internals)
        if path == protocol.RESPONSES:
            limits.check_items(found)
            limits.check_kept(found)
        elif path in protocol.PAIRS_PATHS:
            limits.check_pairs(found)
        elif path in protocol.TOKENIZER_PATHS:
            limits.check_tokenized(request.body)

    async def _turn(self, request: InferenceRequest, sequences: int) -> Ticket:
        """Wait for the request's turn in the fair queue. Returns its ticket.

        Raises Overloaded if the turn would come too late, and Shed if the request may not wait.
        """
        within = None
        if request.refusable:
            if request.client.record.caller.sheddable:
                self._require_room()
            within = request.cancellation.time_left(self._timeout(request))
        tenant = request.client.record.caller.shown_tenant
        lane = f"{tenant}\0{request.adapter or ''}" if tenant else request.adapter or ""
        with request.client.record.part("queue"):
            return await self._queue.turn(lane, sequences, within, request.background)

    def _require_room(self) -> None:
        """Raise Shed if the engine runs as many sequences as it can."""
        if self._queue.sequences >= self.engine.concurrency:
            SHED.inc()
            raise Shed

    def _waiting_for_their_adapter(self) -> int:
        """Return the number of requests that wait for an adapter's slot. They delay no others."""
        adapters = self.adapters
        return adapters.waiting if adapters else 0

    def _capacity(self) -> int:
        """Return the most sequences that the engine may have at once.

        A few requests are queued ahead in the engine, so that it never idles. If the engine
        schedules by priority, it gets all requests.
        """
        concurrency = self.engine.concurrency
        if self._settings.engine.get("scheduling_policy") == "priority":
            return concurrency + self._settings.job_queue_size
        return concurrency + math.ceil(concurrency * AHEAD)


def _prompt_alone(path: str) -> Mapping[str, object]:
    """Return the keys that make the engine compute only a call's prompt. Raises BadRequest for
    paths that allow no such call.
    """
    if path not in PROMPT_ALONE:
        raise BadRequest(f"prompts on {path} are not computed for other servers")
    return PROMPT_ALONE[path]


def _values(body: bytes) -> dict[str, Any]:
    """Read a request that was checked (RequestFields) as vLLM would: the last of two equal keys
    counts. Raises BadRequest if an unchecked part of it is not JSON.
    """
    try:
        found: dict[str, Any] = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    return found


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in headers}
