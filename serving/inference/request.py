# SPDX-License-Identifier: Apache-2.0
"""A request, from its head to the engine's call, as values that are complete when they are made.
They are structs of msgspec's, because Python makes a frozen dataclass field by field.

A route gets an HttpCall. A ClientRequest also has the body. An InferenceRequest is one request to
the engine: the client's whole request, one of its JSON lines, or one item of its list.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qs

import msgspec
from starlette.types import ASGIApp, Receive, Scope

from handlers.multipart import Form
from lmi_config.options.declared import Settings
from serving.cancellation import Cancellation
from serving.errors import BadRequest, ErrorShape, NotFound
from serving.http.bodies import Answer, Writer
from serving.inference.admission import Admitted
from serving.inference.content.fields import Parse, RequestFields, fields
from serving.lora.adapter_registry import AdapterRegistry
from serving.observability.access_log import AccessRecord
from serving.protocol import ADAPTER_ID, ADAPTER_IN_QUERY


class Framing(NamedTuple):
    """How the JSON objects of a stream are separated."""

    content_type: bytes
    before: bytes
    after: bytes

    def frame(self, data: bytes) -> bytes:
        return self.before + data + self.after

    def text(self, text: bytes) -> bytes:
        """Frame a formatter's text, unless the formatter has made it an SSE event already."""
        if self.before and text.startswith(b"data:"):
            return text.rstrip(b"\n") + self.after
        return self.frame(text)


JSON_LINES = Framing(b"application/jsonlines", b"", b"\n")
SSE = Framing(b"text/event-stream; charset=utf-8", b"data: ", b"\n\n")
NAMED_EVENTS = SSE._replace(before=b"event: error\ndata: ")
"""For streams whose events have names. Only errors are framed with it."""


class HttpCall(msgspec.Struct, frozen=True):
    """An HTTP request as a route gets it. errors: the shape of its API's errors."""

    scope: Scope
    receive: Receive
    answer: Answer
    record: AccessRecord
    errors: ErrorShape

    async def reply(self, response: ASGIApp) -> None:
        """Answer with a response of Starlette's."""
        await response(self.scope, self.receive, self.answer)


class ClientRequest(msgspec.Struct, frozen=True, dict=True):
    """A client's request for inference, admitted, with its body.

    admitted: its cancellation, and its places in the queue. errors: the shape of its API's errors.
    transfer: the source of the prompt's KV.
    """

    scope: Scope
    answer: Answer
    admitted: Admitted
    record: AccessRecord
    errors: ErrorShape
    body: bytes
    transfer: Mapping[str, object] | None = None

    @functools.cached_property
    def headers(self) -> Mapping[bytes, bytes]:
        """The request's headers. The first of several with the same name counts."""
        return dict(reversed(self.scope["headers"]))

    @functools.cached_property
    def fields(self) -> RequestFields:
        """The body's fields, which are read once. Raises BadRequest."""
        return fields(self.body)

    @property
    def fields_of_json(self) -> RequestFields | None:
        """The same, or None if the body is not a request in JSON."""
        try:
            return self.fields
        except BadRequest:
            return None


class BodyPart(NamedTuple):
    """A line of a client's body, or an item of its list, which has its own answer.

    cancellation: a line may be cancelled before its client's request. begun: called when the engine
    gets it.
    """

    body: bytes
    answer: Writer
    cancellation: Cancellation
    begun: Callable[[], None]


class InferenceRequest(msgspec.Struct, frozen=True):
    """One request to the engine: a client's whole request, one of its lines, or one list item.

    client: the client's request that it belongs to. body, answer, cancellation, begun: as BodyPart
    has them. adapter: its name, "" for the base model by name, None if the request names none.
    framing: the client's framing of a stream. parse: reads the body; None to decide by the body's
    keys. refusable: whether a full queue may refuse it. background: whether it waits until no other
    request waits, without a limit; its timeout begins then. content_type: the client's, for an
    input formatter. raw: whether the body has that type, and is not JSON. form: the body, if it is
    a form with a file. transfer: the source of the prompt's KV.
    """

    client: ClientRequest
    body: bytes
    answer: Writer
    cancellation: Cancellation
    begun: Callable[[], None]
    fields: RequestFields
    adapter: str | None
    framing: Framing
    parse: Parse | None
    refusable: bool
    background: bool
    content_type: str
    raw: bool
    form: Form | None
    transfer: Mapping[str, object] | None

    def timeout(self, found: RequestFields, settings: Settings) -> int | None:
        """Return its timeout in seconds, or None without one. found: its fields as formatted."""
        if self.background:
            return None
        return settings.stream_timeout if found.streamed else settings.whole_timeout


def inference_request(
    client: ClientRequest,
    adapters: AdapterRegistry | None,
    part: BodyPart | None = None,
    *,
    adapter: str | None = None,
    framing: Framing = SSE,
    parse: Parse | None = None,
    refusable: bool = True,
    background: bool = False,
    content_type: str = "",
    raw: bool = False,
    form: Form | None = None,
    first: bool = True,
) -> InferenceRequest:
    """Build a request to the engine: of a client's whole request, or of a part of it.

    adapter: if its name is known already. first: whether it is the first part, whose prompt another
    server may have computed. Raises BadRequest and NotFound.
    """
    if form:
        found = fields(form.json())
    elif part:
        found = fields(part.body)
    else:
        found = RequestFields() if raw else client.fields
    if adapter is None:
        adapter = adapter_named(client, found, adapters)
    whole = BodyPart(client.body, client.answer, client.admitted, client.admitted.release_place)
    return InferenceRequest(
        *(client, *(part or whole), found, adapter, framing, parse, refusable, background),
        *(content_type, raw, form, client.transfer if first else None),
    )


def adapters_named(
    client: ClientRequest, body: RequestFields, adapters: AdapterRegistry | None
) -> str | list[str] | None:
    """Return the adapter that a request names, or a list with one for each input; "" is the base
    model by name. body: the fields of the request, or of one of its lines.

    The order of precedence is: the header, the body's `adapters`, the query's `adapter`, `model`.
    Raises BadRequest for an unknown adapter, and NotFound for an adapter's inner name. Neither the
    base model nor another version ever replaces an adapter. An adapter that the client's key may
    not use counts as unknown, so that the client does not learn that it exists.
    """
    may_use = client.record.caller.may_use
    in_query = _in_query(client.scope)
    named: str | list[str] | None = client.headers.get(ADAPTER_ID, b"").decode("latin-1") or None
    if not named:
        named = body.adapter_names()
        if named is None:
            named = in_query
        if named is None and body.model and adapters:
            if "@" in body.model:
                raise NotFound(f"The model {body.model!r:.140} does not exist.")
            return body.model if body.model in adapters and may_use(body.model) else None
    for name in named if isinstance(named, list) else [named]:
        if name and not (name in require_lora(adapters) and may_use(name)):
            raise BadRequest(f"adapter {name!r:.140} is not registered", "adapters")
    return named


def _in_query(scope: Scope) -> str | None:
    """Return the query's `adapter`, or None. Raises BadRequest for more than one."""
    if ADAPTER_IN_QUERY.encode() not in scope["query_string"]:
        return None
    names = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    named = names.get(ADAPTER_IN_QUERY, [])
    if len(named) > 1:
        raise BadRequest(
            f"the query has {len(named)} adapters; name one, or a list in the body's adapters",
            "adapter",
        )
    return named[0] if named else None


def adapter_named(
    client: ClientRequest, body: RequestFields, adapters: AdapterRegistry | None
) -> str | None:
    """Return the adapter of a request with one answer. Raises as adapters_named() does, and
    BadRequest for a list.
    """
    named = adapters_named(client, body, adapters)
    if isinstance(named, list):
        raise BadRequest("adapters should be a string", "adapters")
    return named


def require_lora(adapters: AdapterRegistry | None) -> AdapterRegistry:
    """Return the registry. Raises BadRequest if there is none."""
    if adapters is None:
        raise BadRequest("LoRA is not enabled. Set OPTION_ENABLE_LORA=true.")
    return adapters
