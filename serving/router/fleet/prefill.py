# SPDX-License-Identifier: Apache-2.0
"""A prompt that one replica computes for another, which loads it from the store that they share."""

import asyncio
import ssl
import time

from serving.router.fleet.replicas import Replica
from serving.router.http.request import Headers, Request


class _Answer:
    """The answer to a request for a prompt: of it only the status matters."""

    def __init__(self) -> None:
        self.status = 0
        self.over = False
        """Whether no more of it will come."""
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How that has ended which it is for."""

    def on_head(self, status: int, head: bytes, headers: dict[bytes, bytes], body: bytes) -> bool:
        self.status = status
        return True

    def on_data(self, data: bytes) -> None:
        pass

    def on_end(self, *, keep_alive: bool) -> None:
        self._ended("handed_over" if self.status == 200 else "refused")

    def on_lost(self, reason: str) -> None:
        self._ended("lost")

    def on_writable(self) -> None:
        pass

    def _ended(self, how: str) -> None:
        self.over = True
        if not self.end.done():
            self.end.set_result(how)


async def prefill(
    replica: Replica,
    request: Request,
    context: Headers,
    identity: bytes,
    tls: ssl.SSLContext,
    within: float,
) -> str:
    """Have a replica compute a request's prompt and store it. How that ended: `handed_over`, or
    what went wrong: `connect`, `lost`, `down`, `refused`, `timeout`.

    context: of its trace. identity: by which the replica knows what it is to do. within: seconds.
    Where this is cancelled, so is its work.
    """
    breaker = replica.breaker
    try:
        upstream = await replica.connect(tls, once=True)
    except OSError:
        breaker.unreachable(time.monotonic())
        return "connect"
    answer = _Answer()
    head = request.head(replica.authority, context, identity)
    upstream.send(answer, head, request.framed(), head_only=False, complete=True)
    replica.prefills.add(answer.end)
    try:
        async with asyncio.timeout(within):
            how = await answer.end
    except TimeoutError:
        how = "timeout"
    finally:
        replica.prefills.discard(answer.end)
        if not answer.over:
            upstream.drop()
    if how == "lost":
        breaker.unreachable(time.monotonic())
    elif answer.status:
        breaker.answered(answer.status, time.monotonic())
    return how
