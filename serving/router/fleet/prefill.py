# SPDX-License-Identifier: Apache-2.0
"""A prompt that one replica computes for another, which loads it from the store that they share."""

import asyncio
import ssl

from serving.router.fleet.replicas import Replica
from serving.router.http.request import Headers, Request


class _Answer:
    """The answer to a request for a prompt: of it only the status matters."""

    def __init__(self) -> None:
        self._status = 0
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, head: bytes, headers: dict[bytes, bytes], body: bytes) -> bool:
        self._status = status
        return True

    def on_data(self, data: bytes) -> None:
        pass

    def on_end(self, *, keep_alive: bool) -> None:
        self._end()

    def on_lost(self, reason: str) -> None:
        self._status = 0
        self._end()

    def on_writable(self) -> None:
        pass

    def _end(self) -> None:
        if not self.status.done():
            self.status.set_result(self._status)


async def prefill(
    replica: Replica, request: Request, context: Headers, identity: bytes, tls: ssl.SSLContext
) -> int:
    """Have a replica compute a request's prompt and store it. Returns the status of its answer, 0
    where it broke off. Raises OSError where it cannot be reached.

    context: of its trace. identity: by which the replica knows what it is to do. Where this is
    cancelled, so is its work.
    """
    upstream = await replica.connect(tls, once=True)
    answer = _Answer()
    head = request.head(replica.authority, context, identity)
    upstream.send(answer, head, request.framed(), head_only=False, complete=True)
    try:
        return await answer.status
    except BaseException:
        upstream.drop()
        raise
