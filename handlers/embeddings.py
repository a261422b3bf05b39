# SPDX-License-Identifier: Apache-2.0
"""LMI's format for embeddings: `inputs` in, a list of vectors out."""

from typing import Any

import msgspec

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


_read_request = msgspec.json.Decoder(_Request).decode
_read_answer = msgspec.json.Decoder(_Answer).decode


def parse(body: bytes, normalize: bool) -> EngineCall:
    """Read a request for embeddings. Raises FormatError when it has a wrong type.

    normalize: scale vectors to the length 1.
    """
    request = read(_read_request, body)
    call: dict[str, Any] = {"input": request.inputs, "use_activation": normalize}
    if request.model:
        call["model"] = request.model
    salt = request.cache_salt
    if salt is None:
        salt = (request.parameters or {}).get("cache_salt")
    if salt is not None:
        call["cache_salt"] = salt
    return EngineCall("/v1/embeddings", msgspec.json.encode(call), _Reply())


class _Reply:
    def whole(self, answer: bytes) -> bytes:
        vectors = sorted(_read_answer(answer).data, key=lambda vector: vector.index)
        return b"[" + b",".join(bytes(vector.embedding) for vector in vectors) + b"]"

    def event(self, data: bytes) -> list[bytes]:
        raise NotImplementedError("embeddings are not streamed")
