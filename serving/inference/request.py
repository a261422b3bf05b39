# SPDX-License-Identifier: Apache-2.0
"""A request, from its head to the engine's call, as values that are complete when they are made.

A route gets an HttpCall. A ClientRequest also has the body. An InferenceRequest is one request to
the engine: the client's whole request, one of its JSON lines, or one item of its list.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from handlers.multipart import Form
from serving.cancellation import Cancellation
from serving.errors import BadRequest, ErrorShape, NotFound
from serving.http.bodies import Writer, header
from serving.inference.admission import Admitted
from serving.inference.fields import Parse, RequestFields, fields, fields_of_json
from serving.lora.registry import AdapterRegistry
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


@dataclass(slots=True)
class HttpCall:
    """An HTTP request as a route gets it.

    errors: the shape of its API's errors. writer: writes parts of the answer's body without
    awaiting (the fast path), if the connection has one.
    """

    scope: Scope
    receive: Receive
    send: Send
    record: AccessRecord
    errors: ErrorShape
    writer: Writer | None = None


@dataclass(slots=True)
class ClientRequest:
    """A client's request for inference, with its body.

    send: sends the answer. admitted: its cancellation, and its places in the queue. errors: the
    shape of its API's errors. known: the body's fields, if they have been read already. writer:
    writes the answer past `send`, if no code between must see it. transfer: the source of the
    prompt's KV, for the first call that takes it.
    """

    scope: Scope
    send: Send
    admitted: Admitted
    record: AccessRecord
    errors: ErrorShape
    body: bytes
    known: RequestFields | None = None
    writer: Writer | None = None
    transfer: dict[str, object] | None = None

    def take_transfer(self) -> dict[str, object] | None:
        taken, self.transfer = self.transfer, None
        return taken

    def again(self, admitted: Admitted, send: Send) -> "ClientRequest":
        """Return the same request, shared by several clients."""
        return dataclasses.replace(self, admitted=admitted, send=send, writer=None)

    def fields(self) -> RequestFields:
        """Return the body's fields, which are read once. Raises BadRequest."""
        if self.known is None:
            self.known = fields(self.body)
        return self.known

    def fields_of_json(self) -> RequestFields | None:
        """Return the same, or None if the body is not a request in JSON."""
        if self.known is None:
            self.known = fields_of_json(self.body)
        return self.known


@dataclass(slots=True)
class InferenceRequest:
    """One request to the engine: a client's whole request, one of its lines, or one list item.

    client: the client's request that it belongs to. send: gets the answer. cancellation: its
    cancellation; a line may be cancelled before its client's request. adapter: its name, "" for the
    base model by name, None if the request names none. framing: the client's framing of a stream.
    begun: called when the engine gets the request. parse: reads the body; None to decide by the
    body's keys. refusable: whether a full queue may refuse it. background: whether it waits until
    no other request waits, without a limit; its timeout begins then. content_type: the client's,
    for an input formatter. raw: whether the body has that type, and is not JSON. form: the body, if
    it is a form with a file. writer: the client's writer, if this request has the whole answer.
    """

    client: ClientRequest
    send: Send
    cancellation: Cancellation
    body: bytes
    fields: RequestFields
    adapter: str | None
    framing: Framing
    begun: Callable[[], None]
    parse: Parse | None = None
    refusable: bool = True
    background: bool = False
    content_type: str = ""
    raw: bool = False
    form: Form | None = None
    writer: Writer | None = None

    def rewritten(self, body: bytes) -> "InferenceRequest":
        """Return the same request with a formatter's body. Raises BadRequest."""
        return dataclasses.replace(self, body=body, fields=fields(body), raw=False)


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
    scope, may_use = client.scope, client.record.caller.may_use
    in_query = _in_query(scope)
    named: str | list[str] | None = header(scope, ADAPTER_ID).decode("latin-1") or None
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
