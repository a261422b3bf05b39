# SPDX-License-Identifier: Apache-2.0
"""The seam: what the rest of Slipway knows of an engine, whichever it is."""

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, Protocol

from starlette.types import ASGIApp

CANCELLATION = "slipway.cancellation"
"""The key of a scope under which an engine finds the request's Cancellation. One that looks for it
frees what it works on when the request ends; others are told that the client has left.
"""


STEPS = "slipway.steps"
"""The key of a scope under which an engine finds what renders each Step of a stream, where there is
no more that the answer needs. What that makes goes to the client as it is.
"""


class EngineError(Exception):
    """The engine could not be started. The message says why."""


class Engine(Protocol):
    """A running engine: an ASGI app that speaks the OpenAI API, has adapters, and may die."""

    app: ASGIApp
    concurrency: int
    """Requests that it works on at once; more wait in it."""
    embeds: bool
    """Whether the model makes embeddings rather than text."""
    classifies: bool
    """Whether it classifies rather than generates; rerankers do."""
    hears: bool
    """Whether it writes down what it hears."""

    @property
    def failure(self) -> str | None:
        """Why the engine cannot answer any more, or None while it can."""

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter by its inner name. Raises AdapterFailed; AlreadyLoaded where the engine
        has one of that name.
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no request uses. Raises NotLoaded where there is none."""

    async def pin_adapter(self, name: str) -> None:
        """Keep an adapter in its slot. Raises NotLoaded where there is none."""

    async def stop(self) -> None:
        """Stop the engine. Requests should have ended before."""


class Tokens(NamedTuple):
    """What an engine has worked on. cached: those of the prompts that it needed not compute."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def plus(self, other: "Tokens") -> "Tokens":
        return Tokens(*map(sum, zip(self, other, strict=True)))


class Pace(NamedTuple):
    """How quickly a sequence came. first_at: when its first token was there, in seconds since 1970.
    between: seconds between two tokens on average, None where there is one.
    """

    first_at: float
    between: float | None


class Usage:
    """What the engine works on for one call, whatever becomes of the answer.

    sources, paces: the engine adds one for each of its own requests, which tells of it so far; a
    pace is None before there is a token, and where the engine keeps no times. is_constrained:
    whether one of them has a constraint on its answer.
    """

    def __init__(self) -> None:
        self.sources: list[Callable[[], Tokens]] = []
        self.paces: list[Callable[[], Pace | None]] = []
        self.is_constrained = False

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
"""The key of vLLM's kv_transfer_params that says of which prompt's KV they are."""
RECEIVED = "slipway_received"
"""The key of vLLM's kv_transfer_params that says when they have come, by this machine's clock."""

USAGE: ContextVar[Usage | None] = ContextVar("usage", default=None)
"""Of the call that is being made."""


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
