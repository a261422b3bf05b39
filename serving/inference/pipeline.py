# SPDX-License-Identifier: Apache-2.0
"""The pipeline of every request to the engine. No request reaches the engine past it.

A request takes five steps: admit, prepare, isolate, schedule, and answer and account. Each returns
a value, which the next ones read.
"""

import contextlib
import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Send

from handlers import multipart
from handlers.multipart import Form
from handlers.records import TOO_DEEP, FormatError
from lmi_config.options.declared import Settings
from serving import protocol
from serving.access.limits import Limiter
from serving.aio import in_thread
from serving.cache_hints.hints import Hints
from serving.cache_hints.intent import CacheIntent
from serving.engine.base import Engine, Usage
from serving.engine.no_engine import MESSAGE as NO_ENGINE
from serving.errors import BadRequest, NotFound, NotReady, Shed
from serving.http.bodies import Answer, Bodies
from serving.inference.admission import Admission
from serving.inference.coalescing import Coalescer, shared_key
from serving.inference.content.fields import bad_request
from serving.inference.isolated import Isolated, engine_call, isolate
from serving.inference.prepared import Formatters, Prepared, prepare
from serving.inference.queue import QUEUED, SHED, FairQueue, Ticket
from serving.inference.relay import Relay
from serving.inference.request import ClientRequest, HttpCall, InferenceRequest
from serving.kv_cache import transfer as kv_transfer
from serving.kv_cache.salt import Tenants
from serving.kv_cache.session_client import SessionClient
from serving.lora.adapter import Adapter
from serving.lora.adapter_registry import AdapterRegistry
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
        tiers: SessionClient | None = None,
    ) -> None:
        """tiers: the conversations in the KV cache tiers; None without tiers or retention."""
        self.engine = engine
        self.adapters = adapters
        self.code = code
        """The model's model.py."""
        self._settings = settings
        self.limiter = limiter
        self.tiers = tiers
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

    def tenant(self, request: ClientRequest | HttpCall) -> str | None:
        """Return a request's tenant, or None without tenants. Raises BadRequest."""
        return self._tenants.tenant(request.record.caller, request.scope["headers"])

    def require_model(self, client: ClientRequest) -> None:
        """Raise NotPermitted if the client's key does not allow the base model."""
        client.record.caller.require_model(self._settings.model_names)

    @contextlib.asynccontextmanager
    async def admit(self, call: HttpCall) -> AsyncIterator[ClientRequest]:
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
                admitted.begin()
                yield ClientRequest(
                    *(call.scope, call.answer, admitted, call.record, call.errors, body, transfer)
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
        if not prefill and 0 < len(client.headers.get(protocol.INFERENCE_ID, b"")) <= 64:
            with admitted.raising():
                key = await shared_key(client, self._tenants)
        if not key:
            with admitted.watching(receive):
                await answer(client)
            return

        async def shared(receive: Receive, send: Send) -> None:
            with self.admission.again(admitted) as again, again.watching(receive):
                again.begin()
                own = msgspec.structs.replace(client, admitted=again, answer=Answer(send))
                await answer(own)

        admitted.release_place()  # the shared call has its own; retries have a separate limit
        await self._coalescer.answer(key, shared, receive, client.answer)

    async def form(self, client: ClientRequest, path: str) -> Form:
        """Parse a client's form with a file.

        Raises NotFound if the model is not a speech-to-text model, and BadRequest.
        """
        if not self.engine.hears:
            raise NotFound(f"the model does not answer {path}")
        kind = client.headers.get(b"content-type", b"").decode("latin-1")
        try:
            with client.admitted.raising():
                return await in_thread(multipart.parse, client.body, kind)
        except FormatError as error:
            raise bad_request(error) from None

    async def run(self, request: InferenceRequest) -> None:
        """Prepare, isolate and schedule an admitted request, and let the engine answer it. Raises
        ServingError and ClientLeft.

        If the request ends early, its waits and the engine's work are cancelled.
        """
        if self.code and self.code.alone:
            raise NotFound(NO_ENGINE)
        if not request.adapter:
            self.require_model(request.client)
        settings = self._settings
        request.cancellation.end_after(request.timeout(request.fields, settings))
        async with self._loaded_adapter(request) if request.adapter else _NO_ADAPTER as adapter:
            with request.cancellation.raising():
                try:
                    formatters = self._formatters(adapter)
                    prepared = await prepare(request, formatters, self.engine, settings)
                    tenant = self.tenant(request.client)
                    isolated = await isolate(
                        *(request, prepared, adapter, tenant), hints=self._hints, settings=settings
                    )
                except RecursionError:  # nested parts are read again, with less of the stack left
                    raise BadRequest(TOO_DEEP) from None
                if adapter:
                    request.client.record.adapter = adapter.name
                ticket = await self._schedule(request, prepared, isolated.intent)
            relay = Relay(request, prepared.rendering, adapter)
            try:
                await self._answer(request, prepared, isolated, adapter, relay)
            finally:
                self._queue.leave(ticket)
                self._account(request, adapter, tenant, relay.usage)

    async def _answer(
        self,
        request: InferenceRequest,
        prepared: Prepared,
        isolated: Isolated,
        adapter: Adapter | None,
        relay: Relay,
    ) -> None:
        """Let the engine answer, within a span of the request's trace."""
        if self.engine.failure:
            raise NotReady("the engine failed while the request waited for it")
        if request.background:
            request.cancellation.end_after_now(self._settings.stream_timeout)
        request.begun()
        model = adapter.name if adapter else self._model_name
        with _traced(request.client, prepared.path, model, relay) as trace:
            await relay.run(self.engine, engine_call(request, prepared, isolated, trace))

    def _account(
        self, request: InferenceRequest, adapter: Adapter | None, tenant: str | None, usage: Usage
    ) -> None:
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
        shown = caller.shown_tenant if caller.tenant else tenant or ""
        client.record.used(shown, adapter.name if adapter else "", *tokens)
        self.limiter.charge(caller, tokens.prompt + tokens.generated)

    @contextlib.asynccontextmanager
    async def _loaded_adapter(self, request: InferenceRequest) -> AsyncIterator[Adapter]:
        """Keep the request's adapter loaded in the engine, and yield it."""
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

    def _formatters(self, adapter: Adapter | None) -> Formatters:
        """Return the formatters: each the adapter's, or else the model's, or none."""
        codes = [it for it in (adapter.code if adapter else None, self.code) if it]
        if not codes:
            return Formatters(None, None)
        given, answered = (
            next((it for it in codes if function in it.functions), None)
            for function in ("input", "output")
        )
        return Formatters(given, answered)

    async def _schedule(
        self, request: InferenceRequest, prepared: Prepared, intent: CacheIntent
    ) -> Ticket:
        """Wait for the request's turn in the fair queue. Returns its ticket. While it waits, its
        conversation's KV is read into memory.

        Raises Overloaded if the turn would come too late, and Shed if the request may not wait.
        """
        within = None
        if request.refusable:
            if request.client.record.caller.sheddable:
                self._require_room()
            limit = request.timeout(prepared.given, self._settings)
            within = request.cancellation.time_left(limit)
        tenant = request.client.record.caller.shown_tenant
        lane = f"{tenant}\0{request.adapter or ''}" if tenant else request.adapter or ""
        with request.client.record.part("queue"):
            return await self._queue.turn(
                *(lane, prepared.sequences, within, request.background),
                self._prefetching(request, intent),
            )

    def _prefetching(
        self, request: InferenceRequest, intent: CacheIntent
    ) -> Callable[[], None] | None:
        """Return the call that prefetches the KV of the request's conversation, or None."""
        if not (self.tiers and intent.session) or intent.low or request.background:
            return None
        return functools.partial(self.tiers.prefetch_soon, intent.session)

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


@contextlib.contextmanager
def _traced(
    client: ClientRequest, path: str, model: str, relay: Relay
) -> Iterator[Mapping[str, str]]:
    """Yield the headers of the trace context for a call to the engine, within a span if spans are
    sent. The span then has the tokens that the relay's call used.
    """
    theirs = _texts(it for it in client.scope["headers"] if it[0] in protocol.TRACE_CONTEXT)
    if not client.record.trace:
        yield theirs
        return
    operation = OPERATIONS.get(path) or path.rpartition("/")[2]
    with client.record.trace.call(f"{operation} {model}") as span:
        span.note(
            gen_ai__operation__name=operation,
            gen_ai__provider__name="vllm",
            gen_ai__request__model=model,
        )
        context = span.headers()
        try:
            yield _texts(context) if context else theirs
        finally:
            tokens = relay.usage.tokens
            span.note(
                gen_ai__usage__input_tokens=tokens.prompt,
                gen_ai__usage__output_tokens=tokens.generated,
                gen_ai__usage__cache_read__input_tokens=tokens.cached,
            )


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in headers}
