# SPDX-License-Identifier: Apache-2.0
"""The port: the interface between an engine and the rest of Slipway.

A call goes in as a value (Call). Its answer goes to a sink (Sink), part by part. The two sides
share no other channel: no HTTP, no context variable, no key of a scope.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from handlers.records import Step
from serving.cancellation import Cancellation
from serving.errors import ServingError


class EngineError(Exception):
    """The engine could not be started. The message says why."""


class Call(msgspec.Struct, frozen=True):
    """All that an engine needs to know of a call.

    path: the path of the API that answers such calls, one of protocol.ENGINE_PATHS. body: the
    decoded request; for a form, its fields, with repeatable ones as lists. size: bytes of the body
    as received. cancellation: ends the call early; the engine then stops its work. request_id: the
    client's name of the call, which need not be unique. file: a form's file. is_json: whether the
    body came as JSON, by its content type or by a path that takes all types. adapter: the inner
    name of the adapter to use, None for the base model. salt: only calls with an equal salt may
    share cached prompts and media; None shares with all others that have None. name_medium: names a
    medium by its content, among the calls of this salt; None if the body has names. priority: lower
    ones come first; None if the body decides. transfer: the location of the prompt's KV. trace: the
    headers of the trace context (W3C). session: the digest of the conversation's name. marked:
    whether a mark at the prompt's end asks to keep its KV. steps: whether the sink takes steps of a
    stream instead of events.
    """

    path: str
    body: Mapping[str, Any]
    size: int
    cancellation: Cancellation
    request_id: str
    file: bytes | None = None
    is_json: bool = True
    adapter: str | None = None
    salt: str | None = None
    name_medium: Callable[[str], str] | None = None
    priority: int | None = None
    transfer: Mapping[str, object] | None = None
    trace: Mapping[str, str] | None = None
    session: str | None = None
    marked: bool = False
    steps: bool = False

    @property
    def request(self) -> dict[str, Any]:
        """The body, by the names of vLLM's API. The server's own decisions replace the client's
        values.
        """
        decided = {
            "model": self.adapter,
            "cache_salt": self.salt,
            "priority": self.priority,
            "kv_transfer_params": self.transfer,
        }
        return {**self.body, **{key: it for key, it in decided.items() if it is not None}}


class Sink(Protocol):
    """Takes the answer to one call.

    begin() comes first. Then comes either one answer(), or stream(), any number of events or steps,
    and end(). fail() may replace any of them except begin(). It is the last call, as are answer()
    and end().
    """

    def begin(self, usage: "Usage") -> None:
        """Take the call's usage. The engine keeps it up to date, also when the call is cancelled or
        breaks off.
        """

    async def answer(
        self,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Take a whole answer."""

    def stream(self) -> None:
        """Take the news that the answer is a stream."""

    async def event(self, event: bytes) -> None:
        """Take a server-sent event as the engine wrote it. Waits while the client does not keep
        up.
        """

    async def step(self, step: Step) -> None:
        """Take a step. Waits as event() does."""

    def takes(self) -> bool:
        """Whether write() and write_step() may be called now: the client keeps up."""

    def write(self, event: bytes) -> None:
        """Take an event without waiting, right after takes() has said so. Raises what a failed
        rendering of it raises; the call is then cancelled (Cancellation), and the engine goes on.
        """

    def write_step(self, step: Step) -> None:
        """Take a step, as write() takes an event. Only for calls whose answer has steps."""

    async def fail(self, error: ServingError) -> None:
        """Take the error that ends the call, before its answer or within its stream."""

    async def end(self) -> None:
        """Take the end of a stream."""


class Engine(Protocol):
    """A running engine: it answers calls, has adapters, and may die."""

    concurrency: int
    """Requests that it works on at once; more wait in it."""
    embeds: bool
    """Whether the model makes embeddings rather than text."""
    classifies: bool
    """Whether it classifies rather than generates; rerankers do."""
    hears: bool
    """Whether it transcribes speech."""

    @property
    def failure(self) -> str | None:
        """Why the engine cannot answer any more, or None while it can."""

    async def generate(self, call: Call, sink: Sink) -> None:
        """Answer a call; the sink is not told of a cancellation. Raises unforeseen exceptions."""

    async def models(self) -> dict[str, Any]:
        """The list of models, in OpenAI's shape. Raises ServingError."""

    async def kv_event_sources(self) -> dict[str, Any]:
        """The addresses of each rank's KV events, in vLLM's shape. Raises ServingError."""

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter by its inner name. Raises AdapterFailed, and AlreadyLoaded if the engine
        has one of that name.
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no request uses. Raises NotLoaded if it is not loaded."""

    async def pin_adapter(self, name: str) -> None:
        """Keep an adapter in its slot. Raises NotLoaded if it is not loaded."""

    async def sleep(self) -> None:
        """Free the GPU's memory, and keep the weights in the host's. No request may be in flight,
        and none may come before wake_up(). Raises unforeseen exceptions.
        """

    async def wake_up(self) -> None:
        """End sleep(). Raises unforeseen exceptions."""

    async def stop(self) -> None:
        """Stop the engine. Requests should have ended before."""


def public_name(inner: str) -> str:
    """An adapter's public name. inner: the engine's name of one of its versions."""
    return inner.rpartition("@")[0] or inner


class Tokens(NamedTuple):
    """Tokens that an engine has processed. prompt: tokens of the prompts. cached: those of them
    that came from a cache.
    """

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def plus(self, other: "Tokens") -> "Tokens":
        return Tokens(*map(sum, zip(self, other, strict=True)))


class Pace(NamedTuple):
    """The speed of a sequence. first_at: time of its first token, in seconds since 1970. between:
    mean seconds between two tokens; None for a sequence of one token.
    """

    first_at: float
    between: float | None


class Usage:
    """The engine's usage for one call, whether or not its answer is delivered.

    sources, paces: the engine adds one function for each request that it makes of the call. The
    function returns that request's numbers so far. A pace is None before the first token, or if the
    engine keeps no times.
    """

    def __init__(self) -> None:
        self.sources: list[Callable[[], Tokens]] = []
        self.paces: list[Callable[[], Pace | None]] = []

    @property
    def tokens(self) -> Tokens:
        found = Tokens()
        for source in self.sources:
            found = found.plus(source())
        return found


HANDED_OVER = "slipway_handed_over"
"""The key of a call's kv_transfer_params that says that another server has just computed the call's
prompt, whose KV is in the shared store by now or in a moment.
"""

COMPUTED_FOR = "slipway_prompt"
"""The key of vLLM's kv_transfer_params for the digest of the prompt whose KV they describe."""
RECEIVED = "slipway_received"
"""The key of vLLM's kv_transfer_params that says when they have come, by this machine's clock."""


class Hits(NamedTuple):
    """Prompt tokens that needed not be computed since the engine's start, summed up."""

    engine: float
    """The engine had them itself."""
    tiers: float


class Prefilled(NamedTuple):
    """The prompts that an engine has computed since its start, summed up."""

    requests: float
    tokens: float
    seconds: float
