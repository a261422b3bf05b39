"""The HTTP app: its routes as a list, and the one place where exceptions become answers."""

from prometheus_client import REGISTRY, make_asgi_app
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from serving import errors
from serving.accounting import Account
from serving.adapter_routes import AdapterRoutes
from serving.error_rates import ErrorRates
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
    codes = front.codes

    async def ping(scope: Scope, receive: Receive, send: Send) -> None:
        status, answer = front.lifecycle.ping()
        if status == 200 and (trouble := front.error_rates.exceeded()):
            status, answer = 503, {**answer, "status": "failing", "detail": trouble}
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

    def route(path: str, app: ASGIApp, *methods: str) -> Route:
        counted = path, front.error_rates
        return Route(path, _Endpoint(app, codes, *methods, counted=counted))

    return Router(
        [
            *(route(path, front.invocations, "POST") for path in errors.INVOCATIONS),
            *(route(path, front.openai, method) for method, path in ENGINE_ROUTES),
            route("/execution-parameters", front.parameters, "GET"),
            route("/v1/models", front.models, "GET"),
            route("/kv_event_sources", front.kv_event_sources, "GET"),
            *(
                route(f"{prefix}/adapters{rest}", asked, *methods)
                for prefix in ("", "/models/{model}")
                for rest, asked, methods in (
                    ("", adapters.all, ("GET", "POST")),
                    ("/{name}", adapters.one, ("GET", "DELETE")),
                    ("/{name}/update", adapters.update, ("POST",)),
                )
            ),
            Route("/ping", _Endpoint(ping, codes)),
            Route("/metrics", _Endpoint(metrics, codes, "GET", "HEAD")),
        ],
        redirect_slashes=False,
        default=_Endpoint(nothing, codes, counted=("other", front.error_rates)),
    )


class _Endpoint:
    """An ASGI app at the end of a route: what it raises is told in the shape of its path's API.

    methods: those it answers, or none for any. codes: the statuses of errors. counted: its path as
    the log and the series have it, and where errors are counted; None for what is asked all the
    time.

    Starlette's own application would do this in two layers of middleware around every message that
    is sent, which shows in the cost of a streamed token.
    """

    def __init__(
        self,
        app: ASGIApp,
        codes: errors.Codes,
        *methods: str,
        counted: tuple[str, ErrorRates] | None = None,
    ) -> None:
        self._app = app
        self._codes = codes
        self._methods = methods
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._counted:
            await self._answer(scope, receive, send)
            return
        path, rates = self._counted
        account = Account(path, scope, send)
        error = await self._answer(scope, receive, account.send) or scope.get("slipway.error")
        if error:
            rates.count(error)
        account.close(type(error).__name__ if error else "")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> ServingError | None:
        """Answer, if need be with an error, which is returned."""
        try:
            if self._methods and scope["method"] not in self._methods:
                raise MethodNotAllowed(scope["path"], scope["method"], self._methods)
            await self._app(scope, receive, send)
            return None
        except ServingError as it:
            error = it
        except Exception:
            error = errors.unforeseen()
        await errors.response(error, scope["path"], self._codes)(scope, receive, send)
        return error
