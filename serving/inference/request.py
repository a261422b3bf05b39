# SPDX-License-Identifier: Apache-2.0
"""A request, from its head to what the engine is asked for: values that are whole from the start.

HttpCall is what a route gets, ClientRequest what a client wants once its body is there, and
InferenceRequest what the engine is to answer: the client's request, a line of it, or one of its
list.
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
    """How the JSON objects of a stream are kept apart."""

    content_type: bytes
    before: bytes
    after: bytes

    def frame(self, data: bytes) -> bytes:
        return self.before + data + self.after

    def text(self, text: bytes) -> bytes:
        """What a formatter wrote; it may have made a server-sent event of it already."""
        if self.before and text.startswith(b"data:"):
            return text.rstrip(b"\n") + self.after
        return self.frame(text)


JSON_LINES = Framing(b"application/jsonlines", b"", b"\n")
SSE = Framing(b"text/event-stream; charset=utf-8", b"data: ", b"\n\n")
NAMED_EVENTS = SSE._replace(before=b"event: error\ndata: ")
"""Streams whose events have names: all that is framed here are errors."""


@dataclass(slots=True)
class HttpCall:
    """An HTTP request as a route gets it. errors: the shape in which its API has errors. writer:
    writes parts of the answer's body at once, where there is such.
    """

    scope: Scope
    receive: Receive
    send: Send
    record: AccessRecord
    errors: ErrorShape
    writer: Writer | None = None


@dataclass(slots=True)
class ClientRequest:
    """A client's request for inference, whose body is there.

    send: what answers it. admitted: its end, and its places in the queue. errors: the shape in
    which its API has errors. known: the body's fields, where they have been read already. writer:
    writes what `send` would, where nothing stands between. transfer: where the engine gets the
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
        """The same request, for more clients than its first."""
        return dataclasses.replace(self, admitted=admitted, send=send, writer=None)

    def fields(self) -> RequestFields:
        """The body's, which are read once. Raises BadRequest."""
        if self.known is None:
            self.known = fields(self.body)
        return self.known

    def fields_of_json(self) -> RequestFields | None:
        """The same, or None for a body that is no JSON request as it came."""
        if self.known is None:
            self.known = fields_of_json(self.body)
        return self.known


@dataclass(slots=True)
class InferenceRequest:
    """What the engine is to answer: a client's request, a line of it, or one of its list.

    client: whose it is. send: what gets the answer. cancellation: its end, before that of the
    client's where it is a line. adapter: its name, "" for the base model by name, None where
    the request names none. framing: how the client wants a stream. begun: is called when the
    engine is given it. parse: reads the body; None for a body of whatever format it has. refusable:
    whether it can be refused because of what waits already. background: whether it goes while no
    other request waits, for however long that takes; its time begins then. content_type: the
    client's, which an input formatter may want to know. raw: the body is of that type, and no JSON.
    form: the body, where it is a form with a file. writer: as the client's, where the whole answer
    is this one's.
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
        """The same with what a formatter made of its body. Raises BadRequest."""
        return dataclasses.replace(self, body=body, fields=fields(body), raw=False)


def adapters_named(
    client: ClientRequest, body: RequestFields, adapters: AdapterRegistry | None
) -> str | list[str] | None:
    """The adapter that a request names, or the adapters where it names a list of them, one for
    each input; "" is the base model by name. body: the request's fields, or those of a line of it.

    The header comes before the body's `adapters`, that before the query's `adapter`, and that
    before `model`. Raises BadRequest for an adapter that is not here, and NotFound for an adapter's
    inner name: the model is never taken in an adapter's place, and no version for another. Those
    that the client's key may not use are not here, so that it does not learn which there are.
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
    """The `adapter` in the query. Raises BadRequest for more than one."""
    if ADAPTER_IN_QUERY.encode() not in scope["query_string"]:
        return None
    names = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    named = names.get(ADAPTER_IN_QUERY, [])
    if len(named) > 1:
        raise BadRequest(
            f"the query has adapter={len(named)} times; name one, or a list in the body's adapters",
            "adapter",
        )
    return named[0] if named else None


def adapter_named(
    client: ClientRequest, body: RequestFields, adapters: AdapterRegistry | None
) -> str | None:
    """The same for a request with one answer. Raises BadRequest for a list."""
    named = adapters_named(client, body, adapters)
    if isinstance(named, list):
        raise BadRequest("adapters should be a string", "adapters")
    return named


def require_lora(adapters: AdapterRegistry | None) -> AdapterRegistry:
    """The registry. Raises BadRequest where there is none."""
    if adapters is None:
        raise BadRequest("LoRA is not enabled. Set OPTION_ENABLE_LORA=true.")
    return adapters
