# SPDX-License-Identifier: Apache-2.0
"""A prompt that one replica computes for another, which loads it from the store that they share, or
fetches it from the one that has computed it.
"""

import asyncio
import ssl
import time
from typing import NamedTuple

import msgspec

from serving.router.fleet.replicas import Replica
from serving.router.http.request import Headers, Request

LARGEST = 2**22
"""Bytes of an answer that says where a prompt's KV is: some 6 for each of the engine's blocks."""


class Prefilled(NamedTuple):
    """How a prefill ended: `handed_over`, or what went wrong: `connect`, `lost`, `down`, `refused`,
    `timeout`. transfer: by which the prompt's KV is fetched, b"" where it is in a store.
    """

    end: str
    transfer: bytes = b""


class _Answered(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


class _Answer:
    """The answer to a request for a prompt: of it only the status matters, and where the prompt's
    KV is, if that has to be known.
    """

    def __init__(self, *, kept: bool) -> None:
        """kept: whether its body is."""
        self._kept = kept
        self._body = bytearray()
        self.status = 0
        self.over = False
        """Whether no more of it will come."""
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How that has ended which it is for."""

    def on_head(self, status: int, head: bytes, headers: dict[bytes, bytes], body: bytes) -> bool:
        self.status = status
        self.on_data(body)
        return True

    def on_data(self, data: bytes) -> None:
        if self._kept:
            self._body += data
            if len(self._body) > LARGEST:
                self._kept = False
                self._body.clear()

    def transfer(self) -> bytes:
        """What it says of where the prompt's KV is; b"" where it does not."""
        try:
            found = bytes(msgspec.json.decode(self._body, type=_Answered).kv_transfer_params)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return b""
        return found if found.startswith(b"{") else b""

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
) -> Prefilled:
    """Have a replica compute a request's prompt, and store it or keep it to be fetched.

    context: of its trace. identity: by which the replica knows what it is to do. within: seconds.
    Where this is cancelled, so is its work.
    """
    breaker = replica.breaker
    fetched = bool(replica.transfer)
    try:
        upstream = await replica.connect(tls, once=True, decoding=fetched)
    except OSError:
        breaker.unreachable(time.monotonic())
        return Prefilled("connect")
    answer = _Answer(kept=fetched)
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
    if how != "handed_over" or not fetched:
        return Prefilled(how)
    transfer = answer.transfer()
    return Prefilled(how if transfer else "refused", transfer)
