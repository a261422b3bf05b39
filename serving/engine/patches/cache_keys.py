# SPDX-License-Identifier: Apache-2.0
"""In the scheduler: LMCache's keys tell apart what vLLM's block hashes do.

What it does: requests whose KV does not follow from what LMCache's keys (0.5.6) are made of are
neither looked up nor stored, and a request's adapter becomes a part of its salt.

Why: LMCache's keys are made of token ids, media's identifiers in the place of their placeholders,
and the salt. vLLM writes zeros for the ids of a prompt of embeddings. Keys know no adapters.
docs/explanation/kv_cache_keys.md has the whole comparison.

Upstream: docs/upstream/prompt_embeds.md.

Without it: a prompt of embeddings is answered from any other's KV of its length. The connector does
not start where `applies()` is false.
"""

import hashlib
import inspect
import json
import re
from typing import TYPE_CHECKING

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker
from vllm.v1.request import Request as VllmRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

_DIGESTED = re.compile(r"@[0-9a-f]{16}$")
"""The end of the names that we give adapters, which says what is in their files."""


def applies() -> bool:
    """Whether everything that this relies on is in the installed versions."""
    create = LMCacheMPConnector._get_or_create_request_tracker
    asked = {"prompt_embeds", "prompt_is_token_ids", "resumable", "lora_request", "mm_features"}
    return (
        [*inspect.signature(create).parameters] == ["self", "request"]
        and "cache_salt" in LMCacheMPRequestTracker.__dataclass_fields__
        and asked | {"cache_salt"} <= inspect.signature(VllmRequest.__init__).parameters.keys()
    )


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
    """What LMCache gets as the request's salt: its own, and which adapter computes its KV."""
    adapter = request.lora_request
    if adapter is None:
        return request.cache_salt or ""
    name = adapter.lora_name
    names = [request.cache_salt, name, "" if _DIGESTED.search(name) else adapter.lora_path]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:32]
