# SPDX-License-Identifier: Apache-2.0
"""The facts that strategies know of a request, and their extraction from its headers and body.

Only the relevant keys of a JSON body are read, and prompts are neither decoded nor copied. Forms
and files are forwarded unread. Replicas validate bodies; a body that cannot be read here is still
forwarded.
"""

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import cast
from urllib.parse import parse_qs

import msgspec

from handlers.records import MOST_VALUES, has_more, is_list
from serving.cache_hints import documents, intent
from serving.cache_hints.intent import NO_INTENT, NONE, CacheIntent, HintKeys
from serving.protocol import (
    ADAPTER_ID,
    ADAPTER_IN_QUERY,
    BILLING,
    CHAT_COMPLETIONS,
    COUNT_TOKENS,
    MESSAGES,
    NOT_GENERATED,
    SESSION_ID,
    TOKENIZER_PATHS,
)
from serving.router.policy.prefix_index import BYTES_PER_TOKEN, chain

LONGEST_ADAPTER = 1_024
"""Characters of a name that the router remembers as an adapter's; a longer one is none."""
LONGEST_LIST = 128 * 1024
"""Bytes of a list of names that is read."""
NEW_SESSION = "NEW_SESSION"
"""The value that begins a session, in the header or as a body's requestType."""
_USER_KEYS = ("user_id", "user")
"""Keys that name a session for the strategy `session`, after all others."""

_NONE = NONE
_MEDIA = re.compile(rb'"data(:[^"]*|"\s*:\s*"[A-Za-z0-9+/]{1000,}=*)"')
"""As a URI, or as Anthropic has them."""
_BEGIN_OF_MEDIA = b'"data'
_MEDIA_TOKENS = 1_000
"""The assumed tokens of an image in a prompt, or of a file; its size does not tell them."""
_BILL = BILLING.encode()
_BILLS = re.compile(_BILL + rb'[^"\\]*')
_UNCOMPUTED = tuple(path.encode() for path in (COUNT_TOKENS, *TOKENIZER_PATHS))
"""Paths whose prompts are computed by no engine."""
_UNCACHED = frozenset(path.encode() for path in NOT_GENERATED)
"""Those, and others whose prompts are in no KV cache afterwards."""
_BYTES = (b"multipart/", b"image/", b"audio/", b"video/", b"application/octet-stream")
"""Types of files, and of forms with a file, most of all sound: of none a prefix is cached."""

_CONSENT = msgspec.Raw(b'"%b"' % documents.CANONICAL.encode())
_TRUE = msgspec.Raw(b"true")
_EMPTY = msgspec.Raw(b'""')

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that strategies know of one request."""

    tokens: int = 0
    """Its prompt's, about."""
    chain: Sequence[int] = ()
    """Its prompt's hashes, as prefix_index.chain() makes them."""
    blocks: Mapping[int, Sequence[int]] | None = None
    """After tokenisation, the hashes of its tokens: one for each block, by block size."""
    plain: bool = False
    """Whether its blocks are those of requests without a tenant, salt or adapter."""
    model: str = ""
    """The model that it names, if only some replicas serve that; else ""."""
    adapter: str = ""
    """The LoRA adapter, or ""."""
    salt: str | None = None
    """The salt that separates its KV cache, if the body has one."""
    session: str = ""
    """The digest of its session's name, or ""."""
    intent: CacheIntent = NO_INTENT
    """Its hints about its conversation's KV cache."""
    begins_session: bool = False
    """Whether it asks for a new one."""
    streamed: bool = False
    """Whether its answer is."""
    within: float | None = None
    """Seconds that its first token may take, if its replica is chosen by that."""


Body = bytes | bytearray
Reader = Callable[[Mapping[bytes, bytes], Body, bytes, str | None], RoutingRequest]
"""Reads a request's headers, by their names in lower case, its body, its target and its tenant."""


class _Keys(HintKeys):
    """The keys of a JSON body that matter to every strategy. HintKeys has more."""

    model: msgspec.Raw = _NONE
    adapters: msgspec.Raw = _NONE
    cache_salt: msgspec.Raw = _NONE
    stream: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    inputs: msgspec.Raw = _NONE
    documents: msgspec.Raw = _NONE


class _Message(msgspec.Struct):
    """A message of `messages`, as far as it may have media."""

    content: msgspec.Raw = _NONE


_messages = msgspec.json.Decoder(list[_Message]).decode


class RequestReader:
    """Reads requests, as far as a strategy wants to know of them."""

    def __init__(
        self,
        strategy: str,
        session_key: str | None,
        adapters: Collection[str],
        models: Collection[str] | None = (),
    ) -> None:
        """session_key: the header, or key of a JSON body, that names a session, besides SageMaker's
        header; None for the customary ones. adapters: names of adapters that a body may have as its
        `model`. models: names of models that only some replicas serve; None for all names. Both may
        change.
        """
        keys: tuple[str, ...] = ()
        if session_key:
            keys = (session_key,)
        elif strategy == "session":
            keys = _USER_KEYS
        # Operators choose keys that are no names of attributes.
        fields = {f"session{number}": key for number, key in enumerate(keys)}
        body = msgspec.defstruct(
            "_Body",
            [(field, msgspec.Raw, _NONE) for field in fields],
            bases=(_Keys,),
            rename=fields,
        )
        self._decode = cast(Callable[[Body], _Keys], msgspec.json.Decoder(body).decode)
        self._unreadable = cast(_Keys, body())
        self._session_header = session_key.lower().encode() if session_key else b""
        self._session_fields = tuple(fields)
        self._only_named = bool(session_key) and strategy == "session"
        self._has_own = bool(session_key or fields)
        self._chained = strategy in ("prefixaware", "kvaware")
        self._adapters = adapters
        self._models = models

    def read(
        self,
        headers: Mapping[bytes, bytes],
        body: Body,
        target: bytes = b"",
        tenant: str | None = None,
    ) -> RoutingRequest:
        """The facts about a request. tenant: whose it is, as serving/kv_cache/salt.py has it."""
        file = headers.get(b"content-type", b"").lower().startswith(_BYTES)
        if file:
            body = b""
        try:
            keys = self._decode(body)
        except _UNREADABLE:
            keys = self._unreadable
        given = keys.prompt or keys.inputs or keys.messages or keys.input
        prompt = memoryview(given or body)
        tokens = _tokens(prompt, body, chat=bool(given) and given is keys.messages)
        path = target.partition(b"?")[0]
        if keys.document_order == _CONSENT and given is keys.messages:
            prompt = memoryview(_in_order(keys, path.decode("latin-1"), len(body)))
            tokens += len(bytes(keys.documents)) // BYTES_PER_TOKEN
        tokens += _MEDIA_TOKENS if file else 0
        if keys.system or keys.instructions:
            system = bytes(keys.system or keys.instructions)
            if _BILL in system:
                system = _BILLS.sub(b"", system)
            prompt = memoryview(system + prompt)
            tokens += len(system) // BYTES_PER_TOKEN
        if len(adapter := self._adapter(headers, keys, target)) > LONGEST_ADAPTER:
            adapter = ""
        tools = bytes(keys.tools)
        links: Sequence[int] = ()
        if self._chained and path not in _UNCACHED:
            # What else decides whether KV caches of equal prompts are one.
            links = chain(prompt, (adapter, tenant, bytes(keys.cache_salt), tools))
        computed = path not in _UNCOMPUTED
        own = self._own(headers, keys) if self._has_own else ""
        named = own if self._session_header else ""
        # Marks name no conversation, and to search for one costs as much as all else.
        hints = intent.read(headers, keys, None, tenant, own=named)
        session = hints.session
        if self._has_own:
            session = self._session(headers, session, own, tenant)
        return RoutingRequest(
            tokens=tokens + len(tools) // BYTES_PER_TOKEN if computed else 0,
            chain=links,
            model=self._model(keys),
            adapter=adapter,
            salt=(_text(keys.cache_salt) or None) if keys.cache_salt else None,
            session=session,
            intent=hints,
            begins_session=headers.get(SESSION_ID) == intent.NEW_SESSION
            or bool(keys.request_type and _text(keys.request_type) == NEW_SESSION),
            streamed=keys.stream == _TRUE,
        )

    def _own(self, headers: Mapping[bytes, bytes], keys: _Keys) -> str:
        """The conversation's id by the header or key that the operator or the strategy names."""
        values = [getattr(keys, it) for it in self._session_fields]
        return intent.own(headers, self._session_header, values)

    def _model(self, keys: _Keys) -> str:
        if self._models is None:
            return _text(keys.model)
        return model if self._models and (model := _text(keys.model)) in self._models else ""

    def _adapter(self, headers: Mapping[bytes, bytes], keys: _Keys, target: bytes) -> str:
        if named := headers.get(ADAPTER_ID):
            return named.decode("latin-1")
        if keys.adapters and ((adapter := _text(keys.adapters)) or keys.adapters == _EMPTY):
            return adapter  # "" is the base model
        if b"?" in target and (queried := _queried(target)) is not None:
            return queried
        if self._adapters and (model := _text(keys.model)) in self._adapters:
            return model
        return ""

    def _session(
        self, headers: Mapping[bytes, bytes], found: str, own: str, tenant: str | None
    ) -> str:
        """The digest of the session's name. found: by the hints."""
        if self._only_named and not own and SESSION_ID not in headers:
            return ""
        return found or (intent.digest(tenant, own) if own else "")


def _in_order(keys: _Keys, path: str, size: int) -> bytes:
    """A chat's documents and messages, in the order that its replica serves. size: the body's."""
    given = keys.documents, keys.messages
    if size <= documents.LARGEST and not any(has_more(it, MOST_VALUES) for it in given):
        read = {"documents": keys.documents, "messages": keys.messages}
        with contextlib.suppress(*_UNREADABLE):
            chat = {name: msgspec.json.decode(it) for name, it in read.items() if it}
            documents.order(MESSAGES if path == MESSAGES else CHAT_COMPLETIONS, chat, size)
            return json.dumps(chat).encode()
    return bytes(keys.messages)


def _queried(target: bytes) -> str | None:
    """The adapter that a target's query names."""
    if ADAPTER_IN_QUERY.encode() not in target:
        return None
    query = target.partition(b"?")[2].decode("latin-1")
    return next(iter(parse_qs(query, keep_blank_values=True).get(ADAPTER_IN_QUERY, ())), None)


_texts = msgspec.json.Decoder(str | list[str]).decode


def _text(raw: msgspec.Raw) -> str:
    """A JSON text, the first of a list of them, or ""."""
    if raw is _NONE or (len(raw) > LONGEST_LIST and is_list(raw)):
        return ""
    try:
        found = _texts(raw)
    except _UNREADABLE:
        return ""
    return found if isinstance(found, str) else next(iter(found), "")


def _tokens(prompt: memoryview, body: Body, *, chat: bool) -> int:
    """About how many tokens a prompt has. chat: whether it is the body's messages."""
    size, media = len(prompt), 0
    for part in _with_media(prompt, body, chat=chat):
        for medium in _MEDIA.finditer(part):
            size -= len(medium[0])
            media += _MEDIA_TOKENS
    return size // BYTES_PER_TOKEN + media


def _with_media(
    prompt: memoryview, body: Body, *, chat: bool
) -> Iterable[memoryview | msgspec.Raw]:
    """The parts of a prompt that can have media. To search a long text for one costs more than all
    else that is done with it, and a text has none: its quotes are escaped.
    """
    if prompt[:1].tobytes() == b'"':
        return ()
    if not chat:
        return (prompt,)
    if body.find(b"[", body.find(b"[") + 1) < 0:  # no list but that of the messages
        return ()
    if _BEGIN_OF_MEDIA not in body:
        return ()
    if body.count(b"{") > MOST_VALUES:  # replicas refuse as many messages
        return (prompt,)
    try:
        contents = [message.content for message in _messages(prompt)]
    except _UNREADABLE:
        return (prompt,)
    return [content for content in contents if memoryview(content)[:1].tobytes() == b"["]
