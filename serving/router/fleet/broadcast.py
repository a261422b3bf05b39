# SPDX-License-Identifier: Apache-2.0
"""Requests that all replicas answer: changes of adapters, calls about conversations, and the
router's own questions to the servers of its container.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import aiohttp
import msgspec

from serving.access.caller import Caller
from serving.errors import NotReady, ReplicaFailed
from serving.protocol import ADAPTER_ALIAS, API_KEY, AUTHORIZATION, IDENTITY, REQUEST_ID
from serving.router.fleet.health import LARGEST_METRICS, Asking, HealthChecks, has_ended, read
from serving.router.fleet.replicas import Replica, ReplicaPool, State
from serving.router.http.forwarded_request import Request
from serving.router.http.upstream import FRAMING, HOP_BY_HOP

_PASSED_ON = (b"content-type", ADAPTER_ALIAS, REQUEST_ID)
_CREDENTIALS = (AUTHORIZATION, API_KEY)
FORGET = b"forget=true"
"""In the query of a call that deletes a conversation's KV."""
_READY = frozenset((State.READY,))
_WITH_KV = _READY | {State.DOWN, State.UNKNOWN}
"""States of replicas that may have a conversation's KV, even if they do not answer. A replica that
starts, or has ended, has none.
"""
_OURS = HOP_BY_HOP | FRAMING | {b"content-type", b"content-encoding", REQUEST_ID}
"""Headers of a replica's answer that the client gets from the router, or not at all."""


class Answer(NamedTuple):
    """A replica's answer to a change."""

    status: int
    content_type: bytes
    body: bytes
    lines: Sequence[bytes]
    """Further lines of its head."""


class Broadcast:
    """Sends a request to all replicas that are ready."""

    def __init__(
        self,
        pool: ReplicaPool,
        health: HealthChecks,
        timeout_s: float,
        asking: Asking,
        identity: Callable[[Caller, Sequence[str]], bytes | None],
        tenant_header: bytes,
    ) -> None:
        """timeout_s: for the whole answer of one replica. identity: tells the replicas of these
        names who asks for the change. tenant_header: names the tenant; b"" for none.
        """
        self._identity = identity
        self._passed_on = (*_PASSED_ON, tenant_header)
        self._pool = pool
        self._asking = asking
        self._health = health
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def send(self, request: Request, endpoint: str = "") -> Answer:
        """Let all replicas answer. Returns the worst of their answers; raises ServingError.
        endpoint: the only replica that is asked; "" for all.
        """
        ready, answers = await self._ask(request, lambda it: endpoint in ("", it.endpoint))
        self._health.expire_models(ready)
        return _worst(answers)

    async def send_about_conversation(self, request: Request, name: str = "") -> Answer:
        """Let all replicas answer about a conversation. Returns the answer of the one that has kept
        most of it, or else the worst answer; raises ServingError. If a replica fails to delete the
        KV, or does not answer, the worst answer is returned. name: the only replica that is asked,
        if it is ready; "" for all.
        """
        only = name if any(it.name == name for it in self._pool.ready) else ""
        forgets = FORGET in request.target
        states = _WITH_KV if forgets else _READY
        _, answers = await self._ask(request, lambda it: only in ("", it.name), states)
        good = [it for it in answers if isinstance(it, Answer) and it.status < 300]
        failed = any(isinstance(it, BaseException) or (it and it.status >= 500) for it in answers)
        if not good or (failed and forgets):
            return _worst(answers)
        return max(good, key=_tokens)

    async def _ask(
        self,
        request: Request,
        asks: Callable[[Replica], bool],
        states: frozenset[State] = _READY,
    ) -> tuple[list[Replica], Sequence[Answer | BaseException | None]]:
        """Let the replicas in these states answer that `asks` accepts. Returns these replicas, and
        for each the answer or exception of _send_to(). Raises NotReady.
        """
        await self._health.look()
        asked = [it for it in self._pool.replicas if it.state in states and asks(it)]
        if not asked:
            raise NotReady(self._pool.trouble())
        async with self._asking.session() as client:
            calls = (self._send_to(replica, request, client) for replica in asked)
            return asked, await asyncio.gather(*calls, return_exceptions=True)

    async def _send_to(
        self, replica: Replica, request: Request, client: aiohttp.ClientSession
    ) -> Answer | None:
        """A replica's answer; None if it has stopped serving.

        A replica that has stopped does not count: when it restarts, it has lost all adapters that
        were registered with it before.
        """
        if replica.state is not State.READY:  # it was just probed; a request would wait for it
            await self._require_end(replica, "it is down")
            return None
        try:
            answer = await self._answer(replica, request, client)
            ended = answer.status == 503 and await has_ended(self._asking, replica)
            return None if ended else answer
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await self._require_end(replica, str(error) or type(error).__name__)
            return None

    async def _require_end(self, replica: Replica, reason: str) -> None:
        """Raises ReplicaFailed if a replica that does not answer has not stopped serving."""
        if not await has_ended(self._asking, replica):
            raise ReplicaFailed(f"a replica did not answer: {reason}; try again") from None

    async def _answer(
        self, replica: Replica, request: Request, client: aiohttp.ClientSession
    ) -> Answer:
        identity = self._identity(request.caller, (replica.called,))
        headers = _passed_on(request, self._passed_on, identity)
        async with client.request(
            request.method.decode(),
            replica.name + request.target.decode("latin-1"),
            data=bytes(request.body),
            headers={name.decode(): value.decode("latin-1") for name, value in headers},
            allow_redirects=False,
            timeout=self._timeout,
        ) as answer:
            content_type = answer.headers.get("content-type", "application/json")
            lines = [b"%b: %b" % it for it in answer.raw_headers if it[0].lower() not in _OURS]
            return Answer(answer.status, content_type.encode(), await read(answer), lines)


def _worst(answers: Sequence[Answer | BaseException | None]) -> Answer:
    """Return the worst answer. Raises the exception of a replica's call, and NotReady."""
    counted = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        if answer:
            counted.append(answer)
    if not counted:
        raise NotReady("the replicas ended before they answered; try again")
    return max(counted, key=lambda answer: answer.status)


class _Kept(msgspec.Struct):
    tokens: int = 0


def _tokens(answer: Answer) -> int:
    """Return the tokens of a conversation that a replica has kept."""
    try:
        return msgspec.json.decode(answer.body, type=_Kept).tokens
    except msgspec.MsgspecError:  # of another server
        return 0


def _passed_on(
    request: Request, names: Sequence[bytes], identity: bytes | None
) -> Iterator[tuple[bytes, bytes]]:
    """The headers for a replica, with the sender's identity. names: of the request's headers."""
    passed_on = (*names, *_CREDENTIALS) if identity is None else names
    yield from (header for header in request.headers if header[0] in passed_on)
    if identity:
        yield IDENTITY, identity


T = TypeVar("T", int, str)


async def told_by(
    pool: ReplicaPool, asking: Asking, numbers: Mapping[str, T], path: str
) -> dict[T, bytes]:
    """The answer of each server in this container on a path, by its number or name. numbers: these
    by the servers' addresses. Servers without an answer are left out; `slipway_copies_ready` has
    the number of ready copies.
    """
    ready = sorted((it for it in pool.ready if it.name in numbers), key=lambda it: numbers[it.name])
    async with asking.session() as client:
        answers = await asyncio.gather(*(_ask(it, asking, client, path) for it in ready))
    found = zip(ready, answers, strict=True)
    return {numbers[it.name]: answer for it, answer in found if answer is not None}


async def _ask(
    replica: Replica, asking: Asking, client: aiohttp.ClientSession, path: str
) -> bytes | None:
    try:
        headers = asking.headers(replica, path)
        async with client.get(replica.name + path, headers=headers) as answer:
            body = await read(answer, LARGEST_METRICS)
            return body if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
