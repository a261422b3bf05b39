"""The HTTP app: routes and error handlers as lists."""

import logging
from http import HTTPStatus

import msgspec
from prometheus_client import REGISTRY, make_asgi_app
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serving import errors
from serving.errors import EngineFailed, MethodNotAllowed, NotFound, ServingError
from serving.invocations import Front

log = logging.getLogger(__name__)

ENGINE_ROUTES = (
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/embeddings", "POST"),
    ("/v1/models", "GET"),
)
"""The engine's own paths that are answered. No other path of the engine's is reachable."""


class _Endpoint:
    """An ASGI app as a route's endpoint: of a bare function Starlette would want a response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def create_app(front: Front) -> Starlette:
    """The app that answers SageMaker's paths, the OpenAI paths and /metrics."""

    async def ping(request: Request) -> Response:
        status, answer = front.lifecycle.ping()
        return Response(msgspec.json.encode(answer), status, media_type="application/json")

    return Starlette(
        routes=[
            Route("/ping", ping),
            Route("/invocations", _Endpoint(front.invocations), methods=["POST"]),
            *(
                Route(path, _Endpoint(front.openai), methods=[method])
                for path, method in ENGINE_ROUTES
            ),
            # vLLM registers its series with the process's default registry.
            Route("/metrics", _Endpoint(make_asgi_app(REGISTRY)), methods=["GET"]),
        ],
        exception_handlers={
            ServingError: errors.handle,
            HTTPException: _routing_error,
            Exception: _unforeseen,
        },
    )


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told: ServingError = NotFound(f"there is nothing at {request.url.path}")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        told = MethodNotAllowed(f"{request.url.path} does not answer {request.method}")
    return errors.response(told, request.url.path)


async def _unforeseen(request: Request, error: Exception) -> Response:
    log.error("a request failed unexpectedly", exc_info=error)
    return errors.response(EngineFailed("the server failed on this request"), request.url.path)
