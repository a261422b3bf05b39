# SPDX-License-Identifier: Apache-2.0
"""/invocations and its equivalent paths: the body decides the operation."""

import itertools
import re
from collections.abc import Iterator

from starlette.responses import Response
from starlette.types import Scope, Send

from handlers import openai, payloads
from handlers.custom import RAW
from handlers.multipart import CONTENT_TYPE
from handlers.records import FormatError
from lmi_config.options.declared import Settings
from serving.aio import in_thread
from serving.api.parts import answer_lines, answer_list
from serving.api.sessions import Sessions
from serving.errors import BadRequest, InternalFunction
from serving.http.bodies import header
from serving.inference.custom_handler import CustomHandlerCall
from serving.inference.fields import RequestFields, bad_request, fields
from serving.inference.pipeline import Pipeline
from serving.inference.request import (
    JSON_LINES,
    SSE,
    ClientRequest,
    Framing,
    HttpCall,
    InferenceRequest,
    adapter_named,
    adapters_named,
)
from serving.protocol import (
    AUDIO_PATHS,
    CUSTOM_ATTRIBUTES,
    CUSTOM_ROUTE,
    ENGINE_PATHS,
    HANDLER,
    INVOCATIONS,
    TOKENIZER_PATHS,
    TRANSCRIPTIONS,
    shown,
)
from serving.user_code import UserCode

_AT_ONCE = 2**18  # bytes of a CSV that may be read on the event loop; a thread reads more


class Invocations:
    """Answers /invocations: calls for sessions, the model's own handler, and any format."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self._default_accept = settings.default_accept.encode()
        self._sessions = sessions
        self._routes = [
            path for path in ENGINE_PATHS if settings.tokenizes or path not in TOKENIZER_PATHS
        ]

    async def answer(self, call: HttpCall, pipeline: Pipeline) -> None:
        async def answer(client: ClientRequest) -> None:
            await self._run(client, await self._sessions.joined(client), pipeline)

        async with pipeline.received(call) as client:
            if header(call.scope, HANDLER):
                raise InternalFunction(
                    "the header `handler` names a function of the server's; leave it out"
                )
            if response := await self._sessions.answer(client):
                await response(call.scope, call.receive, call.send)
            elif handler := pipeline.custom_handler:
                await self._handle(handler, client, call, pipeline)
            else:
                await pipeline.answer_once(client, call.receive, answer)

    async def _handle(
        self, handler: UserCode, client: ClientRequest, call: HttpCall, pipeline: Pipeline
    ) -> None:
        """Let the model's handler answer. If it leaves the request to the engine, that answers."""
        if client.record.caller.phase == "prefill":
            raise BadRequest("requests to this model's model.py are not computed for other servers")
        pipeline.require_model(client)
        pipeline.admission.require_places(0, room=False)  # the engine's capacity does not help it
        send = await self._sessions.joined(client)
        with client.admitted.watching(call.receive):
            if await CustomHandlerCall(handler, client, send).answered():
                return
            if handler.alone:  # LMI's answer if handle has returned None
                await Response(status_code=204)(call.scope, call.receive, send)
                return
            await self._run(client, send, pipeline)

    async def _run(self, client: ClientRequest, send: Send, pipeline: Pipeline) -> None:
        """Let the engine answer one request, several lines, or a list with several adapters."""
        kind = header(client.scope, b"content-type").decode("latin-1")
        route = self._route(client.scope)
        form = pipeline.engine.hears and kind.lower().startswith(CONTENT_TYPE)
        if route in AUDIO_PATHS or (form and not route):
            await self._hear(client, route or TRANSCRIPTIONS, send, pipeline)
            return
        raw = kind.lower().startswith(RAW)
        requests = iter([client.body]) if raw else await _requests(client)
        body = next(requests)
        if (second := next(requests, None)) is not None:
            if route:
                raise BadRequest(
                    f"{CUSTOM_ROUTE}{route} is for one request; several lines came: send one"
                )
            lines = itertools.chain([body, second], requests)
            await answer_lines(client, lines, send, pipeline)
            return
        found = RequestFields() if raw else self._fields(client, body)
        named = adapter_named if route else adapters_named
        adapter = named(client, found, pipeline.adapters)
        if isinstance(adapter, list):
            await answer_list(client, body, adapter, send, pipeline)
            return
        request = InferenceRequest(
            client=client,
            send=send,
            cancellation=client.admitted,
            body=body,
            fields=found,
            adapter=adapter,
            framing=SSE if route else self._framing(client.scope),
            begun=client.admitted.go,
            parse=openai.on(route) if route else None,
            content_type=kind,
            raw=raw,
            writer=client.writer,
        )
        await pipeline.run(request)

    async def _hear(self, client: ClientRequest, path: str, send: Send, pipeline: Pipeline) -> None:
        """Transcribe or translate a form with a file."""
        form = await pipeline.form(client, path)
        found = client.fields()
        request = InferenceRequest(
            client=client,
            send=send,
            cancellation=client.admitted,
            body=client.body,
            fields=found,
            adapter=adapter_named(client, found, pipeline.adapters),
            framing=SSE,
            begun=client.admitted.go,
            parse=openai.on(path),
            form=form,
        )
        await pipeline.run(request)

    def _route(self, scope: Scope) -> str | None:
        """Return the engine's path that the request's custom attributes ask for, or None. Clients
        of AWS's vLLM image use them. Raises BadRequest for any other path.
        """
        attributes = header(scope, CUSTOM_ATTRIBUTES).decode("latin-1")
        for attribute in re.split("[,;]", attributes):
            attribute = attribute.strip()
            if not attribute.startswith(CUSTOM_ROUTE):
                continue
            path = attribute.removeprefix(CUSTOM_ROUTE)
            if path == INVOCATIONS[0]:
                return None
            if path not in self._routes:
                raise BadRequest(
                    f"{attribute!r:.140} in {shown(CUSTOM_ATTRIBUTES)}; it should be one of "
                    f"{', '.join(self._routes)}"
                )
            return path
        return None

    def _fields(self, client: ClientRequest, body: bytes) -> RequestFields:
        return client.fields() if body is client.body else fields(body)

    def _framing(self, scope: Scope) -> Framing:
        accept = header(scope, b"accept")
        if accept in (b"", b"*/*"):
            accept = self._default_accept
        return SSE if b"text/event-stream" in accept else JSON_LINES


async def _requests(client: ClientRequest) -> Iterator[bytes]:
    """Return the JSON requests in a body of any content type. Raises BadRequest."""
    body, kind = client.body, header(client.scope, b"content-type").decode("latin-1")
    try:
        if len(body) > _AT_ONCE and kind.lower().startswith("text/csv"):
            with client.admitted.raising():
                return await in_thread(payloads.requests, body, kind)
        return payloads.requests(body, kind)
    except FormatError as error:
        raise bad_request(error) from None
