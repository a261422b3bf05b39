# SPDX-License-Identifier: Apache-2.0
"""The facts that strategies know of a request, and their extraction from its headers and body.

Of a JSON body only the keys that matter are looked at, and prompts stay the bytes that they are,
where they are; forms and files go on unread. Replicas validate bodies; a body that cannot be read
here is still forwarded.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import cast
from urllib.parse import parse_qs

import msgspec

from serving.protocol import (
    ADAPTER_ID,
    ADAPTER_IN_QUERY,
    BILLING,
    COUNT_TOKENS,
    NOT_GENERATED,
    SESSION_ID,
    TOKENIZER_PATHS,
    VLLM_SESSION_ID,
)
from serving.router.policy.prefix_index import BYTES_PER_TOKEN, chain

NEW_SESSION = "NEW_SESSION"
"""The value that begins a session, in the header or as a body's requestType."""
_SESSION_HEADERS = (SESSION_ID, VLLM_SESSION_ID)
_SESSION_KEYS = ("session_id", "user_id", "user")

_NONE = msgspec.Raw(b"")
_MEDIA = re.compile(rb'"data(:[^"]*|"\s*:\s*"[A-Za-z0-9+/]{1000,}=*)"')
"""As a URI, or as Anthropic has them."""
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
    """The model that it names, where not all replicas serve that; else ""."""
    adapter: str = ""
    """The LoRA adapter, or ""."""
    salt: str | None = None
    """The salt that separates its KV cache, if the body has one."""
    session: str = ""
    """The name of its session, or ""."""
    begins_session: bool = False
    """Whether it asks for a new one."""
    streamed: bool = False
    """Whether its answer is."""


Body = bytes | bytearray
Reader = Callable[[Mapping[bytes, bytes], Body, bytes, str | None], RoutingRequest]
"""Reads a request's headers, by their names in lower case, its body, its target and its tenant."""


class _Keys(msgspec.Struct):
    """The keys of a JSON body that matter to every strategy."""

    model: msgspec.Raw = _NONE
    adapters: msgspec.Raw = _NONE
    cache_salt: msgspec.Raw = _NONE
    stream: msgspec.Raw = _NONE
    tools: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    inputs: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    request_type: msgspec.Raw = msgspec.field(default=_NONE, name="requestType")


class _Message(msgspec.Struct):
    """One of `messages`, as far as it may have media."""

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
        """session_key: the header or key of a JSON body that names a session, besides SageMaker's
        header; None takes what is customary. adapters: names that are adapters' where a body has
        them as its `model`; models: those of models that not all replicas serve; None for all
        names. Both may change.
        """
        headers: tuple[bytes, ...] = (SESSION_ID,)
        keys: tuple[str, ...] = ()
        if strategy == "session":
            headers, keys = _SESSION_HEADERS, _SESSION_KEYS
            if session_key:
                headers, keys = (SESSION_ID, session_key.lower().encode()), (session_key,)
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
        self._session_headers = headers
        self._session_fields = tuple(fields)
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
        tokens += _MEDIA_TOKENS if file else 0
        if system := bytes(keys.system or keys.instructions):
            if _BILL in system:
                system = _BILLS.sub(b"", system)
            prompt = memoryview(system + prompt)
            tokens += len(system) // BYTES_PER_TOKEN
        adapter = self._adapter(headers, keys, target)
        tools = bytes(keys.tools)
        path = target.partition(b"?")[0]
        links: Sequence[int] = ()
        if self._chained and path not in _UNCACHED:
            # What else decides whether KV caches of equal prompts are one.
            links = chain(prompt, (adapter, tenant, bytes(keys.cache_salt), tools))
        computed = path not in _UNCOMPUTED
        return RoutingRequest(
            tokens=tokens + len(tools) // BYTES_PER_TOKEN if computed else 0,
            chain=links,
            model=self._model(keys),
            adapter=adapter,
            salt=_text(keys.cache_salt) or None,
            session=self._session(headers, keys),
            begins_session=NEW_SESSION
            in (headers.get(SESSION_ID, b"").decode("latin-1"), _text(keys.request_type)),
            streamed=bytes(keys.stream) == b"true",
        )

    def _model(self, keys: _Keys) -> str:
        if self._models is None:
            return _text(keys.model)
        return model if self._models and (model := _text(keys.model)) in self._models else ""

    def _adapter(self, headers: Mapping[bytes, bytes], keys: _Keys, target: bytes) -> str:
        if adapter := headers.get(ADAPTER_ID, b"").decode("latin-1"):
            return adapter
        if (adapter := _text(keys.adapters)) or bytes(keys.adapters) == b'""':  # the base model
            return adapter
        if (queried := _queried(target)) is not None:
            return queried
        if self._adapters and (model := _text(keys.model)) in self._adapters:
            return model
        return ""

    def _session(self, headers: Mapping[bytes, bytes], keys: _Keys) -> str:
        for name in self._session_headers:
            if session := headers.get(name, b"").decode("latin-1"):
                return session
        for field in self._session_fields:
            if session := _text(getattr(keys, field)):
                return session
        return ""


def _queried(target: bytes) -> str | None:
    """The adapter that a target's query names."""
    if ADAPTER_IN_QUERY.encode() not in target:
        return None
    query = target.partition(b"?")[2].decode("latin-1")
    return next(iter(parse_qs(query, keep_blank_values=True).get(ADAPTER_IN_QUERY, ())), None)


def _text(raw: msgspec.Raw) -> str:
    """A JSON text, the first of a list of them, or ""."""
    if raw is _NONE:
        return ""
    try:
        value = msgspec.json.decode(raw)
    except _UNREADABLE:
        return ""
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""


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
    try:
        contents = [message.content for message in _messages(prompt)]
    except _UNREADABLE:
        return (prompt,)
    return [content for content in contents if memoryview(content)[:1].tobytes() == b"["]
