# SPDX-License-Identifier: Apache-2.0
"""The third step of a request: its adapter, and the salt of those who may share its caches."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from lmi_config.options.declared import Settings
from serving import protocol
from serving.cache_hints import documents
from serving.cache_hints.hints import Hints
from serving.cache_hints.intent import NO_INTENT, READ_HERE, CacheIntent
from serving.engine.base import Call
from serving.errors import NotFound
from serving.inference.content import media
from serving.inference.prepared import Prepared
from serving.inference.request import InferenceRequest
from serving.kv_cache import retention_hint
from serving.kv_cache import salt as kv_salt
from serving.lora.adapter import Adapter

LAST = 2**31 - 1
"""vLLM's priority of background requests: vLLM runs low numbers first."""


class Isolated(NamedTuple):
    """The values that isolate a request from others in the engine.

    body: its values, with the model's name. adapter, salt, name_medium, priority: as Call has them.
    intent: the cache intent of the request's conversation. retention: the same for the KV cache
    tiers.
    """

    body: dict[str, Any]
    adapter: str | None
    salt: str | None
    name_medium: Callable[[str], str] | None
    priority: int | None
    intent: CacheIntent
    retention: Mapping[str, object]


async def isolate(
    request: InferenceRequest,
    prepared: Prepared,
    adapter: Adapter | None,
    tenant: str | None,
    *,
    hints: Hints,
    settings: Settings,
) -> Isolated:
    """Return what separates a request from others, and name its media. Raises BadRequest and
    NotFound.
    """
    path, found = prepared.path, prepared.fields
    inner = adapter.inner if adapter else None
    salt = kv_salt.digest(tenant, found.salt(), inner)
    if prepared.media:
        await media.give_uuids(prepared.media, salt)
    body = prepared.body
    if not READ_HERE.isdisjoint(body):
        body = {key: it for key, it in body.items() if key not in READ_HERE}
    if not adapter:
        if request.adapter == "" or (
            # Anthropic's format requires a model, and requests to SageMaker have none.
            not request.parse and path == protocol.MESSAGES and not found.model
        ):
            body = {**body, "model": settings.model_names[0]}
        else:
            _require_known(found.model, settings)
    nameless = salt and path in protocol.AGENTS_PATHS
    intent = _intent(request, prepared, tenant, hints)
    return Isolated(
        body,
        inner,
        None if path in protocol.TOKENIZER_PATHS else salt,
        functools.partial(kv_salt.scoped_name, salt) if nameless else None,
        _priority(request, settings),
        intent,
        {} if intent is NO_INTENT else retention_hint.told(intent, tenant, settings.kv_retention),
    )


def engine_call(
    request: InferenceRequest, prepared: Prepared, isolated: Isolated, trace: Mapping[str, str]
) -> Call:
    """Return the engine's call. trace: the headers of the trace context."""
    form = request.form
    return Call(
        prepared.path,
        isolated.body,
        prepared.size,
        request.cancellation,
        request.client.headers.get(protocol.REQUEST_ID, b"").decode("latin-1"),
        file=form.file if form else None,
        is_json=_is_json(request, prepared.path),
        adapter=isolated.adapter,
        salt=isolated.salt,
        name_medium=isolated.name_medium,
        priority=isolated.priority,
        transfer={**(prepared.transfer or {}), **isolated.retention} or None,
        trace=trace,
        session=isolated.intent.session or None,
        marked=isolated.intent.marked > 0,
        steps=prepared.rendering.steps is not None,
    )


def _intent(
    request: InferenceRequest, prepared: Prepared, tenant: str | None, hints: Hints
) -> CacheIntent:
    """Return the hints of a request about its conversation's KV cache, and tell them the client
    that asks for them. LMI's parameters have their own `session_id`. The request's documents are
    put into the order that its client allows.
    """
    if prepared.path in protocol.NOT_GENERATED:
        return NO_INTENT
    client, keys = request.client, prepared.given
    if prepared.fields.session_id:
        keys = msgspec.structs.replace(keys, session_id=prepared.fields.session_id)
    low = request.background or client.record.caller.sheddable
    order = functools.partial(_order, request, prepared)
    sent = client.scope["headers"]
    intent = hints.of(sent, keys, request.body, tenant, low=low, order=order)
    answered = client.record.headers
    if client.headers.get(protocol.CACHE) and protocol.CACHE not in dict(answered):
        answered.append((protocol.CACHE, intent.told.encode()))
    return intent


def _order(request: InferenceRequest, prepared: Prepared) -> bool:
    """Put the request's documents into canonical order, which the answer's header names. Lines of a
    body and of a batch have no headers, so their documents keep the order as sent. Returns whether
    there is a canonical order.
    """
    client = request.client
    if request.answer is not client.answer or request.background:
        return False
    found = documents.order(prepared.path, prepared.body, prepared.size)
    if found:
        client.record.headers.append((protocol.DOCUMENT_ORDER, found.encode()))
    return bool(found)


def _require_known(model: str | None, settings: Settings) -> None:
    """Raise NotFound unless `model` is one of the base model's names. The engine may know other
    names, which neither the registry nor the client's key has checked.
    """
    if model and model not in settings.model_names:
        names = ", ".join(settings.model_names)
        raise NotFound(
            f"The model `{model:.140}` does not exist. The model here is called {names:.300}: "
            "send one of these or none. OPTION_ENDPOINT_NAME adds the name of an endpoint"
        )


def _priority(request: InferenceRequest, settings: Settings) -> int | None:
    """Return the request's priority in the engine's queue; None if its body decides."""
    if settings.engine.get("scheduling_policy") != "priority":
        return None
    caller = request.client.record.caller
    if request.background:
        return LAST
    return caller.priority if caller.name or caller.priority else None


def _is_json(request: InferenceRequest, path: str) -> bool:
    """Whether the body is JSON. On /invocations every body is JSON, with any content type."""
    client = request.client
    kind = client.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return path != client.scope["path"] or kind == b"application/json"
