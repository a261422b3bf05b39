# SPDX-License-Identifier: Apache-2.0
"""Deduplication: a client's retry of a request in flight gets that request's answer.

boto3 retries a request that has waited for 60 s, up to twice, and closes its old connection. So a
request with an Inference-Id continues for a short time after its client has left. An equal request
with the same id in that time shares its answer.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable

from prometheus_client import Counter
from starlette.types import Message, Receive, Send

from serving.aio import in_thread
from serving.inference.request import ClientRequest
from serving.kv_cache.salt import Tenants
from serving.protocol import ADAPTER_ID, INFERENCE_ID, SESSION_ID

Run = Callable[[Receive, Send], Awaitable[None]]

GRACE_S = 5.0
"""Time that a request without a client continues. botocore waits for at most 2 s before a retry."""
ABANDONED = 100
"""Most requests without a client. One more ends the oldest."""
LARGEST = 2**20
"""Bytes of an answer that waits for a client. Larger ones are dropped."""

_FORM = b"multipart/"
_AT_ONCE = 2**18  # bytes that may be digested on the event loop

_DEDUPLICATED = Counter(
    "slipway_requests_deduplicated", "Requests that got the answer of an equal one under way."
)


async def shared_key(client: ClientRequest, tenants: Tenants) -> Hashable:
    """Return the key that a request shares with its retries, or None if it cannot be shared.

    A stream is not shared, because its events are not kept after they were sent. Raises BadRequest
    if the request names several tenants.
    """
    scope, headers, body = client.scope, client.headers, client.body
    if headers.get(SESSION_ID) == b"NEW_SESSION":
        return None
    if b'"stream"' in body and headers.get(b"content-type", b"").lower().startswith(_FORM):
        return None  # whether the form wants a stream is not worth parsing it twice
    if b'"stream"' in body and (fields := client.fields_of_json) and fields.streamed:
        return None
    names = (INFERENCE_ID, ADAPTER_ID, SESSION_ID, b"accept", b"content-type")
    tenant = tenants.tenant(client.record.caller, scope["headers"])
    chosen = (tenant, *map(headers.get, names))
    # The digest of a long body is computed in a thread, so that the event loop goes on.
    digest = await in_thread(_digest, body) if len(body) > _AT_ONCE else _digest(body)
    return scope["path"], scope["query_string"], chosen, digest


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


class SharedCall:
    """One request in flight that several clients may wait for, and its answer."""

    def __init__(self, run: Run) -> None:
        self.clients = 0
        self.answer: list[Message] = []
        self.task = asyncio.ensure_future(run(self._receive, self._send))
        self.timer: asyncio.TimerHandle | None = None
        self._left = asyncio.Event()

    def leave(self) -> None:
        """End it as if its client had disconnected."""
        self._left.set()

    async def _receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.answer.append(message)


class Coalescer:
    """The requests in flight that have an Inference-Id.

    require_room: called with the number of waiting retries; raises Overloaded for too many.
    """

    def __init__(self, require_room: Callable[[int], None]) -> None:
        self._require_room = require_room
        self._following = 0
        self._shared: dict[Hashable, SharedCall] = {}
        self._abandoned: OrderedDict[Hashable, SharedCall] = OrderedDict()

    async def answer(self, key: Hashable, run: Run, receive: Receive, send: Send) -> None:
        """Run a request, or wait for an equal request in flight, and send its answer.

        key: requests with the same key are equal. Raises what `run` raises, and Overloaded.
        """
        shared = self._shared.get(key)
        follows = shared is not None
        if shared:
            self._require_room(self._following)
            _DEDUPLICATED.inc()
            self._abandoned.pop(key, None)
            if shared.timer:
                shared.timer.cancel()
        else:
            shared = self._shared[key] = SharedCall(run)
            shared.task.add_done_callback(lambda _: self._over(key, shared))
        self._following += follows
        shared.clients += 1
        leaving = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({shared.task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            self._following -= follows
            shared.clients -= 1
            if not shared.clients and not shared.task.done():
                self._abandon(key, shared)
        if shared.task.done():
            self._end(key, shared)
            shared.task.result()
            for message in shared.answer:
                await send(message)

    def _abandon(self, key: Hashable, shared: SharedCall) -> None:
        loop = asyncio.get_running_loop()
        shared.timer = loop.call_later(GRACE_S, self._end, key, shared)
        self._abandoned[key] = shared
        if len(self._abandoned) > ABANDONED:
            self._end(*next(iter(self._abandoned.items())))

    def _over(self, key: Hashable, shared: SharedCall) -> None:
        """Keep an answer without a client until GRACE_S is over, unless it is an error or large."""
        failed = shared.task.cancelled() or shared.task.exception()
        size = sum(len(message.get("body", b"")) for message in shared.answer)
        if failed or shared.clients or size > LARGEST:
            self._end(key, shared)

    def _end(self, key: Hashable, shared: SharedCall) -> None:
        if shared.timer:
            shared.timer.cancel()
        if self._shared.get(key) is shared:
            del self._shared[key]
            self._abandoned.pop(key, None)
        shared.leave()
