# SPDX-License-Identifier: Apache-2.0
"""Asks the cache server about conversations: what is kept of one, and that one has ended.

serving/kv_cache/lmcache/session_paths.py answers.
"""

import httpx
import msgspec

from serving.errors import NotReady

PATH = "/slipway/sessions"
LIMIT_S = 5.0
"""For an answer; the cache server may be working on an eviction."""
LARGEST = 4096
"""Most bytes of an answer."""
CONNECTIONS = 16


class Kept(msgspec.Struct, frozen=True):
    """What the tiers keep of a conversation. tokens: of its last prompt, in whole chunks. seconds:
    the rest of its lifetime, 0 if the tiers know no such conversation.
    """

    tokens: int = 0
    seconds: float = 0


class SessionClient:
    """Asks the cache server of this machine. port: of its HTTP interface."""

    def __init__(self, port: int) -> None:
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}{PATH}/",
            trust_env=False,
            timeout=LIMIT_S,
            limits=httpx.Limits(max_connections=CONNECTIONS),
        )

    async def look(self, session: str) -> Kept:
        """Return what is kept of a conversation. session: its digest. Raises NotReady."""
        return await self._ask("GET", session)

    async def end(self, session: str) -> Kept:
        """End a conversation. Returns what the tiers kept of it. Raises NotReady."""
        return await self._ask("DELETE", session)

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, method: str, path: str) -> Kept:
        text = bytearray()
        try:
            async with self._client.stream(method, path) as answer:
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
