"""A request's headers and body → what strategies want to know of it.

Of a JSON body only the keys that matter are looked at, and prompts stay the bytes they are. Bodies
are judged by the replicas: what cannot be read here goes its way all the same.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import cast

import msgspec

from serving.router.policies import Asked
from serving.router.prefix_index import BYTES_PER_TOKEN, chain

ADAPTER = b"x-amzn-sagemaker-adapter-identifier"
SESSION = b"x-amzn-sagemaker-session-id"
_SESSION_HEADERS = (SESSION, b"x-session-id")
_SESSION_KEYS = ("session_id", "user_id", "user")

_NONE = msgspec.Raw(b"")
_MEDIA = re.compile(rb'"data:[^"]*"')
_MEDIA_TOKENS = 1_000
"""What an image in a prompt counts as; its base64 says nothing of its tokens."""

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

Reader = Callable[[Mapping[bytes, bytes], bytes], Asked]


class Keys(msgspec.Struct):
    """The keys of a JSON body that matter to every strategy."""

    model: msgspec.Raw = _NONE
    adapters: msgspec.Raw = _NONE
    cache_salt: msgspec.Raw = _NONE
    stream: msgspec.Raw = _NONE
    tools: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    inputs: msgspec.Raw = _NONE


def reader(
    strategy: str, session_key: str | None, tenant_header: str | None, adapters: Collection[str]
) -> Reader:
    """What reads requests, as far as the strategy wants to know of them.

    session_key: the header or key of a JSON body that names a session, besides SageMaker's header;
    None takes what is customary. tenant_header: the replicas' OPTION_CACHE_SALT_HEADER. adapters:
    names that are adapters' where a body has them as its `model`.
    """
    chained = strategy in ("prefixaware", "kvaware")
    headers: tuple[bytes, ...] = (SESSION,)
    keys: tuple[str, ...] = ()
    if strategy == "session":
        headers, keys = _SESSION_HEADERS, _SESSION_KEYS
        if session_key:
            headers, keys = (SESSION, session_key.lower().encode()), (session_key,)
    tenant = (tenant_header or "").lower().encode()
    read = msgspec.json.Decoder(
        msgspec.defstruct(
            "_Body",
            [(f"session{n}", msgspec.Raw, _NONE) for n in range(len(keys))],
            bases=(Keys,),
            rename={f"session{n}": key for n, key in enumerate(keys)},
        )
    ).decode

    def asked(given: Mapping[bytes, bytes], body: bytes) -> Asked:
        try:
            found = cast(Keys, read(body))
        except _UNREADABLE:
            found = Keys()
        adapter = given.get(ADAPTER, b"").decode("latin-1") or _text(found.adapters)
        if not adapter and adapters and (model := _text(found.model)) in adapters:
            adapter = model
        prompt = bytes(found.prompt) or bytes(found.inputs) or bytes(found.messages) or body
        session = ""
        for name in headers:
            session = session or given.get(name, b"").decode("latin-1")
        if keys and not session:
            named = (_text(getattr(found, f"session{n}", _NONE)) for n in range(len(keys)))
            session = next(filter(None, named), "")
        # What else decides whether KV caches of equal prompts are one.
        seed = (adapter, given.get(tenant), bytes(found.cache_salt), bytes(found.tools))
        return Asked(
            tokens=_tokens(prompt) + len(seed[3]) // BYTES_PER_TOKEN,
            chain=chain(prompt, seed) if chained else (),
            adapter=adapter,
            salt=_text(found.cache_salt) or None,
            session=session,
            streamed=bytes(found.stream) == b"true",
        )

    return asked


def _text(raw: msgspec.Raw) -> str:
    """A JSON text, the first of a list of them, or "" for what is neither."""
    if raw is _NONE:
        return ""
    try:
        found = msgspec.json.decode(raw)
    except _UNREADABLE:
        return ""
    if isinstance(found, list) and found:
        found = found[0]
    return found if isinstance(found, str) else ""


def _tokens(prompt: bytes) -> int:
    """About how many tokens a prompt has."""
    size = len(prompt)
    media = 0
    if b'"data:' in prompt:
        for found in _MEDIA.finditer(prompt):
            size -= len(found[0])
            media += _MEDIA_TOKENS
    return size // BYTES_PER_TOKEN + media
