# SPDX-License-Identifier: Apache-2.0
"""The router's view of this container's models: their states, which the supervisor decides, and the
reports of their requests.
"""

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping

from serving.errors import BadRequest, NotFound, NotReady
from serving.protocol import MODELS
from serving.router.http.forwarded_request import Request
from serving.router.models.model_messages import (
    LONGEST,
    Answer,
    Call,
    Door,
    Report,
    Row,
    Work,
    line,
    read_told,
)

REPORT_S = 0.05
"""Seconds between two looks whether there is anything to report."""
_NAMED = re.compile(r"/(?:models|predictions)/([^/]+)(?:/.*)?")
"""Paths that name a model."""


class OwnModels:
    """The models of this container."""

    def __init__(self, door: Door) -> None:
        self.dynamic = door.dynamic
        self.rows: Mapping[str, Row] = {}
        """By the model's name."""
        self._door = door
        self._begun = Counter[str]()
        self._revision = 0
        self._numbers = itertools.count(1)
        self._calls: list[Call] = []
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._moved = asyncio.Event()

    # requests

    def named(self, request: Request, given: str) -> Row:
        """Return the model of a request. given: the name in its body, or "". Raises BadRequest,
        NotFound, NotPermitted, and NotReady if the model cannot be started.
        """
        in_path = _NAMED.fullmatch(request.path)
        name = in_path[1] if in_path else given
        if not name and len(self.rows) == 1:
            name = next(iter(self.rows))
        if not name:
            end = "" if request.complete else "; a body as large as this one is not read for it"
            raise BadRequest(
                "there are several models here: name one as `model`, or in the path "
                f"/models/NAME/invoke; GET {MODELS} lists them{end}",
                "model",
            )
        row = self.rows.get(name)
        if row is None:
            raise NotFound(
                f"the model {name!r:.140} is not here; GET {MODELS} lists those that are"
            )
        request.caller.require_model((name,))
        if row.trouble:
            raise NotReady(
                f"the model {row.name} cannot be started: {row.trouble}; try again later"
            )
        self._begun[name] += 1
        return row

    def at(self, address: str) -> str:
        """The name of the model whose server has an address, or ""."""
        return next((name for name, row in self.rows.items() if row.address == address), "")

    async def call(self, name: str, url: str | None, *, waits: bool = True) -> Answer:
        """Load a model, or unload it, as Call has it. Returns when that is done."""
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._calls.append(Call(number, name, url, waits))
        try:
            return await answer
        finally:
            del self._answers[number]

    # the supervisor

    def series(self) -> str:
        """The supervisor's series, as last written."""
        try:
            return self._door.series.read_text()
        except OSError:
            return ""

    async def places(self) -> AsyncGenerator[frozenset[str]]:
        """The addresses of the models' servers, now and each time they change."""
        last = None
        while True:
            self._moved.clear()
            found = frozenset(row.address for row in self.rows.values() if row.address)
            if found != last:
                yield found
            last = found
            await self._moved.wait()

    async def follow(
        self,
        work: Callable[[], Mapping[str, tuple[int, int]]],
        changed: Callable[[Mapping[str, Row]], None],
    ) -> None:
        """Follow the supervisor until cancelled. work: the requests that wait, and those in flight,
        by the model's name. changed: called after a change, with the models before. Raises OSError
        and ValueError if the connection breaks.
        """
        reader, writer = await asyncio.open_unix_connection(self._door.socket, limit=LONGEST)
        last = None
        try:
            while True:
                try:
                    async with asyncio.timeout(REPORT_S):
                        told = await reader.readline()
                except TimeoutError:
                    pass
                else:
                    if not told:
                        raise ConnectionError("the supervisor has closed its socket")
                    self._take(told, changed)
                counts = work()
                found = {
                    name: Work(*counts.get(name, (0, 0)), self._begun[name]) for name in self.rows
                }
                calls, self._calls = tuple(self._calls), []
                report = self._revision, found
                if calls or report != last:
                    last = report
                    writer.write(line(Report(*report, calls)))
                    await writer.drain()
        finally:
            writer.close()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(NotReady("the router's supervisor is away; try again"))

    def _take(self, told: bytes, changed: Callable[[Mapping[str, Row]], None]) -> None:
        found = read_told(told)
        for answer in found.answers:
            waiting = self._answers.get(answer.number)
            if waiting and not waiting.done():
                waiting.set_result(answer)
        before, self.rows = self.rows, {row.name: row for row in found.models}
        self._revision = found.revision
        for name in self._begun.keys() - self.rows.keys():
            del self._begun[name]
        self._moved.set()
        changed(before)
