# SPDX-License-Identifier: Apache-2.0
"""The way of every request for the engine, in its order. Nothing reaches the engine on another."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
from serving.engine.base import HANDED_OVER, USAGE, Engine, Usage
from serving.engine.none import MESSAGE as NO_ENGINE
from serving.engine.requests.names import NAME
from serving.engine.speech import sound
from serving.errors import BadRequest, NotFound, NotReady, Shed
from serving.http.bodies import WRITER, Bodies, header
from serving.inference import limits, media
from serving.inference.admission import Admission
from serving.inference.coalescing import Coalescer, shared_key
from serving.inference.fields import (
    RequestFields,
    bad_request,
    fields,
    formats,
    with_keys,
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
                    writer=call.scope.get(WRITER),
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

        What the request waits for is cancelled where it ends early. The engine sees to that itself
        (CANCELLATION), or hears of it as of a client that leaves.
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
                    call, sequences = await self._engine_call(request, adapter)
                except RecursionError:  # its parts are read anew, with less of the stack left
                    raise BadRequest(TOO_DEEP) from None
                if call.path in protocol.AGENTS_PATHS:
                    request = dataclasses.replace(request, framing=NAMED_EVENTS)
                ticket = await self._turn(request, sequences)
            usage = Usage()
            before = USAGE.set(usage)
            try:
                if self.engine.failure:
                    raise NotReady("the engine failed while the request waited for it")
                if request.background:
                    request.cancellation.end_after_now(self._settings.stream_timeout)
                request.begun()
                await self._answered(request, call, adapter, usage)
            finally:
                USAGE.reset(before)
                self._queue.leave(ticket)
                self._account(request, adapter, usage)

    async def _answered(
        self, request: InferenceRequest, call: EngineCall, adapter: Adapter | None, usage: Usage
    ) -> None:
        """Have the engine answer, which is a part of the request's trace."""
        record = request.client.record
        formatter = None if record.caller.phase == "prefill" else self._code(adapter, "output")
        formatted = bool(formatter or self._code(adapter, "input"))
        trace = record.trace
        if not trace:
            await Relay(request, call, adapter, formatter, formatted=formatted).run(self.engine.app)
            return
        operation = OPERATIONS.get(call.path) or call.path.rpartition("/")[2]
        model = adapter.name if adapter else self._model_name
        with trace.call(f"{operation} {model}") as span:
            span.note(
                gen_ai__operation__name=operation,
                gen_ai__provider__name="vllm",
                gen_ai__request__model=model,
            )
            context = span.headers()
            relay = Relay(request, call, adapter, formatter, context, formatted=formatted)
            try:
                await relay.run(self.engine.app)
            finally:
                span.note(
                    gen_ai__usage__input_tokens=usage.tokens.prompt,
                    gen_ai__usage__output_tokens=usage.tokens.generated,
                    gen_ai__usage__cache_read__input_tokens=usage.tokens.cached,
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
    ) -> tuple[EngineCall, int]:
        """The request as the engine takes it, with what only the server knows: the adapter's inner
        name, salts, media; and how many sequences it is.
        """
        settings = self._settings
        request.fields.require_few_prompts()
        parse = request.parse or request.fields.parser(
            formats(self.engine.embeds, settings.normalize, self.engine.classifies),
            anthropic=bool(header(request.client.scope, protocol.ANTHROPIC_VERSION)),
        )
        try:
            call = parse(request.body)
        except FormatError as error:
            raise bad_request(error) from None
        if call.ignored:
            request.client.record.ignored(call.ignored, lmi.KNOWN)
        call_fields = request.fields if call.body is request.body else fields(call.body)
        if call.path in (protocol.COMPLETIONS, protocol.CHAT_COMPLETIONS):
            body = with_structured_outputs(call.body, call_fields)
            if body is not call.body:
                call, call_fields = dataclasses.replace(call, body=body), fields(body)
        if call.path in protocol.AGENTS_PATHS:
            self._require_no_formatter(adapter)
        self._check(call, call_fields)
        scope = request.client.scope
        limits.check_headers(scope["headers"])
        inner = adapter.inner if adapter else None
        tenant = self.tenant(request.client)
        salt = kv_salt.digest(tenant, call_fields.salt(), inner)
        nameless = salt and call.path in protocol.AGENTS_PATHS
        NAME.set(functools.partial(kv_salt.scoped_name, salt) if nameless else None)
        sequences, body = call_fields.sequences(call.path), call.body
        if request.form:
            sequences *= await self._windows(request.form)
        else:
            allowed = settings.allowed_media_domains
            pairs = call.path in protocol.PAIRS_PATHS
            body = await media.prepared(body, allowed, settings.max_request_size, salt, pairs)
        keys: dict[str, object] = {}
        if salt and call.path not in protocol.TOKENIZER_PATHS:
            keys["cache_salt"] = salt
        caller = request.client.record.caller
        if settings.engine.get("scheduling_policy") == "priority":
            if request.background:
                keys["priority"] = LAST
            elif caller.name or caller.priority:
                keys["priority"] = caller.priority  # in the place of the client's own
        if adapter:
            request.client.record.adapter = adapter.name
            keys["model"] = adapter.inner
        elif request.adapter == "" or (
            # It has to be there in Anthropic's shape, and is not where SageMaker is asked.
            not request.parse and call.path == protocol.MESSAGES and not call_fields.model
        ):
            keys["model"] = self._model_name
        else:
            self._require_known(call_fields.model)
        if caller.phase == "prefill":
            keys |= _prompt_alone(call)
            if kv_tiers.transfers(settings):
                keys["kv_transfer_params"] = kv_transfer.offered(sequences)
            call = dataclasses.replace(call, reply=None)
        elif caller.phase == "decode" and call.path in PROMPT_ALONE:
            given = request.client.take_transfer() if sequences == 1 else None
            keys["kv_transfer_params"] = given or {HANDED_OVER: True}
        if request.form:
            body, kind = await in_thread(request.form.rendered, keys)
            call = dataclasses.replace(call, body=body, content_type=kind)
        elif keys or body is not call.body:
            call = dataclasses.replace(call, body=with_keys(body, **keys))
        return call, sequences

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

    def _check(self, call: EngineCall, found: RequestFields) -> None:
        """Raise BadRequest for a call that the engine may not get."""
        limits.check(found, self._settings.trust_request_internals)
        if call.path == protocol.RESPONSES:
            limits.check_items(found)
            limits.check_kept(found)
        elif call.path in protocol.PAIRS_PATHS:
            limits.check_pairs(found)
        elif call.path in protocol.TOKENIZER_PATHS:
            limits.check_tokenized(call.body)

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


def _prompt_alone(call: EngineCall) -> Mapping[str, object]:
    """The keys with which the engine computes a call's prompt alone. Raises BadRequest where it
    would have to do more.
    """
    if call.path not in PROMPT_ALONE:
        raise BadRequest(f"prompts on {call.path} are not computed for other servers")
    return PROMPT_ALONE[call.path]
