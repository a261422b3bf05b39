# SPDX-License-Identifier: Apache-2.0
"""The cache server's calls about conversations: look at one, end one, prefetch one.

serving/kv_cache/lmcache/session_paths.py answers.
"""

import asyncio
import contextlib

import httpx
import msgspec

from serving.errors import NotReady

PATH = "/slipway/sessions"
LIMIT_S = 5.0
"""For an answer; the cache server may be working on an eviction."""
FORGET_S = 60.0
"""For an answer after deletions. LMCache lets each store take half of it."""
LARGEST = 4096
"""Most bytes of an answer."""
CONNECTIONS = 16
"""Most calls at once; those of waiting requests take half of them, and are left out beyond."""


class Kept(msgspec.Struct, frozen=True):
    """A conversation in the tiers. tokens: of its last prompt, in whole chunks. seconds: the rest
    of its lifetime, 0 if the tiers know no such conversation.
    """

    tokens: int = 0
    seconds: float = 0


class SessionClient:
    """Asks the cache server of this machine. port: of its HTTP interface."""

    def __init__(self, port: int) -> None:
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}{PATH}/",
            trust_env=False,
            limits=httpx.Limits(max_connections=CONNECTIONS),
        )
        self._soon: set[asyncio.Task[None]] = set()

    async def look(self, session: str) -> Kept:
        """Return the state of a conversation. session: its digest. Raises NotReady."""
        return await self._ask("GET", session)

    async def end(self, session: str, *, forget: bool = False) -> Kept:
        """End a conversation. Returns its last state. forget: whether to delete the KV that no
        other conversation has used. Raises NotReady.
        """
        if forget:
            return await self._ask("DELETE", f"{session}?forget=true", FORGET_S)
        return await self._ask("DELETE", session)

    async def prefetch(self, session: str) -> Kept:
        """Have a conversation's KV read from the stores into memory. Returns its
        state, without tokens if it will not be read. Raises NotReady.
        """
        return await self._ask("POST", f"{session}/prefetch")

    def prefetch_soon(self, session: str) -> None:
        """Do the same without waiting for it. A failure has no other effect."""

        async def prefetch() -> None:
            with contextlib.suppress(NotReady):
                await self.prefetch(session)

        if len(self._soon) < CONNECTIONS // 2:
            task = asyncio.create_task(prefetch())
            self._soon.add(task)
            task.add_done_callback(self._soon.discard)

    async def close(self) -> None:
        for task in [*self._soon]:
            task.cancel()
        await self._client.aclose()

    async def _ask(self, method: str, path: str, limit_s: float = LIMIT_S) -> Kept:
        text = bytearray()
        try:
            async with self._client.stream(method, path, timeout=limit_s) as answer:
                answer.raise_for_status()
                async for piece in answer.aiter_bytes():
                    text += piece
                    if len(text) > LARGEST:
                        raise ValueError(f"it is longer than {LARGEST} bytes")
            return msgspec.json.decode(text, type=Kept)
        except (httpx.HTTPError, ValueError) as error:
            raise NotReady(
                "the cache server does not answer, and requests are served without it; try again"
            ) from error
