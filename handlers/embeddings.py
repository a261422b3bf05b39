# SPDX-License-Identifier: Apache-2.0
"""LMI's format for embeddings: `inputs` in, a list of vectors out."""

from typing import Any

import msgspec

from handlers.lmi import BESIDE_INPUTS
from handlers.records import EngineCall, read


class _Request(msgspec.Struct):
    inputs: str | list[str]
    parameters: dict[str, Any] | None = None
    model: str | None = None
    cache_salt: str | None = None


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw
    index: int


class _Answer(msgspec.Struct):
    data: list[_Vector]


_PASSED = ("dimensions", "truncate_prompt_tokens", "truncation_side")
_read_request = msgspec.json.Decoder(_Request).decode
_read_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_answer = msgspec.json.Decoder(_Answer).decode


def parse(body: bytes, normalize: bool) -> EngineCall:
    """Read a request for embeddings. Raises FormatError when it has a wrong type.

    normalize: scale vectors to the length 1.
    """
    request = read(_read_request, body)
    parameters = request.parameters or {}
    call: dict[str, Any] = {"input": request.inputs, "use_activation": normalize}
    call |= {name: parameters[name] for name in _PASSED if parameters.get(name) is not None}
    if request.model:
        call["model"] = request.model
    salt = request.cache_salt
    if salt is None:
        salt = parameters.get("cache_salt")
    if salt is not None:
        call["cache_salt"] = salt
    beside = read(_read_keys, body).keys() - BESIDE_INPUTS
    ignored = sorted(beside | parameters.keys() - {*_PASSED, "cache_salt"})
    return EngineCall("/v1/embeddings", call, _Reply(), ignored=(*ignored,))


class _Reply:
    def whole(self, answer: bytes) -> bytes:
        vectors = sorted(_read_answer(answer).data, key=lambda vector: vector.index)
        return b"[" + b",".join(bytes(vector.embedding) for vector in vectors) + b"]"
