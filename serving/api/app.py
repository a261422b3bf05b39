# SPDX-License-Identifier: Apache-2.0
"""The HTTP app: its routes, as a list."""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from lmi_config.options.declared import Settings
from serving import errors, protocol
from serving.access.access import Access
from serving.api import adapters, info
from serving.api.backend import Backend
from serving.api.endpoint import Answer, Endpoint, Gate, RecordedEndpoint
from serving.api.invocations import Invocations
from serving.api.openai import OpenAI
from serving.api.session_store import SessionStore
from serving.api.sessions import Sessions
from serving.errors import NotFound
from serving.http.bodies import sender
from serving.http.origins import Origins
from serving.inference.pipeline import Pipeline
from serving.inference.request import HttpCall
from serving.kv_cache.salt import Tenants
from serving.ui import page as ui

Handler = Callable[[HttpCall, Pipeline], Awaitable[None]]


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
    names = settings.names_in_paths
    sessions = Sessions(
        SessionStore(
            Path(settings.sessions_path), settings.sessions_expiration, settings.max_sessions
        )
        if settings.enable_stateful_sessions
        else None,
        Tenants(settings.cache_salt_header),
    )

    def ready(handler: Handler) -> Answer:
        """Wrap a handler: it is called if the server is ready, and the path's model is ours."""

        def answer(call: HttpCall) -> Awaitable[None]:
            pipeline = backend.pipeline
            _require_model(call.scope, names)
            return handler(call, pipeline)

        return answer

    def route(path: str, handler: Handler, *methods: str) -> Route:
        shape = errors.shape(path, codes)
        return ExactRoute(
            path,
            RecordedEndpoint(
                *(path, ready(handler), Gate(methods, origins, access), lambda _: shape),
                *(backend.error_rates, backend.objectives, backend.tracer),
            ),
        )

    def plain(path: str, app: ASGIApp, access: Access | None, *methods: str) -> Route:
        return ExactRoute(
            path, Endpoint(app, Gate(methods, origins, access), errors.shape(path, codes))
        )

    invocations = Invocations(settings, sessions).answer
    openai = OpenAI(sessions).answer
    files = backend.files
    management = info.Management(settings, backend)
    pages = [
        *(plain(path, info.page, None, "GET") for path in ui.FILES),
        plain(protocol.UI_STATUS, info.Status(backend), access, "GET"),
    ]
    router: ASGIApp = Router(
        [
            *(route(path, invocations, "POST") for path in protocol.INVOCATIONS),
            *(
                route(path, openai, "POST")
                for path in protocol.ENGINE_PATHS
                if settings.tokenizes or path not in protocol.TOKENIZER_PATHS
            ),
            route(protocol.EXECUTION_PARAMETERS, info.Parameters(settings).answer, "GET"),
            route(protocol.FILES, files.files, "GET", "POST"),
            route(f"{protocol.FILES}/{{id}}", files.file, "GET", "DELETE"),
            route(f"{protocol.FILES}/{{id}}/content", files.content, "GET"),
            route(protocol.BATCHES, files.batches, "GET", "POST"),
            route(f"{protocol.BATCHES}/{{id}}", files.batch, "GET"),
            route(f"{protocol.BATCHES}/{{id}}/cancel", files.cancel, "POST"),
            route(protocol.MODELS, info.models, "GET"),
            route(f"{protocol.MODELS}/{{id:path}}", info.model, "GET"),
            route(protocol.KV_EVENT_SOURCES, info.kv_event_sources, "GET"),
            *(
                route(f"{path}{rest}", handler, *methods)
                for path in protocol.ADAPTERS
                for rest, handler, methods in (
                    ("", adapters.every, ("GET", "POST")),
                    ("/{name}", adapters.one, ("GET", "DELETE")),
                    ("/{name}/update", adapters.update, ("POST",)),
                )
            ),
            *(
                route(path, handler, "GET", "POST")
                for path, handler in zip(
                    protocol.MANAGEMENT, (management.models, management.workflows), strict=True
                )
            ),
            *(route(path, management.model, "GET", "PUT", "DELETE") for path in protocol.MANAGED),
            route(protocol.SERVER_LOGGING, management.logging, "POST"),
            *(plain(path, info.Ping(backend, access), None) for path in protocol.PROBES),
            *(
                plain(path, info.Metrics(backend), access, "GET")
                for path in (protocol.METRICS, protocol.SERVER_METRICS)
            ),
            *(pages if settings.serves_ui else ()),
        ],
        redirect_slashes=False,
        default=RecordedEndpoint(
            "other",
            _nothing,
            Gate((), origins, access),
            lambda path: errors.shape(path, codes),
            *(backend.error_rates, backend.objectives, backend.tracer),
        ),
    )
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
