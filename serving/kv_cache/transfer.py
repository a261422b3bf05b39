# SPDX-License-Identifier: Apache-2.0
"""KV that one engine fetches from another: the parameters of vLLM's NixlConnector.

An engine that has computed a prompt returns the address of its KV. A router puts the address in
front of the body of the same request to another server, and signs it. Such parameters in a client's
own body are refused (see inference/content/checks.py).
"""

import hashlib
import logging
import time
from typing import Annotated

import msgspec

from serving.access.caller import HandOver
from serving.engine.base import COMPUTED_FOR, RECEIVED
from serving.errors import BadRequest

log = logging.getLogger(__name__)

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**16)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class _KvAddress(msgspec.Struct, omit_defaults=True):
    """vLLM's (0.32) parameters for the engine that fetches a prompt's KV: the result of
    NixlConnector's request_finished() (nixl/pull_scheduler.py). Unknown parameters are left out. A
    value of another type would crash the engine that gets it.
    """

    do_remote_prefill: bool = False
    remote_block_ids: list[list[_Count]] = []
    remote_engine_id: _Name | None = None
    remote_request_id: _Name | None = None
    remote_host: _Name | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    tp_size: _Size = 1
    dcp_size: _Size = 1
    pp_size: _Size = 1
    remote_block_size: _Size | None = None
    remote_num_tokens: _Count = 0
    remote_blocks_expiry_time: float | None = None
    transfer_mode: _Name | None = None
    computed_for: _Name | None = msgspec.field(default=None, name=COMPUTED_FOR)


_read = msgspec.json.Decoder(_KvAddress).decode


def where(said: bytes) -> bytes:
    """Check a server's address of a prompt's KV. Returns it for another server, or b"" if it is
    invalid.
    """
    try:
        found = _read(said)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return b""
    leads = found.do_remote_prefill and any(found.remote_block_ids)
    return msgspec.json.encode(found) if leads else b""


def offered(sequences: int) -> dict[str, object]:
    """Return the parameters that make vLLM keep a prompt's KV until another engine has fetched it.
    sequences: the request's. Raises BadRequest for several, which would fetch it several times.
    """
    if sequences != 1:
        raise BadRequest("a prompt for several sequences is not computed for other servers")
    return {"do_remote_decode": True}


def split(body: bytes, hand_over: HandOver) -> tuple[dict[str, object] | None, bytes]:
    """Return vLLM's parameters to fetch a prompt's KV, or None if they are invalid, and the
    client's body. Raises BadRequest if the router has not signed them.
    """
    front = body[: hand_over.size]
    if hashlib.sha256(front).hexdigest() != hand_over.digest:
        raise BadRequest("the bytes in front of the body differ from those that the router signed")
    rest = body[hand_over.size :]
    if not (found := where(front)):
        log.warning("a prompt is computed here: the address of its KV cannot be read")
        return None, rest
    params = msgspec.json.decode(found, type=dict[str, object])
    return {**params, RECEIVED: time.monotonic()}, rest
