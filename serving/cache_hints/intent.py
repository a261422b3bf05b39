# SPDX-License-Identifier: Apache-2.0
"""CacheIntent: the hints of a request about its conversation and the conversation's KV cache.

Clients say it in many ways; docs/guides/agents.md lists them. Their fields are hints and promise
nothing. A field with an unknown value is therefore ignored and named, and is never an error.

Sources: anthropic 2.11.0 and openai 3.52.0 (types of requests), vLLM 0.32 (`session_id`), Dynamo
1.0 to 1.6 (`nvext`, headers of agents), NeMo Agent Toolkit 1.6 and 1.9 (`nvext`), vLLM's proposal
`agent_hint`. tests/serving/cache_hints/clients has requests of released clients.
"""

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from serving.cache_hints import documents, marks
from serving.protocol import (
    CLAUDE_AGENT_ID,
    CLAUDE_SESSION_ID,
    CONVERSATIONS,
    FINALS,
    PARENTS,
    SESSION_ID,
)

ID_BYTES = 256
"""Most bytes of a conversation's id."""
USUAL_S = 300
"""Seconds of a lifetime without a `ttl`: the shorter one of Anthropic's two."""
CONVERSATION_S = 1800
"""Seconds that the KV of a conversation stays useful, if no field names a longer lifetime. A
longer one saves more tokens: docs/explanation/benchmarks.md, "Sessions of agents".
"""
LEAST_S = 30
"""A shorter lifetime has no effect. NeMo Agent Toolkit sends 2.5 s by default."""
MOST_S = 86_400
"""A longer lifetime is cut to this."""
_LARGEST = 4096
"""Most bytes of a hint's value."""
_LONGEST = 31_536_000  # a year, which Dynamo takes at most
_LARGEST_PRIORITY = 2**31
_OPENAIS_S = 1800  # by OpenAI's documentation, without a ttl
_TTL = re.compile(r"([0-9]{1,7})([smh])")
T = TypeVar("T")

NONE = msgspec.Raw()
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

NEW_SESSION = b"NEW_SESSION"
_CLOSE = "CLOSE"
_SESSION_KEY = "OPTION_SESSION_KEY"
_HINTS = "nvext.agent_hints"
_HINT = f"{_HINTS}."
_PRIORITY = f"{_HINT}priority"
_WITHOUT_EFFECT = (
    *("osl", "strict_priority", "speculative_prefill", "latency_sensitivity"),
    *("prefix_id", "total_requests", "iat"),
)
"""Keys of `nvext.agent_hints` of Dynamo's and NeMo Agent Toolkit's that have no effect here."""

_HEADERS = frozenset((SESSION_ID, *CONVERSATIONS, *PARENTS, *FINALS))
_FURTHER = frozenset((*PARENTS, *FINALS, CLAUDE_AGENT_ID))
"""The headers with other hints than a conversation's name."""

FIELDS = (
    *sorted(it.decode() for it in _HEADERS),
    *(_SESSION_KEY, "session_id", "requestType"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *(marks.MARK, marks.BREAKPOINT, documents.CONSENT),
    *(_HINT + it for it in ("priority", "final", *_WITHOUT_EFFECT)),
    *("nvext", "nvext.agent_hints", "nvext.cache_control", "nvext.session_control", "agent_hint"),
)
"""The fields that are read, by the names that series have. No other name occurs."""


class HintKeys(msgspec.Struct):
    """The keys of a JSON body that tell a CacheIntent, undecoded."""

    messages: msgspec.Raw = NONE
    input: msgspec.Raw = NONE
    system: msgspec.Raw = NONE
    tools: msgspec.Raw = NONE
    request_type: msgspec.Raw = msgspec.field(default=NONE, name="requestType")
    session_id: msgspec.Raw = NONE
    cache_control: msgspec.Raw = NONE
    nvext: msgspec.Raw = NONE
    agent_hint: msgspec.Raw = NONE
    prompt_cache_key: msgspec.Raw = NONE
    prompt_cache_options: msgspec.Raw = NONE
    prompt_cache_retention: msgspec.Raw = NONE
    document_order: msgspec.Raw = NONE


READ_HERE = frozenset(("session_id", "nvext", "agent_hint", "kv_hints", documents.CONSENT))
"""Keys of a body that the engine does not get: they name a conversation in clear, or a later vLLM
could obey them.
"""


class CacheIntent(msgspec.Struct, frozen=True, kw_only=True):
    """The hints of a request about its conversation's KV cache.

    session, parent: digests of the conversation's name and of the one that began it; "" without.
    bucket: a digest of `prompt_cache_key`, which many conversations may share. seconds: how long
    the KV of the whole prompt stays useful after this request; 0 if no field names a lifetime.
    marked: the same, only by marks of `cache_control` at the prompt's end. low: whether the KV is
    worth less than that of others. final: whether no further turn will come. any_order: whether the
    server may order the documents. taken, ignored: the fields that were understood, and those that
    were not or have no effect, by their names in FIELDS.
    """

    session: str = ""
    parent: str = ""
    bucket: str = ""
    seconds: int = 0
    marked: int = 0
    low: bool = False
    final: bool = False
    any_order: bool = False
    taken: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """The intent, for the client: "session=0123456789ab seconds=1800 ignored=..."."""
        said = [
            f"session={self.session[:12] or '-'}",
            *([f"parent={self.parent[:12]}"] if self.parent else ()),
            f"seconds={self.seconds}",
            *(name for name in ("low", "final", "any_order") if getattr(self, name)),
            *([f"ignored={','.join(dict.fromkeys(self.ignored))}"] if self.ignored else ()),
        ]
        return " ".join(said)

    def in_given_order(self) -> "CacheIntent":
        """Return the intent of a request whose documents stay in their order."""
        ignored = (*self.ignored, documents.CONSENT)
        taken = tuple(it for it in self.taken if it != documents.CONSENT)
        return msgspec.structs.replace(self, any_order=False, taken=taken, ignored=ignored)


NO_INTENT = CacheIntent()


def digest(tenant: str | None, name: str) -> str:
    """Return the name of a tenant's conversation, wherever it goes: names of clients can be
    secrets, and two tenants may use the same.
    """
    if len(name) > ID_BYTES or len(tenant or "") > ID_BYTES:  # a body's key may have megabytes
        return _digest(tenant, name)
    return _cached_digest(tenant, name)


def _digest(tenant: str | None, name: str) -> str:
    return hashlib.sha256(msgspec.json.encode(("session", tenant, name))).hexdigest()[:32]


# The turns of a conversation come soon after each other.
_cached_digest = functools.lru_cache(4096)(_digest)


def as_text(value: bytes) -> str:
    """Return a header's value as a text: UTF-8 as bodies and paths have it, or else Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def own(headers: Mapping[bytes, bytes], header: bytes, values: Iterable[msgspec.Raw]) -> str:
    """Return the conversation's id by the operator's own header, or by the first text of a body's
    values; "" without one. header: in lower case, b"" for none.
    """
    if found := as_text(headers.get(header, b"")):
        return found
    for value in values:
        with contextlib.suppress(*_UNREADABLE):
            if value and (found := msgspec.json.decode(value, type=str)):
                return found
    return ""


def own_key(name: str | None) -> Callable[[Mapping[bytes, bytes], bytes | bytearray], str]:
    """Return the reader of the header or body's key that the operator has named, or of nothing."""
    if not name:
        return lambda headers, body: ""
    header = name.lower().encode()
    kind = msgspec.defstruct("_Own", [("value", msgspec.Raw, NONE)], rename={"value": name})
    decode: Callable[[bytes | bytearray], Any] = msgspec.json.Decoder(kind).decode

    def read(headers: Mapping[bytes, bytes], body: bytes | bytearray) -> str:
        try:
            value = decode(body).value
        except _UNREADABLE:
            value = NONE
        return own(headers, header, (value,))

    return read


def read(
    headers: Mapping[bytes, bytes],
    keys: HintKeys,
    body: bytes | bytearray | None,
    tenant: str | None,
    *,
    own: str = "",
    low: bool = False,
) -> CacheIntent:
    """Return what a request says.

    headers: by their names in lower case. keys: of the body. body: is searched for marks on parts
    of the prompt, unless it is None. tenant: as serving/kv_cache/salt.py has it. own: the
    conversation's id by the operator's own header or key. low: whether the request is worth less
    than others, whatever it says itself.
    """
    named = own or not _HEADERS.isdisjoint(headers)
    if (
        low
        or (named and not _FURTHER.isdisjoint(headers))
        or (keys.session_id or keys.cache_control or keys.nvext or keys.agent_hint)
        or (keys.prompt_cache_key or keys.prompt_cache_options or keys.prompt_cache_retention)
        or (keys.request_type or keys.document_order)
        or (body and (b'"cache_control"' in body or b'"prompt_cache_breakpoint"' in body))
    ):
        return _Reading(headers, keys, body, tenant).intent(own, low)
    if not named:  # most requests have no hint
        return NO_INTENT
    return _Reading(headers, keys, body, tenant).only_named(own)


class _Reading:
    """The reading of one request."""

    def __init__(
        self,
        headers: Mapping[bytes, bytes],
        keys: HintKeys,
        body: bytes | bytearray | None,
        tenant: str | None,
    ) -> None:
        self._headers = headers
        self._keys = keys
        self._body = body
        self._tenant = tenant
        self._taken: list[str] = []
        self._ignored: list[str] = []

    def intent(self, own: str, low: bool) -> CacheIntent:
        keys = self._keys
        session = self._session(own)
        parent = self._parent()
        bucket = self._text("prompt_cache_key", keys.prompt_cache_key)
        nvext = self._object("nvext", keys.nvext, _Nvext)
        hints = self._object(_HINTS, nvext.agent_hints, _Hints) if nvext else None
        self._ignored += [_HINT + it for it in _WITHOUT_EFFECT if getattr(hints, it, None)]
        marked, kept, unused = self._marks()
        lifetimes = [marked, kept, *self._lifetimes(nvext), CONVERSATION_S if session else 0]
        return CacheIntent(
            session=session,
            parent=parent if parent != session else "",
            bucket=self._named("prompt_cache_key", bucket),
            seconds=min(max(lifetimes), MOST_S),
            marked=min(marked, MOST_S),
            low=low or unused or self._priority(hints) < 0,
            final=self._final(hints),
            any_order=self._any_order(),
            taken=tuple(self._taken),
            ignored=tuple(self._ignored),
        )

    def only_named(self, own: str) -> CacheIntent:
        """Return the intent of a request that only names its conversation. It is the same as that
        of intent(), and takes less time.
        """
        session = self._session(own)
        return CacheIntent(
            session=session,
            seconds=CONVERSATION_S if session else 0,
            taken=tuple(self._taken),
            ignored=tuple(self._ignored),
        )

    # Which conversation

    def _session(self, own: str) -> str:
        if self._headers.get(SESSION_ID) != NEW_SESSION and (found := self._of(SESSION_ID)):
            return found
        if found := self._named(_SESSION_KEY, own):
            return found
        for name in CONVERSATIONS:
            if name in self._headers and (found := self._of(name)):
                return found
        return self._named("session_id", self._text("session_id", self._keys.session_id))

    def _parent(self) -> str:
        for name in PARENTS:
            if found := self._of(name):
                return found
        if CLAUDE_AGENT_ID in self._headers:  # an agent that the conversation itself began
            return self._of(CLAUDE_SESSION_ID)
        return ""

    def _of(self, header: bytes) -> str:
        if not (value := self._headers.get(header)):
            return ""
        return self._named(header.decode(), as_text(value))

    def _named(self, field: str, name: str) -> str:
        """Return the digest of a conversation's name, "" for none."""
        if not name:
            return ""
        if len(name) > ID_BYTES or len(name.encode("utf-8", "replace")) > ID_BYTES:
            self._ignored.append(field)
            return ""
        self._taken.append(field)
        return digest(self._tenant, name)

    def _final(self, hints: "_Hints | None") -> bool:
        found = self._flag(hints)
        for name in FINALS:
            if (value := self._headers.get(name)) is not None:
                is_known = value.lower() in (b"true", b"false")
                (self._taken if is_known else self._ignored).append(name.decode())
                found = found or value.lower() == b"true"
        if self._text("requestType", self._keys.request_type) == _CLOSE:
            self._taken.append("requestType")
            found = True
        return found

    def _flag(self, hints: "_Hints | None") -> bool:
        if hints is None or not hints.final:
            return False
        is_known = bytes(hints.final) in (b"true", b"false")
        (self._taken if is_known else self._ignored).append(f"{_HINT}final")
        return bytes(hints.final) == b"true"

    def _any_order(self) -> bool:
        if not (said := self._text(documents.CONSENT, self._keys.document_order)):
            return False
        known = {documents.CANONICAL: True, documents.GIVEN: False}
        (self._taken if said in known else self._ignored).append(documents.CONSENT)
        return known.get(said, False)

    # How long it stays useful, in seconds

    def _marks(self) -> tuple[int, int, bool]:
        """Return the lifetimes by marks of `cache_control` and by all others that reach the
        prompt's end, and whether the client wants nothing kept.
        """
        keys, found = self._keys, dict[str, list[msgspec.Raw]]()
        if self._body is not None:
            found = marks.read(keys.messages or keys.input, (keys.system, keys.tools), self._body)
        if own := keys.cache_control:  # moves on to the prompt's end
            found[marks.MARK] = [*found.get(marks.MARK, ()), own]
        marked = self._longest(found, marks.MARK, USUAL_S)
        kept = self._longest(found, marks.BREAKPOINT, _OPENAIS_S)
        options, unused = self._value("prompt_cache_options", keys.prompt_cache_options), False
        if isinstance(options, dict) and options.get("mode") == "explicit":
            unused = self._body is not None and marks.BREAKPOINT not in found
            self._taken.append("prompt_cache_options")
        elif options is not None:
            known = isinstance(options, dict) and options.get("mode") in (None, "implicit")
            options = options if known else False
            kept = max(kept, self._lifetime("prompt_cache_options", options, _OPENAIS_S))
        return marked, kept, unused

    def _longest(self, found: Mapping[str, list[msgspec.Raw]], kind: str, usual: int) -> int:
        if kind not in found:
            return 0
        values = [self._value(kind, it) for it in found[kind]]
        if not values:  # it is not known at which token they are
            self._ignored.append(kind)
        return max([self._lifetime(kind, it, usual) for it in values], default=0)

    def _lifetimes(self, nvext: "_Nvext | None") -> Iterator[int]:
        """Yield the lifetimes of the whole prompt by all other fields."""
        if self._keys.prompt_cache_retention:
            field = "prompt_cache_retention"
            said = self._text(field, self._keys.prompt_cache_retention)
            known = {"24h": MOST_S, "in_memory": 0, "in-memory": 0}  # the last one in older clients
            (self._taken if said in known else self._ignored).append(field)
            yield known.get(said, 0)
        if nvext and nvext.cache_control:
            field = "nvext.cache_control"
            yield self._lifetime(field, self._value(field, nvext.cache_control), USUAL_S)
        if nvext and nvext.session_control:
            self._ignored.append("nvext.session_control")
        if hint := self._object("agent_hint", self._keys.agent_hint, _AgentHint):
            value = self._value("agent_hint", hint.cache_control) if hint.cache_control else None
            yield self._lifetime("agent_hint", value, USUAL_S)

    def _lifetime(self, field: str, value: Any, usual: int) -> int:
        """Return the seconds of `{"ttl": ...}`, or 0 if it is ignored. usual: without a `ttl`."""
        if value is None:
            return 0
        found = None
        if isinstance(value, dict):
            found = usual if (ttl := value.get("ttl")) is None else _seconds(ttl)
        if found is None or found < LEAST_S:
            self._ignored.append(field)
            return 0
        self._taken.append(field)
        return found

    # Values

    def _value(self, field: str, raw: msgspec.Raw) -> Any:
        """Return the value of a key; None for null and for one that is ignored."""
        if not raw:
            return None
        if len(raw) <= _LARGEST:
            with contextlib.suppress(*_UNREADABLE):
                return msgspec.json.decode(raw)
        self._ignored.append(field)
        return None

    def _text(self, field: str, raw: msgspec.Raw) -> str:
        found = self._value(field, raw)
        if isinstance(found, str):
            return found
        if found is not None:
            self._ignored.append(field)
        return ""

    def _object(self, field: str, raw: msgspec.Raw, kind: type[T]) -> T | None:
        if not raw or bytes(raw) == b"null":
            return None
        try:
            return msgspec.json.decode(raw, type=kind)
        except _UNREADABLE:
            self._ignored.append(field)
            return None

    def _priority(self, hints: "_Hints | None") -> int:
        """Return Dynamo's priority, 0 without one. Higher is more important."""
        if hints is None or (value := self._value(_PRIORITY, hints.priority)) is None:
            return 0
        if type(value) is int and abs(value) <= _LARGEST_PRIORITY:  # True is none
            self._taken.append(_PRIORITY)
            return value
        self._ignored.append(_PRIORITY)
        return 0


class _Nvext(msgspec.Struct):
    agent_hints: msgspec.Raw = NONE
    cache_control: msgspec.Raw = NONE
    session_control: msgspec.Raw = NONE


class _Hints(msgspec.Struct):
    priority: msgspec.Raw = NONE
    osl: msgspec.Raw = NONE
    final: msgspec.Raw = NONE
    strict_priority: msgspec.Raw = NONE
    speculative_prefill: msgspec.Raw = NONE
    latency_sensitivity: msgspec.Raw = NONE
    prefix_id: msgspec.Raw = NONE
    total_requests: msgspec.Raw = NONE
    iat: msgspec.Raw = NONE


class _AgentHint(msgspec.Struct):
    cache_control: msgspec.Raw = NONE


def _seconds(ttl: object) -> int | None:
    """Return the seconds of a `ttl`, such as "5m", "90s" and 300; None for anything else."""
    if type(ttl) is int and 0 <= ttl <= _LONGEST:
        return ttl
    if not isinstance(ttl, str) or not (found := _TTL.fullmatch(ttl)):
        return None
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]
