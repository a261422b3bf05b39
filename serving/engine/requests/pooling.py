# SPDX-License-Identifier: Apache-2.0
"""In the server's process: vLLM's answers for models that do not generate, by path. Each request is
read as one kind.

vLLM has five models of a request for embeddings and four of one for scores. pydantic reads every
body as all of them, which takes 18 µs for each token in a list of them, on the event loop. A body
of 7 MB would take a minute.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Tag
from vllm.entrypoints.pooling.classify.protocol import (
    ClassificationChatRequest,
    ClassificationCompletionRequest,
)
from vllm.entrypoints.pooling.embed.protocol import (
    EmbeddingBatchChatInputRequest,
    EmbeddingBatchChatRequest,
    EmbeddingChatInputRequest,
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
    reject_removed_pooling_parameters,
)
from vllm.entrypoints.pooling.pooling.protocol import PoolingChatRequest, PoolingCompletionRequest
from vllm.entrypoints.pooling.scoring.protocol import (
    RerankRequest,
    ScoreDataRequest,
    ScoreQueriesDocumentsRequest,
    ScoreQueriesItemsRequest,
    ScoreTextRequest,
)
from vllm.entrypoints.pooling.utils import enable_scoring_api

from serving.protocol import CLASSIFY, EMBEDDINGS, POOLING, RERANK_PATHS, SCORE_PATHS

# In brackets, since an error's place begins with the tag, and vLLM leaves brackets out of messages.
_TEXTS = "[texts]"
_CHAT, _CHATS = "[chat]", "[chats]"
_CHAT_IN_INPUT, _CHATS_IN_INPUT = "[chat in input]", "[chats in input]"
_DOCUMENTS, _ITEMS, _DATA = "[documents]", "[items]", "[data]"


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
    """The kind of a request that has texts or one chat."""
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


def kinds(tasks: tuple[str, ...], model: Any) -> Mapping[str, tuple[Any, str]]:
    """By path, for the model's tasks: the kinds of requests, and the name of vLLM's serving object.
    tasks: vLLM's names of the model's tasks. model: vLLM's configuration.
    """
    task = model.get_pooling_task(tasks)
    found: dict[str, tuple[Any, str]] = {}
    if task:
        found[POOLING] = PoolingRequest, "serving_pooling"
    if task == "classify":
        found[CLASSIFY] = ClassificationRequest, "serving_classification"
    if task == "embed":
        found[EMBEDDINGS] = EmbeddingRequest, "serving_embedding"
    if enable_scoring_api(tasks, model):
        found |= dict.fromkeys(SCORE_PATHS, (ScoreRequest, "serving_scores"))
        found |= dict.fromkeys(RERANK_PATHS, (RerankRequest, "serving_scores"))
    return found
