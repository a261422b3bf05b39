# SPDX-License-Identifier: Apache-2.0
"""Requests at fault that vLLM answers with 500 are answered with 400."""

from functools import wraps
from typing import Any

from serving.engine.patches.frontend.context import Context
from serving.patching.patch import SERVER, Name, Patch, replace

TOO_LARGE = (
    "a number of the request has more than 64 bits; send one between -2^63 and 2^64 - 1, or leave "
    "it out"
)
NO_ANSWER = (
    "the engine cannot compile the constraint on the answer, or it allows no answer; simplify the "
    "schema, pattern or grammar, or leave it out"
)
_CLIENT = "vllm.v1.engine.core_client:AsyncMPClient"


def _put_numbers(context: Context) -> None:
    from vllm.exceptions import VLLMValidationError

    client: Any = context.state.engine_client

    def make(add_request: Any) -> Any:
        @wraps(add_request)
        async def add_request_async(self: Any, request: Any) -> None:
            try:
                await add_request(self, request)
            except OverflowError:
                # The processor of outputs has it already.
                client.output_processor.abort_requests((request.request_id,), internal=True)
                raise VLLMValidationError(TOO_LARGE) from None

        return add_request_async

    replace(type(client.engine_core), "add_request_async", make)


def _put_constraints(context: Context) -> None:
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import VLLMValidationError

    def make(raise_if_error: Any) -> Any:
        @wraps(raise_if_error)
        def blaming(self: Any, finish_reason: str | None, request_id: str) -> None:
            if finish_reason == "error" and context.is_constrained(self):
                raise VLLMValidationError(NO_ANSWER)
            raise_if_error(self, finish_reason, request_id)

        return blaming

    replace(GenerateBaseServing, "_raise_if_error", make)


NUMBERS = Patch(
    name="large_numbers",
    process=SERVER,
    names=(
        Name(f"{_CLIENT}.add_request_async", "self, request"),
        Name(
            "vllm.v1.engine.output_processor:OutputProcessor.abort_requests",
            "self, request_ids, internal",
        ),
    ),
    does="Refuses integers of more than 64 bits anywhere in a request to the engine.",
    why="Requests reach the engine as MessagePack, which has no larger integers.",
    without="such a number, for example in a schema, is answered with 500",
    closed=False,
    put=_put_numbers,
)
CONSTRAINTS = Patch(
    name="constraints",
    process=SERVER,
    names=(
        Name(
            "vllm.entrypoints.generate.base.serving:GenerateBaseServing._raise_if_error",
            "self, finish_reason, request_id",
        ),
    ),
    does="Reports a constraint that the engine cannot compile as the client's error.",
    why="vLLM's checks accept grammars that its compiler refuses, or that allow no token.",
    without="such a constraint is answered with 500",
    closed=False,
    put=_put_constraints,
)
