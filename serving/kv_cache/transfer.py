# SPDX-License-Identifier: Apache-2.0
"""KV that one engine fetches from another: what vLLM's NixlConnector wants to know of it.

The engine that has computed a prompt says in its answer where its KV is. A router puts that in
front of the body of the same request to another server, and signs for it: what comes in a client's
body is refused (see inference/limits.py).
"""

import hashlib
import time

import msgspec

from serving.access.caller import HandOver
from serving.engine.base import RECEIVED
from serving.errors import BadRequest


def offered(sequences: int) -> dict[str, object]:
    """The parameters with which vLLM keeps a prompt's KV until another engine has fetched it.
    sequences: of the request. Raises BadRequest where these would fetch it several times.
    """
    if sequences != 1:
        raise BadRequest("a prompt for several sequences is not computed for other servers")
    return {"do_remote_decode": True}


def split(body: bytes, hand_over: HandOver) -> tuple[dict[str, object], bytes]:
    """The parameters with which vLLM fetches a prompt's KV, and the client's body. Raises
    BadRequest for others than the router has signed.
    """
    front = body[: hand_over.size]
    if hashlib.sha256(front).hexdigest() != hand_over.digest:
        raise BadRequest("what the router has put in front of the body is not what it has signed")
    params = msgspec.json.decode(front, type=dict[str, object])
    return {**params, RECEIVED: time.monotonic()}, body[hand_over.size :]
