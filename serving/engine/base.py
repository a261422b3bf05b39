# SPDX-License-Identifier: Apache-2.0
"""The seam: what the rest of Slipway knows of an engine, whichever it is."""

from pathlib import Path
from typing import NamedTuple, Protocol

from starlette.types import ASGIApp

CANCELLATION = "slipway.cancellation"
"""The key of a scope under which an engine finds the request's Cancellation. One that looks for it
frees what it works on when the request ends; others are told that the client has left.
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
