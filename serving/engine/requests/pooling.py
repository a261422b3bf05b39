# SPDX-License-Identifier: Apache-2.0
"""In the server's process: what vLLM answers of models that do not generate, path by path,
with each request read as one kind.

vLLM has five models of a request for embeddings, four of one for scores, and pydantic reads every
body as all of them: 18 µs for each token in a list of them, on the event loop, a minute for a body
of 7 MB.
"""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from pydantic import BeforeValidator, Discriminator, Tag
from vllm.entrypoints.pooling.classify import api_router as classify
from vllm.entrypoints.pooling.classify.protocol import (
    ClassificationChatRequest,
    ClassificationCompletionRequest,
)
from vllm.entrypoints.pooling.embed import api_router as embed
from vllm.entrypoints.pooling.embed.protocol import (
    EmbeddingBatchChatInputRequest,
    EmbeddingBatchChatRequest,
    EmbeddingChatInputRequest,
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
    reject_removed_pooling_parameters,
)
from vllm.entrypoints.pooling.pooling import api_router as pooling
from vllm.entrypoints.pooling.pooling.protocol import PoolingChatRequest, PoolingCompletionRequest
from vllm.entrypoints.pooling.scoring import api_router as scoring
from vllm.entrypoints.pooling.scoring.protocol import (
    RerankRequest,
    ScoreDataRequest,
    ScoreQueriesDocumentsRequest,
    ScoreQueriesItemsRequest,
    ScoreTextRequest,
)
from vllm.entrypoints.pooling.utils import enable_scoring_api
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from serving.protocol import CLASSIFY, EMBEDDINGS, POOLING, RERANK_PATHS, SCORE_PATHS

# In brackets, since an error's place begins with the tag, and vLLM leaves brackets out of messages.
_TEXTS = "[texts]"
_CHAT, _CHATS = "[chat]", "[chats]"
_CHAT_IN_INPUT, _CHATS_IN_INPUT = "[chat in input]", "[chats in input]"
_DOCUMENTS, _ITEMS, _DATA = "[documents]", "[items]", "[data]"

JSON_ONLY = [Depends(validate_json_request)]


def _kind(body: Any) -> str:
    if not isinstance(body, dict):
        return _TEXTS
    messages = body.get("messages")
    items = messages or body.get("input")
    first = items[0] if isinstance(items, list) and items else None
    if isinstance(first, list) and first and isinstance(first[0], dict):
        return _CHATS if messages else _CHATS_IN_INPUT
    if messages:
        return _CHAT
    return _CHAT_IN_INPUT if isinstance(first, dict) else _TEXTS


def _kind_of_one(body: Any) -> str:
    """Of a request that has texts or one chat."""
    return _CHAT if isinstance(body, dict) and body.get("messages") else _TEXTS


def _kind_of_pairs(body: Any) -> str:
    if not isinstance(body, dict) or "queries" not in body:
        return _DATA if isinstance(body, dict) and "data_1" in body else _TEXTS
    return _ITEMS if "items" in body and "documents" not in body else _DOCUMENTS


EmbeddingRequest = Annotated[
    Annotated[EmbeddingCompletionRequest, Tag(_TEXTS)]
    | Annotated[EmbeddingChatRequest, Tag(_CHAT)]
    | Annotated[EmbeddingBatchChatRequest, Tag(_CHATS)]
    | Annotated[EmbeddingChatInputRequest, Tag(_CHAT_IN_INPUT)]
    | Annotated[EmbeddingBatchChatInputRequest, Tag(_CHATS_IN_INPUT)],
    Discriminator(_kind),
    BeforeValidator(reject_removed_pooling_parameters),
]
ClassificationRequest = Annotated[
    Annotated[ClassificationCompletionRequest, Tag(_TEXTS)]
    | Annotated[ClassificationChatRequest, Tag(_CHAT)],
    Discriminator(_kind_of_one),
    BeforeValidator(reject_removed_pooling_parameters),
]
# Without `data`, which is for plugins: they fetch what it names.
PoolingRequest = Annotated[
    Annotated[PoolingCompletionRequest, Tag(_TEXTS)] | Annotated[PoolingChatRequest, Tag(_CHAT)],
    Discriminator(_kind_of_one),
    BeforeValidator(reject_removed_pooling_parameters),
]
ScoreRequest = Annotated[
    Annotated[ScoreTextRequest, Tag(_TEXTS)]
    | Annotated[ScoreQueriesDocumentsRequest, Tag(_DOCUMENTS)]
    | Annotated[ScoreQueriesItemsRequest, Tag(_ITEMS)]
    | Annotated[ScoreDataRequest, Tag(_DATA)],
    Discriminator(_kind_of_pairs),
]


# vLLM's own endpoints, with requests that were read once.


async def create_embedding(request: EmbeddingRequest, raw_request: Request) -> Any:
    return await embed.create_embedding(request=request, raw_request=raw_request)


async def create_classify(request: ClassificationRequest, raw_request: Request) -> Any:
    return await classify.create_classify(request=request, raw_request=raw_request)


async def create_pooling(request: PoolingRequest, raw_request: Request) -> Any:
    return await pooling.create_pooling(request=request, raw_request=raw_request)


async def create_score(request: ScoreRequest, raw_request: Request) -> Any:
    return await scoring.create_score(request=request, raw_request=raw_request)


async def do_rerank(request: RerankRequest, raw_request: Request) -> Any:
    return await scoring.do_rerank(request=request, raw_request=raw_request)


def attach(app: FastAPI, tasks: tuple[str, ...], model: Any) -> None:
    """Attach what the model does. tasks: vLLM's words for that. model: vLLM's configuration."""
    task = model.get_pooling_task(tasks)
    routes: list[tuple[Callable[..., Any], tuple[str, ...]]] = []
    if task:
        routes.append((create_pooling, (POOLING,)))
    if task == "classify":
        routes.append((create_classify, (CLASSIFY,)))
    if task == "embed":
        routes.append((create_embedding, (EMBEDDINGS,)))
    if enable_scoring_api(tasks, model):
        routes += [(create_score, SCORE_PATHS), (do_rerank, RERANK_PATHS)]
    for endpoint, paths in routes:
        for path in paths:
            app.add_api_route(path, endpoint, methods=["POST"], dependencies=JSON_ONLY)
