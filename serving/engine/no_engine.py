# SPDX-License-Identifier: Apache-2.0
"""No engine: a custom handler may run its own engine, and ours is then not started."""

from pathlib import Path
from typing import Any

from serving.engine.base import Call, EngineError, Sink, Usage
from serving.errors import AdapterFailed, NotFound

MESSAGE = (
    "This model is answered by the handle of its model.py alone, on /invocations; no engine of "
    "this server's runs beside it."
)


class NoEngine:
    """Answers no request. concurrency: calls that the handler works on at once."""

    embeds = classifies = hears = False
    failure: str | None = None

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency

    async def generate(self, call: Call, sink: Sink) -> None:
        sink.begin(Usage())
        await sink.fail(NotFound(MESSAGE))

    async def models(self) -> dict[str, Any]:
        raise NotFound(MESSAGE)

    async def kv_event_sources(self) -> dict[str, Any]:
        raise NotFound(MESSAGE)

    async def load_adapter(self, name: str, folder: Path) -> None:
        raise AdapterFailed(MESSAGE)

    async def unload_adapter(self, name: str) -> None:
        raise AdapterFailed(MESSAGE)

    async def pin_adapter(self, name: str) -> None:
        raise AdapterFailed(MESSAGE)

    async def sleep(self) -> None:
        raise EngineError(MESSAGE)

    async def wake_up(self) -> None:
        raise EngineError(MESSAGE)

    async def stop(self) -> None:
        pass
