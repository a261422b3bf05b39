# SPDX-License-Identifier: Apache-2.0
"""In the server's process: vLLM 0.32's requests for embeddings, each read as one kind.

vLLM has five models of such a request, and pydantic reads every body as all of them: 18 µs for each
token in a list of them, on the event loop, a minute for a body of 7 MB.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BeforeValidator, Discriminator, Tag
from vllm.entrypoints.pooling.embed import api_router
from vllm.entrypoints.pooling.embed.protocol import (
    EmbeddingBatchChatInputRequest,
    EmbeddingBatchChatRequest,
    EmbeddingChatInputRequest,
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
    reject_removed_pooling_parameters,
)
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from serving.protocol import EMBEDDINGS

# In brackets, since an error's place begins with the tag, and vLLM leaves brackets out of messages.
_TEXTS = "[texts]"
_CHAT, _CHATS = "[chat]", "[chats]"
_CHAT_IN_INPUT, _CHATS_IN_INPUT = "[chat in input]", "[chats in input]"


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


EmbeddingRequest = Annotated[
    Annotated[EmbeddingCompletionRequest, Tag(_TEXTS)]
    | Annotated[EmbeddingChatRequest, Tag(_CHAT)]
    | Annotated[EmbeddingBatchChatRequest, Tag(_CHATS)]
    | Annotated[EmbeddingChatInputRequest, Tag(_CHAT_IN_INPUT)]
    | Annotated[EmbeddingBatchChatInputRequest, Tag(_CHATS_IN_INPUT)],
    Discriminator(_kind),
    BeforeValidator(reject_removed_pooling_parameters),
]

router = APIRouter()


@router.post(EMBEDDINGS, dependencies=[Depends(validate_json_request)])
async def create_embedding(request: EmbeddingRequest, raw_request: Request) -> Any:
    """vLLM's own endpoint, with a request that was read once."""
    return await api_router.create_embedding(request=request, raw_request=raw_request)
