# SPDX-License-Identifier: Apache-2.0
"""A prompt that one replica computes for another. The other loads its KV from their shared store,
or fetches it from the first.
"""

import asyncio
import contextlib
import ssl
from typing import Annotated, NamedTuple

import msgspec

from serving.kv_cache.transfer import where
from serving.router.fleet.replicas import Replica
from serving.router.http.forwarded_request import Headers, Request
from serving.router.usage import MOST

LARGEST = 2**22
"""Bytes of an answer with the address of a prompt's KV: some 6 for each of the engine's blocks."""


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Prefilled(NamedTuple):
    """How a prefill ended.

    end: `handed_over`, or the failure: `connect`, `lost`, `down`, `refused`, `timeout`. status: the
    answer's status, 0 without an answer. transfer: the address of the prompt's KV, b"" if it is in
    a store. tokens: the prompt's tokens, 0 if the answer does not report them.
    """

    end: str
    status: int = 0
    transfer: bytes = b""
    tokens: int = 0


class _Answered(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    usage: msgspec.Raw = msgspec.Raw()


class _Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST)] = 0


class _Answer:
    """The answer to a prefill request: its status, the number of tokens, and the address of the KV,
    if needed.
    """

    def __init__(self) -> None:
        self._kept = True
        self._body = bytearray()
        self.status = 0
        self.over = False
        """Whether the answer is complete."""
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The end of the prefill, as in Prefilled."""

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

    def read(self) -> tuple[bytes, int]:
        """The address of the prompt's KV and the number of the prompt's tokens; b"" and 0 if the
        answer does not report them.
        """
        tokens = 0
        try:
            found = msgspec.json.decode(self._body, type=_Answered)
        except _UNREADABLE:
            return b"", tokens
        with contextlib.suppress(*_UNREADABLE):
            tokens = msgspec.json.decode(found.usage, type=_Usage).prompt_tokens
        return where(bytes(found.kv_transfer_params)), tokens

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
    """Let a replica compute a request's prompt, and store its KV or keep it to be fetched. context:
    of its trace. identity: tells the replica its phase. within: seconds. Cancelling this also
    cancels the replica's work.
    """
    try:
        upstream = await replica.connect(tls, None, decoding=True)
    except OSError:
        return Prefilled("connect")
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
    if how != "handed_over":
        return Prefilled(how, answer.status)
    transfer, tokens = answer.read()
    if not replica.transfer:
        return Prefilled(how, answer.status, tokens=tokens)
    return Prefilled(how if transfer else "refused", answer.status, transfer, tokens)
