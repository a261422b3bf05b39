"""The HTTP app: its routes as a list, and the one place where exceptions become answers."""

from collections.abc import Sequence

from prometheus_client import REGISTRY, make_asgi_app
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from serving import errors
from serving.adapter_routes import AdapterRoutes
from serving.errors import MethodNotAllowed, NotFound, ServingError
from serving.invocations import Front

ENGINE_ROUTES = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
)
"""The engine's own paths that are answered. No other path of the engine's is reachable."""


def create_app(front: Front) -> ASGIApp:
    """The app that answers SageMaker's paths, the OpenAI paths and /metrics."""

    def endpoint(app: ASGIApp, *methods: str) -> ASGIApp:
        return _Endpoint(app, methods, front.codes)

    async def ping(scope: Scope, receive: Receive, send: Send) -> None:
        status, answer = front.lifecycle.ping()
        await JSONResponse(answer, status)(scope, receive, send)

    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        raise NotFound(f"there is nothing at {scope['path']}")

    adapters = AdapterRoutes(front)
    # vLLM registers its series with the process's default registry.
    prometheus = make_asgi_app(REGISTRY)

    async def metrics(scope: Scope, receive: Receive, send: Send) -> None:
        # Always as plain text: in OpenMetrics it writes vllm_… for vllm:…, and headers that are no
        # UTF-8 make it fail.
        await prometheus({**scope, "headers": []}, receive, send)

    return Router(
        [
            *(Route(path, endpoint(front.invocations, "POST")) for path in errors.INVOCATIONS),
            *(Route(path, endpoint(front.openai, method)) for method, path in ENGINE_ROUTES),
            Route("/execution-parameters", endpoint(front.parameters, "GET")),
            Route("/v1/models", endpoint(front.models, "GET")),
            Route("/kv_event_sources", endpoint(front.kv_event_sources, "GET")),
            *(
                Route(f"{prefix}/adapters{rest}", endpoint(asked, *methods))
                for prefix in ("", "/models/{model}")
                for rest, asked, methods in (
                    ("", adapters.all, ("GET", "POST")),
                    ("/{name}", adapters.one, ("GET", "DELETE")),
                    ("/{name}/update", adapters.update, ("POST",)),
                )
            ),
            Route("/ping", endpoint(ping)),
            Route("/metrics", endpoint(metrics, "GET", "HEAD")),
        ],
        redirect_slashes=False,
        default=endpoint(nothing),
    )


class _Endpoint:
    """An ASGI app at the end of a route: what it raises is told in the shape of its path's API.

    methods: those it answers, or none for any. codes: the statuses of errors.

    Starlette's own application would do this in two layers of middleware around every message that
    is sent, which shows in the cost of a streamed token.
    """

    def __init__(self, app: ASGIApp, methods: Sequence[str], codes: errors.Codes) -> None:
        self._app = app
        self._methods = methods
        self._codes = codes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._methods and scope["method"] not in self._methods:
                raise MethodNotAllowed(scope["path"], scope["method"], self._methods)
            await self._app(scope, receive, send)
        except ServingError as error:
            await errors.response(error, scope["path"], self._codes)(scope, receive, send)
        except Exception:
            answer = errors.response(errors.unforeseen(), scope["path"], self._codes)
            await answer(scope, receive, send)
