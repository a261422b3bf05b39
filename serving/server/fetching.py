# SPDX-License-Identifier: Apache-2.0
"""The model's files for one server: all of them first, or the weights while vLLM starts."""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from lmi_config.plan.plan import Plan
from serving import folders
from serving.aio import in_thread
from serving.engine.base import EngineError
from serving.engine.weights import loader
from serving.lifecycle import Note, Step
from serving.sources.arriving import Early, Sign
from serving.sources.source import Source, SourceError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Fetched:
    """A model's folder. Its weights may still be arriving.

    options: vLLM's options to wait for the weights; empty if they are there. rest: the fetch of
    the weights, which raises EngineError if it fails. sign: how it goes.
    """

    folder: Path
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rest: "asyncio.Future[Path] | None" = None
    sign: Sign | None = None

    async def whole(self) -> None:
        """Wait until all files are there; vLLM has loaded them. Raises EngineError if the fetch
        fails.
        """
        if self.rest and self.sign:
            await self.rest
            self.sign.path.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def blamed(self) -> AsyncIterator[None]:
        """Raise the fetch's failure instead of the engine's, which follows from it."""
        if self.rest and self.rest.done():
            await self.rest
        try:
            yield
        except EngineError:
            if self.rest and self.rest.done():
                await self.rest
            raise


async def fetch(source: Source, plan: Plan, note: Note) -> Fetched:
    """Fetch a model's files, or those that vLLM needs before the weights, by the plan's loading.
    Raises EngineError.
    """
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[Path] = loop.create_future()
    arriving = plan.loading.arriving
    sign, early = None, None

    def begin(folder: Path) -> None:
        loop.call_soon_threadsafe(begun.set_result, folder)

    if arriving:
        try:
            place = folders.make(folders.place(str(plan.settings.port)))
            sign = Sign(place / f"arriving-{secrets.token_hex(8)}")  # containers may share /tmp
        except OSError as error:
            log.warning("the weights are fetched before vLLM starts: %s", error)
        else:
            early = Early([*arriving], begin)

    def progress(text: str) -> None:
        if sign and begun.done():  # the step is another one by now
            sign.move()
            log.info(text)
        else:
            note(Step.FETCHING, text)

    rest = asyncio.create_task(_fetched(source, progress, early, sign))
    await asyncio.wait({rest, begun}, return_when=asyncio.FIRST_COMPLETED)
    if rest.done() or sign is None:
        if sign:
            sign.path.unlink(missing_ok=True)
        return Fetched(await rest)
    return Fetched(begun.result(), loader.options(arriving, sign.path), rest, sign)


async def _fetched(
    source: Source, progress: Callable[[str], None], early: Early | None, sign: Sign | None
) -> Path:
    """The folder with all files. Raises EngineError, and tells those who wait for a file."""
    try:
        return await in_thread(source.fetch, progress, early)
    except Exception as error:
        if sign:
            with contextlib.suppress(OSError):  # they give up when nothing moves
                sign.fail(str(error) or type(error).__name__)
        if isinstance(error, SourceError):
            raise EngineError(str(error)) from None
        raise
