# SPDX-License-Identifier: Apache-2.0
"""In the server's process: streams of vLLM 0.32 with no more in an event than LMI's format needs.

vLLM builds each event with pydantic, and every token's log probability twice; with them a streamed
token costs nearly twice as much of the server's time as without. The request's own way through vLLM
stays what it is: only how an output is written differs, and only for requests with our header.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextvars import ContextVar
from typing import Any

import msgspec
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.exceptions import GenerationError

from handlers.records import LEAN

_lean: ContextVar[bool] = ContextVar("lean", default=False)


class Completions(OpenAIServingCompletion):  # type: ignore[misc]  # vLLM is not type-checked
    """vLLM's completions. A lean stream has one choice, and no usage at its end."""

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        _lean.set(raw_request is not None and LEAN.decode() in raw_request.headers)
        return await super().create_completion(request, raw_request)

    def completion_stream_generator(
        self,
        request: Any,
        engine_inputs: Any,
        results: Any,
        request_id: str,
        *rest: Any,
        **more: Any,
    ) -> AsyncGenerator[str, None]:
        if _lean.get():
            return self._lean_events(results, request_id, more["tokenizer"])
        stream: AsyncGenerator[str, None] = super().completion_stream_generator(
            request, engine_inputs, results, request_id, *rest, **more
        )
        return stream

    async def _lean_events(
        self, results: AsyncIterator[tuple[int, Any]], request_id: str, tokenizer: Any
    ) -> AsyncGenerator[str, None]:
        has_begun = False
        try:
            async for _, result in results:
                (output,) = result.outputs
                self._raise_if_error(output.finish_reason, request_id)
                if not has_begun and not output.text and not output.token_ids:
                    continue  # a part of the prompt was computed
                logprobs = [
                    (self._get_decoded_token(entry, token, tokenizer), max(entry.logprob, -9999.0))
                    for token, top in zip(output.token_ids, output.logprobs or (), strict=False)
                    if (entry := top[token])
                ]
                choice = {
                    "text": output.text,
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                    "token_ids": [*output.token_ids],
                    "prompt_token_ids": None if has_begun else result.prompt_token_ids,
                    "logprobs": {
                        "tokens": [token for token, _ in logprobs],
                        "token_logprobs": [logprob for _, logprob in logprobs],
                    },
                }
                has_begun = True
                yield f"data: {msgspec.json.encode({'choices': [choice]}).decode()}\n\n"
        except GenerationError as error:
            yield f"data: {self._convert_generation_error_to_streaming_response(error)}\n\n"
        except Exception as error:
            yield f"data: {self.create_streaming_error_response(error)}\n\n"
        yield "data: [DONE]\n\n"
