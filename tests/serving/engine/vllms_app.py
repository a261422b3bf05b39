# SPDX-License-Identifier: Apache-2.0
"""vLLM's own HTTP routes, which Slipway does not call, for the comparison of answers. Errors have
Slipway's texts.
"""

from typing import Any

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse

from serving.engine import error_handlers


def with_our_errors(app: FastAPI) -> FastAPI:
    for kind in (*error_handlers.EXPECTED, Exception):
        app.add_exception_handler(kind, answer)
    return app


async def answer(request: Request, error: Exception) -> JSONResponse:
    status, message, parameter = error_handlers.described(error)
    shape = {"message": message, "type": "", "param": parameter, "code": status}
    return JSONResponse({"error": shape}, status)


def generating(state: Any = None) -> FastAPI:
    """The routes of a generating model. state: that of an engine."""
    from vllm.entrypoints.generate.api_router import register_generate_api_routers

    Request.own = lambda self, serving: serving  # type: ignore[attr-defined]  # as calls.StandIn
    app = FastAPI()
    register_generate_api_routers(app)
    if state is not None:
        app.state = state
    return with_our_errors(app)


def embedding(state: Any) -> FastAPI:
    """The route of a model that makes embeddings, whose requests are read as one kind."""
    from vllm.entrypoints.pooling.embed import api_router
    from vllm.entrypoints.serve.utils.api_utils import validate_json_request

    from serving.engine.requests.pooling import EmbeddingRequest

    async def create(request: EmbeddingRequest, raw_request: Request) -> Any:
        return await api_router.create_embedding(request=request, raw_request=raw_request)

    app = FastAPI()
    json_only = [Depends(validate_json_request)]
    app.add_api_route("/v1/embeddings", create, methods=["POST"], dependencies=json_only)
    app.state = state
    return with_our_errors(app)
