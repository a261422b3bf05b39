# SPDX-License-Identifier: Apache-2.0
"""The engines that answer the lines of batches: this server's, and those of the other copies of its
container. A single copy runs all batches, and its lines go to the engine with the most room.
"""

import asyncio
import functools
from typing import Protocol

import aiohttp
import msgspec

from lmi_config.options.declared import Settings
from serving.access.access import Access
from serving.batch.objects import OtherCopies
from serving.errors import BadRequest, NotReady
from serving.follow import kept
from serving.inference.pipeline import Pipeline
from serving.inference.request import InferenceRequest
from serving.protocol import IDENTITY, PING

PING_S = 1.0
"""Seconds between two questions whether a copy can serve."""
TIMEOUT_S = 5.0
"""Seconds for an answer to that, and for a connection."""
SETTLES_S = 1.0
"""Seconds after which it is known whether an engine has died with a line."""
LARGEST = 256 << 20
"""Maximum bytes of an answer."""


class EngineLost(Exception):
    """The engine has ended during a line."""


class Lane(Protocol):
    """An engine that answers lines. used: the lines that it has. up: whether it takes more."""

    used: int
    up: bool

    async def answer(self, request: InferenceRequest) -> None:
        """As Pipeline.run(). Also raises EngineLost."""


class _OwnEngine:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.used = 0
        self.up = True

    async def answer(self, request: InferenceRequest) -> None:
        await self._pipeline.run(request)


class _OtherCopy:
    """Another copy, which answers only who has the container's secret."""

    def __init__(self, url: str, access: Access, client: aiohttp.ClientSession) -> None:
        self._url = url
        self._access = access
        self._client = client
        self._name = ""
        self.used = 0
        self.up = False
        self.down = asyncio.Event()

    async def look(self) -> None:
        """Ask whether it can serve, and for the name that identities are signed for."""
        challenge = self._access.challenge()
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            found = self._client.get(self._url + PING, headers=challenge, timeout=timeout)
            async with found as answer:
                ready = answer.status == 200
                name = self._access.name_of(challenge, answer.headers)
        except (aiohttp.ClientError, OSError, TimeoutError):
            self._lost()
            return
        if self._name and name != self._name:
            self._lost()  # another process has its address
        self._name, self.up = name, ready and bool(name)
        if self.up:
            self.down.clear()

    def _lost(self) -> None:
        self.up, self._name = False, ""
        self.down.set()

    async def answer(self, request: InferenceRequest) -> None:
        asking = asyncio.ensure_future(self._ask(request))
        lost = asyncio.ensure_future(self.down.wait())
        try:
            with request.cancellation.raising():
                await asyncio.wait((asking, lost), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise EngineLost
            await asking
        finally:
            asking.cancel()
            lost.cancel()
            await asyncio.gather(asking, lost, return_exceptions=True)

    async def _ask(self, request: InferenceRequest) -> None:
        """Pass the copy's answer on. Raises EngineLost, NotReady for another attempt later, and
        BadRequest for an answer that is too long.
        """
        scope = request.client.scope
        caller = msgspec.structs.replace(request.client.record.caller, background=True)
        headers = [(name.decode("latin-1"), it.decode("latin-1")) for name, it in scope["headers"]]
        said = self._access.identity(caller, (self._name,)) or b""
        headers.append((IDENTITY.decode(), said.decode()))
        body = bytearray()
        try:
            url = self._url + scope["path"]
            async with self._client.post(url, data=request.body, headers=headers) as answer:
                status, again = answer.status, "retry-after" in answer.headers
                async for piece in answer.content.iter_any():
                    body += piece
                    if len(body) > LARGEST:
                        raise BadRequest(
                            f"the line's answer is longer than {LARGEST} bytes; ask for fewer "
                            "tokens, choices or log probabilities"
                        )
        except (aiohttp.ClientError, OSError):
            await self.look()
            raise EngineLost from None
        if again or status == 401:  # of a process that has come after the one that was asked
            raise NotReady("another copy takes no line now")
        if status >= 500:
            await asyncio.sleep(SETTLES_S)
            await self.look()
            if not self.up:
                raise EngineLost
        await request.answer({"type": "http.response.start", "status": status})
        await request.answer({"type": "http.response.body", "body": bytes(body)})


class Lanes:
    """The engines for lines, and the lines that each of them has.

    room: the lines that an engine takes. others: the other copies of the container.
    """

    def __init__(
        self, pipeline: Pipeline, room: int, settings: Settings, others: OtherCopies | None
    ) -> None:
        self._room = room
        self._settings = settings
        self._others = others
        self._lanes: list[Lane] = [_OwnEngine(pipeline)]
        self._turns = asyncio.Lock()  # batches take turns at the lanes
        self._freed = asyncio.Event()

    async def follow(self) -> None:
        """Follow the other copies' state, until cancelled."""
        if not self._others:
            return
        access = Access(self._settings, routes=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
            others = [_OtherCopy(url, access, client) for url in self._others.urls]
            here = self._lanes[:1]
            self._lanes = [*here, *others]
            try:
                looks = [functools.partial(self._look, it) for it in others]
                await asyncio.gather(*(kept("copies", look) for look in looks))
            finally:
                self._lanes = here

    async def _look(self, other: _OtherCopy) -> None:
        while True:
            await other.look()
            self._freed.set()
            await asyncio.sleep(PING_S)

    async def take(self) -> Lane:
        """Wait for room for a line. Returns the engine with the most, to be given back."""
        async with self._turns:
            while True:
                self._freed.clear()
                able = [it for it in self._lanes if it.up and it.used < self._room]
                if able:
                    lane = min(able, key=lambda it: it.used)
                    lane.used += 1
                    return lane
                await self._freed.wait()

    def give_back(self, lane: Lane) -> None:
        lane.used -= 1
        self._freed.set()
