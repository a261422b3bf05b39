# SPDX-License-Identifier: Apache-2.0
"""The way of every request for the engine, in its order. Nothing reaches the engine on another."""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

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
"""Sequences that the engine is given beside those it works on, as a share of these."""

OPERATIONS = {
    protocol.CHAT_COMPLETIONS: "chat",
    protocol.RESPONSES: "chat",
    protocol.MESSAGES: "chat",
    protocol.COMPLETIONS: "text_completion",
    protocol.EMBEDDINGS: "embeddings",
}
"""Path of the engine → what it does, in the words of OpenTelemetry's conventions for generative AI;
others are called by their paths' last part.
"""
LAST = 2**31 - 1
"""vLLM's priority of what is in the background: the lowest come first."""

_NO_ADAPTER: contextlib.nullcontext[Adapter | None] = contextlib.nullcontext(None)


class Pipeline:
    """What answers requests, once there is an engine."""

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
        """The model's own model.py."""
        self._settings = settings
        self.limiter = limiter
        self._model_name = settings.model_names[0]
        self.model_id = settings.model_id
        """The model as the operator names it, wherever its files are."""
        self._queue = FairQueue(self._capacity)
        self.admission = Admission(
            self._queue, settings.job_queue_size, self._waiting_for_their_adapter
        )
        self.bodies = Bodies(settings.max_request_size)
        self._coalescer = Coalescer(self.admission.require_room)
        self._tenants = Tenants(settings.cache_salt_header)
        QUEUED.set_function(lambda: self.waiting)

    @property
    def waiting(self) -> int:
        """Requests that wait for the engine."""
        return self._queue.waiting + self._waiting_for_their_adapter()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """By tenant and adapter: how many requests wait for the engine, and how many it has."""
        names = ("tenant", "adapter", "waiting", "in_flight")
        return [
            dict(zip(names, (*lane.rpartition("\0")[::2], *counts), strict=True))
            for lane, counts in self._queue.lanes.items()
        ]

    @property
    def preloads(self) -> bool:
        """Whether adapters are loaded when they are registered, where nothing else is asked."""
        return self._settings.lmi_preload

    @property
    def custom_handler(self) -> UserCode | None:
        """The model's own model.py, where it answers requests itself."""
        return self.code if self.code and "handle" in self.code.functions else None

    @property
    def code_failing(self) -> str | None:
        """Why the model's own model.py can answer nothing now, where that is so."""
        return self.code.failure if self.code else None

    def tenant(self, client: ClientRequest) -> str | None:
        """Whose a request is, None where tenants are not distinguished. Raises BadRequest."""
        return self._tenants.tenant(client.record.caller, client.scope["headers"])

    def require_model(self, client: ClientRequest) -> None:
        """Raise NotPermitted where the client's key does not allow the base model."""
        client.record.caller.require_model(self._settings.model_names)

    @contextlib.asynccontextmanager
    async def received(self, call: HttpCall) -> AsyncIterator[ClientRequest]:
        """A client's request, which counts from its head on, once its body is there."""
        call.record.generates = self._generates(call)
        with self.admission.admitted() as admitted:
            admitted.end_after(self._settings.stream_timeout)  # which is the longest
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
        """Whether a request is for text, which its client waits for."""
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
        """Have a request answered, or share the answer to an equal one that is under way."""
        admitted, key = client.admitted, None
        prefill = client.record.caller.phase == "prefill"  # nobody else's answer
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

        admitted.go()  # what is shared has a place of its own, and retries have a limit of theirs
        await self._coalescer.answer(key, shared, receive, client.send)

    async def form(self, client: ClientRequest, path: str) -> Form:
        """A client's form with a file, whose fields are the request's. Raises NotFound where the
        model does not hear, and BadRequest.
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
        """Have the engine answer a request in its turn. Raises ServingError and ClientLeft.

        What the request waits for is cancelled where it ends early, and so is the engine's work.
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
                except RecursionError:  # its parts are read anew, with less of the stack left
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
        """What passes the engine's answer on, in the form that the request's format has for it."""
        prefill = request.client.record.caller.phase == "prefill"
        formatter = None if prefill else self._code(adapter, "output")
        formatted = bool(formatter or self._code(adapter, "input"))
        return Relay(request, form, adapter, formatter, formatted=formatted)

    async def _answered(
        self, request: InferenceRequest, call: Call, adapter: Adapter | None, relay: Relay
    ) -> None:
        """Have the engine answer, which is a part of the request's trace."""
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
        """Charge a call's tokens to whoever has sent it, whatever became of the answer. Those of a
        prompt that is computed for another server are charged there, or by the router; but for what
        was computed of one that nobody waited for.
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
        """Seconds that the request may take, after which it is ended."""
        settings = self._settings
        if request.background:
            return None
        return settings.stream_timeout if request.fields.streamed else settings.whole_timeout

    def _adapter(
        self, request: InferenceRequest
    ) -> contextlib.AbstractAsyncContextManager[Adapter | None]:
        """The request's adapter, which the engine has and keeps for so long."""
        return self._loaded_adapter(request) if request.adapter else _NO_ADAPTER

    @contextlib.asynccontextmanager
    async def _loaded_adapter(self, request: InferenceRequest) -> AsyncIterator[Adapter]:
        adapters, name = self.adapters, request.adapter
        assert adapters  # else adapters_named() would have refused the name
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
        """What has the function: an adapter's own model.py comes before the model's."""
        for code in (adapter.code if adapter else None, self.code):
            if code and function in code.functions:
                return code
        return None

    async def _formatted(
        self, request: InferenceRequest, adapter: Adapter | None
    ) -> InferenceRequest:
        """The request as the input formatter has it, where there is one: what the engine gets
        counts, not what the client sent.
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
        """Raise BadRequest where a model.py has the last word on requests or answers.

        Its formatters know the shapes of completions and chats.
        """
        if self._code(adapter, "input") or self._code(adapter, "output"):
            raise BadRequest(
                "this model's model.py formats requests and answers, which it can do for "
                "completions, chats and /invocations with inputs only"
            )

    async def _engine_call(
        self, request: InferenceRequest, adapter: Adapter | None
    ) -> tuple[EngineCall, Call, int]:
        """The request as its format has read it; the call that the engine gets, with what the
        server decides in the place of the client's; and how many sequences it is. Raises
        BadRequest.
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
        caller = request.client.record.caller
        if adapter:
            request.client.record.adapter = adapter.name
        elif request.adapter == "" or (
            # It has to be there in Anthropic's shape, and is not where SageMaker is asked.
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
            session=header(scope, protocol.VLLM_SESSION_ID).decode("latin-1") or None,
        )
        return form, call, sequences

    def _parsed(
        self, request: InferenceRequest, adapter: Adapter | None
    ) -> tuple[EngineCall, RequestFields, str | None]:
        """The request as its format reads it, what the engine's call says, and the key by which it
        has a constraint that vLLM has under another. Raises BadRequest.
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
        """The engine's request as values, with media that it may have. Raises BadRequest."""
        sent = form.body
        body = _values(sent) if isinstance(sent, bytes) else sent
        if not isinstance(sent, bytes) or media.may_have_media(sent):
            settings, pairs = self._settings, form.path in protocol.PAIRS_PATHS
            allowed = settings.allowed_media_domains
            await media.prepare(body, allowed, settings.max_request_size, salt, pairs)
        return body

    def _priority(self, request: InferenceRequest) -> int | None:
        """The request's place in the engine's queue; None where its body decides."""
        if self._settings.engine.get("scheduling_policy") != "priority":
            return None
        caller = request.client.record.caller
        if request.background:
            return LAST
        return caller.priority if caller.name or caller.priority else None

    def _is_json(self, request: InferenceRequest, path: str) -> bool:
        """Whether the body has to be taken for JSON. On /invocations every body is JSON, whatever
        its content type says.
        """
        scope = request.client.scope
        kind = header(scope, b"content-type").partition(b";")[0].strip().lower()
        return path != scope["path"] or kind == b"application/json"

    def _require_known(self, model: str | None) -> None:
        """Raise NotFound for a name that is none of the base model's. The engine may know others,
        which no registry has checked, and which no key allows.
        """
        if model and model not in self._settings.model_names:
            names = ", ".join(self._settings.model_names)
            raise NotFound(
                f"The model `{model:.140}` does not exist. The model here is called {names:.300}: "
                "send one of these or none. OPTION_ENDPOINT_NAME adds the name of an endpoint"
            )

    async def _windows(self, form: Form) -> int:
        """How many sequences a form's sound is: the model hears so much of it at once. Raises
        BadRequest for what is no sound, or too long.
        """
        try:
            lasts = await in_thread(sound.seconds, form.file, self._settings.max_audio_seconds)
        except sound.SoundError as error:
            raise BadRequest(str(error), "file") from None
        return max(math.ceil(lasts / sound.WINDOW_S), 1)

    def _check(self, request: InferenceRequest, path: str, found: RequestFields) -> None:
        """Raise BadRequest for a call that the engine may not get."""
        limits.check(found, self._settings.trust_request_internals)
        if path == protocol.RESPONSES:
            limits.check_items(found)
            limits.check_kept(found)
        elif path in protocol.PAIRS_PATHS:
            limits.check_pairs(found)
        elif path in protocol.TOKENIZER_PATHS:
            limits.check_tokenized(request.body)
        limits.check_headers(request.client.scope["headers"])

    async def _turn(self, request: InferenceRequest, sequences: int) -> Ticket:
        """The request's turn at the engine. Raises Overloaded where it would come too late, Shed
        where it is not to wait for one.
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
        """Raise Shed where the engine works on as much as it can."""
        if self._queue.sequences >= self.engine.concurrency:
            SHED.inc()
            raise Shed

    def _waiting_for_their_adapter(self) -> int:
        """Requests that wait for room for their adapter, which keep no others out."""
        adapters = self.adapters
        return adapters.waiting if adapters else 0

    def _capacity(self) -> int:
        """Sequences that the engine may be asked for at once.

        Some are there before it can work on them, so that it never waits for us. Where it is to
        choose by priority, all are.
        """
        concurrency = self.engine.concurrency
        if self._settings.engine.get("scheduling_policy") == "priority":
            return concurrency + self._settings.job_queue_size
        return concurrency + math.ceil(concurrency * AHEAD)


def _prompt_alone(path: str) -> Mapping[str, object]:
    """The keys with which the engine computes a call's prompt alone. Raises BadRequest where it
    would have to do more.
    """
    if path not in PROMPT_ALONE:
        raise BadRequest(f"prompts on {path} are not computed for other servers")
    return PROMPT_ALONE[path]


def _values(body: bytes) -> dict[str, Any]:
    """A request that was checked (RequestFields), as vLLM would read it: of two equal keys the last
    one counts. Raises BadRequest for names and values that were not looked at, and are no JSON.
    """
    try:
        found: dict[str, Any] = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    return found


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in headers}
