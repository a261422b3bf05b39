# SPDX-License-Identifier: Apache-2.0
"""LMCache's keys tell apart what vLLM's block hashes do."""

import hashlib
import json
import re
from typing import TYPE_CHECKING

from serving.patching.patch import ENGINE, Name, Patch

if TYPE_CHECKING:
    from vllm.v1.request import Request

_DIGESTED = re.compile(r"@[0-9a-f]{16}$")
"""The end of the names that we give adapters: a digest of their files."""


def has_key(request: "Request") -> bool:
    """Whether LMCache's key of a request says all that its KV depends on."""
    return (
        request.prompt_embeds is None
        and request.prompt_is_token_ids is None
        # The prompt of a session grows; LMCache's connector has read it once.
        and not request.resumable
        and all(it.identifier for it in request.mm_features)
    )


def salt(request: "Request") -> str:
    """The salt that LMCache gets for the request: the request's salt and its adapter."""
    adapter = request.lora_request
    if adapter is None:
        return request.cache_salt or ""
    name = adapter.lora_name
    names = [request.cache_salt, name, "" if _DIGESTED.search(name) else adapter.lora_path]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:32]


PATCH = Patch(
    name="cache_keys",
    process=ENGINE,
    names=(
        Name(
            "lmcache.integration.vllm.lmcache_mp_connector:"
            "LMCacheMPConnector._get_or_create_request_tracker",
            "self, request",
        ),
        Name(
            "lmcache.integration.vllm.lmcache_mp_metadata:LMCacheMPRequestTracker",
            has=("cache_salt",),
        ),
        Name(
            "vllm.v1.request:Request",
            has=(
                *("prompt_embeds", "prompt_is_token_ids", "resumable", "lora_request"),
                *("mm_features", "cache_salt"),
            ),
        ),
    ),
    does="Prevents lookup and storage of requests with KV that LMCache's keys do not determine, "
    "and adds the adapter to a request's salt. [The comparison](kv_cache_keys.md) has all fields.",
    why="LMCache makes its keys from token ids, identifiers of media and the salt. vLLM writes "
    "zeros as the ids of a prompt of embeddings, and keys do not include adapters.",
    without="a prompt of embeddings would be answered from another's KV, and an adapter from the "
    "base model's",
    closed=True,
    upstream="[prompt_embeds](../upstream/prompt_embeds.md)",
)
