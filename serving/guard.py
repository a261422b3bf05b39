"""What of a client's body the engine may get: its internals are the operator's.

vLLM (0.32) reads much more from a body than sampling parameters. What would let a client reach the
KV connector, other hosts' caches or extensions is refused, unless the operator trusts all who can
send requests, and what costs the engine more than it costs the client has a limit. vLLM itself
refuses templates and processor arguments of clients, and limits `logprobs`, `stop`, the number of
`bad_words` and the nesting of schemas.
"""

from typing import Any

import msgspec

from serving.bodies import given, prompts
from serving.errors import BadRequest

_INTERNAL = (
    "kv_transfer_params",  # connectors read and free KV blocks by it, also those of other hosts
    "ec_transfer_params",  # the same for the encoder's cache
    "vllm_xargs",  # for extensions, and becomes the two above; can make KV events be told again
)
_LONGEST = {
    "request_id": 256,
    "session_id": 256,
    "bad_words": 16 * 1024,  # each is made into tokens on the event loop
    "response_format": 64 * 1024,  # the time to compile a grammar grows with its square
    "structured_outputs": 64 * 1024,
    "tools": 256 * 1024,
}
"""Bytes of JSON that the value of a key may have."""

SEQUENCES = 1024
"""That one request may have generated: its prompts times `n`."""

_Body = msgspec.defstruct(
    "_Body", [(key, msgspec.Raw, msgspec.Raw()) for key in (*_INTERNAL, *_LONGEST, "n", "prompt")]
)
_read = msgspec.json.Decoder(_Body).decode  # which skips the rest quicker than `in` looks for a key


def check(body: bytes, trusted: bool) -> None:
    """Raise BadRequest for a body that the engine may not get.

    trusted: whether clients may send what reaches the engine's internals.
    """
    try:
        found: Any = _read(body)
    except msgspec.ValidationError:
        return  # no object: the engine refuses it
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest("the body is not JSON") from None  # for us, and may be for vLLM
    for key in () if trusted else _INTERNAL:
        if given(getattr(found, key)):
            raise BadRequest(
                f"{key} is not for clients; OPTION_TRUST_REQUEST_INTERNALS=true lets them send it",
                key,
            )
    for key, longest in _LONGEST.items():
        if len(getattr(found, key)) > longest:
            raise BadRequest(f"{key} has more than {longest} bytes", key)
    if given(found.n) and _number(found.n) * prompts(found.prompt) > SEQUENCES:
        raise BadRequest(f"n times the prompts may be at most {SEQUENCES}", "n")


def _number(n: msgspec.Raw) -> int:
    try:
        return msgspec.json.decode(n, type=int)
    except msgspec.MsgspecError:
        raise BadRequest("n should be a whole number", "n") from None
