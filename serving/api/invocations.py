# SPDX-License-Identifier: Apache-2.0
"""/invocations and its equivalent paths: the body decides the operation."""

import itertools
import re
from collections.abc import Iterator

import msgspec
from starlette.responses import Response

from handlers import openai, payloads
from handlers.custom import RAW
from handlers.multipart import CONTENT_TYPE
from handlers.records import FormatError
from lmi_config.options.declared import Settings
from serving.aio import in_thread
from serving.api.engine_paths import answer_path
from serving.api.request_lists import answer_lines, answer_list
from serving.api.sessions import Sessions
from serving.errors import BadRequest, InternalFunction
from serving.inference.content.fields import RequestFields, bad_request
from serving.inference.custom_handler import is_handled
from serving.inference.pipeline import Pipeline
from serving.inference.request import (
    JSON_LINES,
    SSE,
    ClientRequest,
    Framing,
    HttpCall,
    adapters_named,
    inference_request,
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
            await self._sessions.join(client, pipeline)
            await self._run(client, pipeline)

        async with pipeline.admit(call) as client:
            if client.headers.get(HANDLER):
                raise InternalFunction(
                    "the header `handler` names a function of the server's; leave it out"
                )
            if response := await self._sessions.answer(client, pipeline):
                await call.reply(response)
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
        await self._sessions.join(client, pipeline)
        with client.admitted.watching(call.receive):
            if await is_handled(handler, client):
                return
            if handler.alone:  # LMI's answer if handle has returned None
                await call.reply(Response(status_code=204))
                return
            await self._run(client, pipeline)

    async def _run(self, client: ClientRequest, pipeline: Pipeline) -> None:
        """Let the engine answer one request, several lines, or a list with several adapters."""
        kind = client.headers.get(b"content-type", b"").decode("latin-1")
        route = self._route(client)
        form = pipeline.engine.hears and kind.lower().startswith(CONTENT_TYPE)
        if route in AUDIO_PATHS or (form and not route):
            await answer_path(client, route or TRANSCRIPTIONS, pipeline)
            return
        raw = kind.lower().startswith(RAW)
        requests = iter([client.body]) if raw else await _requests(client)
        body = next(requests)
        if (second := next(requests, None)) is not None:
            if route:
                raise BadRequest(
                    f"{CUSTOM_ROUTE}{route} is for one request; several lines came: send one"
                )
            await answer_lines(client, itertools.chain([body, second], requests), pipeline)
            return
        if body is not client.body:
            client = msgspec.structs.replace(client, body=body)
        found = RequestFields() if raw else client.fields
        named = None if route else adapters_named(client, found, pipeline.adapters)
        if isinstance(named, list):
            await answer_list(client, named, pipeline)
            return
        request = inference_request(
            *(client, pipeline.adapters),
            adapter=named,
            framing=SSE if route else self._framing(client),
            parse=openai.on(route) if route else None,
            content_type=kind,
            raw=raw,
        )
        await pipeline.run(request)

    def _route(self, client: ClientRequest) -> str | None:
        """Return the engine's path that the request's custom attributes ask for, or None. Clients
        of AWS's vLLM image use them. Raises BadRequest for any other path.
        """
        attributes = client.headers.get(CUSTOM_ATTRIBUTES, b"").decode("latin-1")
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

    def _framing(self, client: ClientRequest) -> Framing:
        accept = client.headers.get(b"accept", b"")
        if accept in (b"", b"*/*"):
            accept = self._default_accept
        return SSE if b"text/event-stream" in accept else JSON_LINES


async def _requests(client: ClientRequest) -> Iterator[bytes]:
    """Return the JSON requests in a body of any content type. Raises BadRequest."""
    body, kind = client.body, client.headers.get(b"content-type", b"").decode("latin-1")
    try:
        if len(body) > _AT_ONCE and kind.lower().startswith("text/csv"):
            with client.admitted.raising():
                return await in_thread(payloads.requests, body, kind)
        return payloads.requests(body, kind)
    except FormatError as error:
        raise bad_request(error) from None
