# SPDX-License-Identifier: Apache-2.0
"""The HTTP app: its routes, as a table."""

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from lmi_config.options.declared import Settings
from serving import errors, protocol
from serving.access.access import Access
from serving.api import adapters, info
from serving.api.backend import Backend
from serving.api.endpoint import Endpoint, Gate, Handler, RecordedEndpoint
from serving.api.engine_paths import OpenAI
from serving.api.invocations import Invocations
from serving.api.session_store import SessionStore
from serving.api.sessions import Sessions
from serving.batch.answers import new_batch
from serving.errors import ErrorShape, NotFound
from serving.http.bodies import sender
from serving.http.origins import Origins
from serving.inference import kv_sessions
from serving.inference.request import HttpCall
from serving.ui import page as ui


class Row(NamedTuple):
    """A row of the table of routes.

    handler: returns the content of an answer in JSON, or None if it has answered. It gets the call,
    the pipeline, and the value of the body if there is a reader. reader: raises BadRequest.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[object]]
    reader: Callable[[bytes], object] | None = None


class ExactRoute(Route):
    """A route that matches its exact path. Starlette's patterns end with `$`, which also matches
    before a newline.
    """

    def __init__(self, path: str, endpoint: ASGIApp) -> None:
        super().__init__(path, endpoint)
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")


def create_app(backend: Backend, settings: Settings, access: Access) -> ASGIApp:
    """Return the app for SageMaker's paths, the OpenAI paths, /metrics and /ui. access:
    authenticates all requests, except health checks and the page, which has no data.
    """
    codes = errors.codes(settings)
    origins = Origins(settings.cors_allowed_origin, settings.host)
    rows: dict[str, dict[str, Row]] = {}
    for row in _table(backend, settings):
        rows.setdefault(row.path, {})[row.method] = row

    def recorded(
        path: str, handler: Handler, methods: Iterable[str], shape: Callable[[str], ErrorShape]
    ) -> RecordedEndpoint:
        return RecordedEndpoint(
            *(path, handler, Gate((*methods,), origins, access), shape),
            *(backend.error_rates, backend.objectives, backend.tracer),
        )

    def route(path: str, by_method: Mapping[str, Row]) -> ExactRoute:
        shape = errors.shape(path, codes)
        handler = _answering(by_method, backend, settings)
        return ExactRoute(path, recorded(path, handler, by_method, lambda _: shape))

    routes = [route(*it) for it in rows.items()] + [
        ExactRoute(path, Endpoint(app, Gate(methods, origins, keys), errors.shape(path, codes)))
        for path, app, keys, methods in _unrecorded(backend, settings, access)
    ]
    others = recorded("other", _nothing, (), lambda path: errors.shape(path, codes))
    return _for_pages(_routed(routes, others), settings)


def _table(backend: Backend, settings: Settings) -> Iterator[Row]:
    """The routes whose requests are recorded."""
    sessions = Sessions(_session_store(settings))
    for path in protocol.INVOCATIONS:
        yield Row("POST", path, Invocations(settings, sessions).answer)
    for path in protocol.ENGINE_PATHS:
        if settings.tokenizes or path not in protocol.TOKENIZER_PATHS:
            yield Row("POST", path, OpenAI(sessions).answer)
    yield Row("GET", protocol.EXECUTION_PARAMETERS, info.Parameters(settings).answer)
    files, file, batch = backend.files, f"{protocol.FILES}/{{id}}", f"{protocol.BATCHES}/{{id}}"
    yield Row("GET", protocol.FILES, files.files)
    yield Row("POST", protocol.FILES, files.receive)
    yield Row("GET", file, files.file)
    yield Row("DELETE", file, files.delete)
    yield Row("GET", f"{file}/content", files.content)
    yield Row("GET", protocol.BATCHES, files.batches)
    yield Row("POST", protocol.BATCHES, files.make, new_batch)
    yield Row("GET", batch, files.batch)
    yield Row("POST", f"{batch}/cancel", files.cancel)
    yield Row("GET", protocol.MODELS, info.models)
    yield Row("GET", f"{protocol.MODELS}/{{id:path}}", info.model)
    yield Row("GET", protocol.KV_EVENT_SOURCES, info.kv_event_sources)
    yield Row("GET", protocol.KV_SESSION, kv_sessions.look)
    yield Row("DELETE", protocol.KV_SESSION, kv_sessions.end)
    yield Row("POST", protocol.KV_PREFETCH, kv_sessions.prefetch)
    for path in protocol.ADAPTERS:
        yield Row("GET", path, adapters.page)
        yield Row("POST", path, adapters.register, adapters.parameters)
        yield Row("GET", f"{path}/{{name}}", adapters.describe)
        yield Row("DELETE", f"{path}/{{name}}", adapters.unregister)
        yield Row("POST", f"{path}/{{name}}/update", adapters.update, adapters.parameters)
    management, (models, workflows) = info.Management(settings, backend), protocol.MANAGEMENT
    yield Row("GET", models, management.models)
    yield Row("POST", models, management.register)
    yield Row("GET", workflows, management.workflows)
    yield Row("POST", workflows, management.register_workflow)
    for path in protocol.MANAGED:
        yield Row("GET", path, management.model)
        yield Row("PUT", path, management.scale)
        yield Row("DELETE", path, management.unload)
    yield Row("POST", protocol.SERVER_LOGGING, management.logging)


def _unrecorded(
    backend: Backend, settings: Settings, access: Access
) -> Iterator[tuple[str, ASGIApp, Access | None, tuple[str, ...]]]:
    """The other routes: path, app, who may ask, and methods; none for any."""
    for path in protocol.PROBES:
        yield path, info.Ping(backend, access), None, ()
    for path in (protocol.METRICS, protocol.SERVER_METRICS):
        yield path, info.Metrics(backend), access, ("GET",)
    if settings.serves_ui:
        for path in ui.FILES:
            yield path, info.page, None, ("GET",)
        yield protocol.UI_STATUS, info.Status(backend), access, ("GET",)


def _answering(rows: Mapping[str, Row], backend: Backend, settings: Settings) -> Handler:
    """Return what answers a path, by its rows, if the server is ready and the path's model is ours.
    rows: by method.
    """

    async def answer(call: HttpCall) -> None:
        pipeline = backend.pipeline
        _require_model(call.scope, settings.names_in_paths)
        row = rows[call.scope["method"]]
        given: list[object] = []
        if row.reader:
            given = [row.reader(await pipeline.bodies.read(call.scope, call.receive))]
        content = await row.handler(call, pipeline, *given)
        if content is not None:
            await call.reply(Response(msgspec.json.encode(content), media_type="application/json"))

    return answer


def _routed(routes: Sequence[ExactRoute], others: ASGIApp) -> ASGIApp:
    """Return the app of these routes. Paths without a parameter are looked up: Starlette's router
    tries one pattern after the other. others: answers all other paths.
    """
    exact = {it.path: it.app for it in routes if not it.param_convertors}
    patterns = [it for it in routes if it.param_convertors]
    router = Router(patterns, redirect_slashes=False, default=others)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found = exact.get(scope["path"], router)
        scope["path_params"] = {}
        await found(scope, receive, send)

    return app


def _session_store(settings: Settings) -> SessionStore | None:
    if not settings.enable_stateful_sessions:
        return None
    folder = Path(settings.sessions_path)
    return SessionStore(folder, settings.sessions_expiration, settings.max_sessions)


def _for_pages(router: ASGIApp, settings: Settings) -> ASGIApp:
    """Let the web pages call that the operator allows (CORS)."""
    if not settings.cors_allowed_origin:
        return router
    cors = CORSMiddleware(
        router,
        allow_origins=settings.cors_allowed_origin,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=["*"],
        expose_headers=["*"],
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        connection = sender(send)
        refused = connection and connection.refusal  # CORSMiddleware would hide it
        await (router if refused else cors)(scope, receive, send)

    return app


async def _nothing(call: HttpCall) -> None:
    raise NotFound(f"there is nothing at {call.scope['path']}")


def _require_model(scope: Scope, names: tuple[str, ...]) -> None:
    """Raise NotFound if the path names another model."""
    model = scope["path_params"].get("model", names[0])
    if model not in names:
        raise NotFound(f"model {model!r:.140} is not here; it is {names[0]}")
