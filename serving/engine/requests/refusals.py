# SPDX-License-Identifier: Apache-2.0
"""In the server's process: what vLLM 0.32 answers with 500 though the request is at fault.

- A whole number of more than 64 bits anywhere in what goes to the engine's process, such as in a
  schema: MessagePack, in which it goes there, has none.
- A grammar that vLLM's checks let pass, and that its compiler refuses, or that allows no token.
"""

from collections.abc import Callable
from typing import Any

from starlette.datastructures import State
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.exceptions import VLLMValidationError

TOO_LARGE = (
    "a number of the request has more than 64 bits; send one between -2^63 and 2^64 - 1, or leave "
    "it out"
)
NO_ANSWER = (
    "the engine cannot compile the constraint on the answer, or it allows no answer; simplify the "
    "schema, pattern or grammar, or leave it out"
)


def mend(state: State, is_constrained: Callable[[Any], bool]) -> None:
    """Have all that comes from now on be refused as it should. is_constrained: whether the answer
    that one of vLLM's serving objects is making has a constraint.
    """
    client: Any = state.engine_client
    core = client.engine_core
    core.__class__ = _saying_what_is_too_large(type(core), client.output_processor)
    GenerateBaseServing._raise_if_error = _blaming_the_constraint(
        GenerateBaseServing._raise_if_error, is_constrained
    )


def _saying_what_is_too_large(core_class: Any, processor: Any) -> Any:
    class Saying(core_class):  # type: ignore[misc]  # vLLM is not type-checked
        async def add_request_async(self, request: Any) -> None:
            try:
                await super().add_request_async(request)
            except OverflowError:
                processor.abort_requests((request.request_id,), internal=True)  # has it already
                raise VLLMValidationError(TOO_LARGE) from None

    return Saying


def _blaming_the_constraint(raise_if_error: Any, is_constrained: Callable[[Any], bool]) -> Any:
    def blaming(self: Any, finish_reason: str | None, request_id: str) -> None:
        if finish_reason == "error" and is_constrained(self):
            raise VLLMValidationError(NO_ANSWER)
        raise_if_error(self, finish_reason, request_id)

    return blaming
