# SPDX-License-Identifier: Apache-2.0
"""Calls about a conversation's KV in the tiers, without a request to the engine.

The path has the id that the conversation's requests name. With the caller's tenant, its digest is
the conversation's name in the tiers, so a tenant reaches no other's conversations.
"""

from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.responses import Response

from serving.cache_hints.intent import ID_BYTES, digest
from serving.errors import BadRequest, NotFound
from serving.inference.pipeline import Pipeline
from serving.inference.request import HttpCall
from serving.kv_cache.session_client import SessionClient


async def look(call: HttpCall, pipeline: Pipeline) -> dict[str, Any]:
    """GET: what the tiers keep of a conversation."""
    tiers, session = _named(call, pipeline)
    kept = await tiers.look(session)
    if not kept.seconds:
        raise NotFound(
            "the tiers keep nothing for this conversation: it has ended, its lifetime is over, or "
            "none of its requests named it with a prompt of at least a chunk"
        )
    return {"tokens": kept.tokens, "seconds": round(kept.seconds)}


async def end(call: HttpCall, pipeline: Pipeline) -> dict[str, Any]:
    """DELETE: the conversation has ended. The query `forget=true` also deletes its KV."""
    tiers, session = _named(call, pipeline)
    return {"tokens": (await tiers.end(session, forget=_forgets(call))).tokens}


async def prefetch(call: HttpCall, pipeline: Pipeline) -> None:
    """POST: the conversation's next turn comes soon."""
    tiers, session = _named(call, pipeline)
    content = msgspec.json.encode({"tokens": (await tiers.prefetch(session)).tokens})
    await call.reply(Response(content, 202, media_type="application/json"))


def _forgets(call: HttpCall) -> bool:
    """Return the query's `forget`, which is false by default. Raises BadRequest."""
    query = parse_qs(call.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    said = ",".join(query.get("forget", ["false"]))
    if said not in ("true", "false"):
        raise BadRequest(f"forget={said:.40} in the query: use true or false")
    return said == "true"


def _named(call: HttpCall, pipeline: Pipeline) -> tuple[SessionClient, str]:
    """Return the tiers, and the conversation's name in them. Raises BadRequest and NotFound."""
    if not pipeline.tiers:
        raise NotFound(
            "conversations are kept in no tiers here: `plan` says whether there are KV cache "
            "tiers, and OPTION_KV_RETENTION_S=0 keeps no conversations"
        )
    name: str = call.scope["path_params"]["id"]
    if len(name.encode("utf-8", "replace")) > ID_BYTES:
        raise BadRequest(f"the conversation's id has more than {ID_BYTES} bytes; use a shorter one")
    return pipeline.tiers, digest(pipeline.tenant(call), name)
