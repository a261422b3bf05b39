# SPDX-License-Identifier: Apache-2.0
"""Completions and chats by vLLM's client (AsyncLLM.generate()), without its serving objects.

vLLM's models read requests, its renderers make prompts of tokens, and its parsers read what the
model has written. Slipway writes the answers. Their fields and their order are vLLM's, which
tests/e2e/test_calls.py compares.
"""

import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from pydantic_core import to_jsonable_python
from vllm import envs
from vllm.entrypoints.generate.base.serving import (
    build_per_request_timing_metrics,
    build_spec_decoding_metrics,
)
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens, should_include_usage
from vllm.entrypoints.serve.utils.fingerprint import get_system_fingerprint
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.renderers.inputs.preprocess import extract_prompt_components, extract_prompt_len
from vllm.utils.async_utils import merge_async_iterators
from vllm.utils.serial_utils import numpy2base64

from serving.engine.texts.prompts import Prompts, TextParams
from serving.engine.texts.request_models import Known, RequestModels
from serving.engine.texts.streams import LOWEST, Steps, Stream

log = logging.getLogger(__name__)

encode = msgspec.json.Encoder(enc_hook=to_jsonable_python).encode
DONE = b"data: [DONE]\n\n"
NO_TOKENIZER = "Unable to get tokenizer because `skip_tokenizer_init=True`"


class Asked(NamedTuple):
    """A rendered request. name: the answer's. model: the name of the model or adapter. prompts:
    for vLLM's engine. conversation: as the model sees it; None of a completion.
    """

    name: str
    model: str
    prompts: Sequence[Any]
    conversation: Any


class Answer(Protocol):
    """Writes the answer to one request."""

    def begin(self, asked: Asked) -> None:
        """Take the rendered request, before any output."""

    def part(self, output: Any, result: Any, prompt: int) -> bytes | None:
        """Events for an output of a stream, or nothing. result: the output's result; None if the
        output is not the first of its prompt. prompt: the prompt's number.
        """

    def token(
        self, text: str, token_ids: Sequence[int], logprobs: Any, prompt: int
    ) -> bytes | None:
        """Return the event of further tokens, or None. Neither the first tokens of a prompt nor its
        last ones come here, and it has one answer.
        """

    def end(self) -> Iterable[bytes]:
        """The last events of a stream."""

    def whole(self, results: Sequence[Any]) -> bytes:
        """The whole answer. results: for each prompt, with all that it has become."""


class Generation:
    """Answers the calls of a path.

    requests: makes vLLM's models of them. prefix: of an answer's name.
    """

    requests: RequestModels
    prefix: str

    def __init__(self, client: Any, state: Any, args: Any, prompts: Prompts) -> None:
        self.args = args
        self.config = config = client.model_config
        self.tokenizer = client.renderer.tokenizer
        self.fingerprint = get_system_fingerprint(client.vllm_config)
        self.log = state.online_renderer.request_logger
        self._models = state.openai_serving_models
        self._prompts = prompts
        self._transfers = client.vllm_config.kv_transfer_config is not None
        self._defaults = config.get_diff_sampling_param()
        self._most = (
            config.override_generation_config.get("max_new_tokens")
            if config.generation_config in ("auto", "vllm")
            else self._defaults.get("max_tokens")
        )
        self._keep_alive = float(args.sse_keep_alive_interval)

    # What paths differ in

    async def render(self, request: Any, renderer: Any) -> Any:
        """The conversation and the prompts, or vLLM's ErrorResponse."""
        raise NotImplementedError

    def text_params(self, request: Any) -> TextParams | None:
        """The parameters of a prompt that is a text; None if render() also changes the request."""
        raise NotImplementedError

    def answer(self, request: Any) -> Answer:
        """A writer for the request's answer."""
        raise NotImplementedError

    def adapter_by_media(self, request: Any) -> Any:
        """vLLM's adapter for the media of a request, where the operator has named one."""

    def most_tokens(self, request: Any) -> int | None:
        """How many tokens the request asks for."""
        return request.max_tokens  # type: ignore[no-any-return]

    def more(self, answer: Any, request: Any, prompt: Any) -> Mapping[str, Any]:
        """More arguments of generate()."""
        return {}

    # All paths

    async def __call__(self, call: Any, sink: Any, client: Any) -> None:
        """Answer a call (base.Call). sink: its Sink. client: its client of vLLM (calls.CallClient).
        Raises what vLLM raises, and ServingError.
        """
        request, known = self.requests.of(call.request, call.size)
        try:
            answer, results = await self._ask(call, request, known, sink, client)
            if not request.stream:
                body = answer.whole(await _last(results, client))
        except BaseException:
            await self._tell_of_rejection(request, client)
            raise
        if not request.stream:
            await sink.answer(body)
            return
        sink.stream()
        try:
            await self._stream(call, sink, client, answer, results)
        except Exception as error:
            client.stream_error(error)  # vLLM has other words for it than in a whole answer
            raise

    async def _stream(
        self, call: Any, sink: Any, client: Any, answer: Answer, results: list[Any]
    ) -> None:
        give = sink.step if call.steps else sink.event
        interval = 0 if call.steps else self._keep_alive
        parts = with_sse_keep_alive(_parts(answer, results, client), interval)
        async with contextlib.aclosing(parts):
            async for part in parts:
                await give(part.encode() if isinstance(part, str) else part)
                if call.cancellation.cause:
                    return
        await sink.end()

    async def _ask(
        self, call: Any, request: Any, known: Known | None, sink: Any, client: Any
    ) -> tuple[Answer, list[Any]]:
        """The writer of the answer, and vLLM's generators of results, one for each prompt."""
        if self.log:
            self.log.log_request_body(request)
        adapter = await self._adapter(request.model, client) or self.adapter_by_media(request)
        if client.errored:
            raise client.dead_error
        client.check_admission(request.n or 1)
        answer: Any = Steps(self.tokenizer) if call.steps else self.answer(request)
        rendered = await self._rendered(call, request, known)
        if isinstance(rendered, ErrorResponse):
            raise client.refusal(rendered)
        conversation, prompts = rendered
        model = self._models.model_name(adapter)
        asked = Asked(f"{self.prefix}{call.request_id}", model, prompts, conversation)
        answer.begin(asked)
        at_once = request.stream and (request.n or 1) == 1 and (call.steps or not self._keep_alive)
        results = []
        for number, prompt in enumerate(prompts):
            name = asked.name if conversation is not None else f"{asked.name}-{number}"
            params, more = self._params(call, request, known, name, prompt, adapter)
            if request.use_beam_search:
                results.append(_Beams(client).beam_search(prompt, name, params, **more))
                continue
            if at_once:
                more["stream"] = functools.partial(Stream, call, sink, answer, number)
            more["priority"] = request.priority
            more |= self.more(answer, request, prompt)
            results.append(client.generate(prompt, params, name, **more))
        return answer, results

    async def _rendered(self, call: Any, request: Any, known: Known | None) -> Any:
        """As render(), which known parameters do not need if a first text was the same without."""
        shared = known if self._prompts.are_at_once else None
        if shared and shared.text:
            return self._of_text(request, shared.text)
        rendered = await self.render(request, self._prompts.renderer(call.size))
        if shared and not (shared.is_compared or isinstance(rendered, ErrorResponse)):
            params = self.text_params(request)
            if params and _timeless(self._of_text(request, params)) == _timeless(rendered):
                shared.text = params
            shared.is_compared = True
        return rendered

    def _of_text(self, request: Any, params: TextParams) -> Any:
        prompt = getattr(request, self.requests.key)
        return self._prompts.of_text(prompt, params, request.cache_salt)

    async def _adapter(self, name: str | None, client: Any) -> Any:
        """vLLM's adapter of this name; None for the model's own."""
        if found := self._models.lora_requests.get(name):
            return found
        if not name or envs.VLLM_SKIP_MODEL_NAME_VALIDATION or self._models.is_base_model(name):
            return None
        if envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            found = await self._models.resolve_lora(name)
            if isinstance(found, LoRARequest):
                return found
            if found.error.code == 400:
                raise client.refusal(found)
        known = ", ".join(it.name for it in self._models.base_model_paths)
        # Not our own error: its message goes through from_engine(), which hides inner names.
        raise VLLMNotFoundError(f"The model `{name}` does not exist. Valid aliases: {known}.")

    def _params(
        self,
        call: Any,
        request: Any,
        known: Known | None,
        name: str,
        prompt: Any,
        adapter: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """vLLM's parameters of sampling for a prompt, and other arguments."""
        most = get_max_tokens(
            self.config.max_model_len,
            self.most_tokens(request),
            extract_prompt_len(self.config, prompt),
            self._defaults,
            self._most,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        if request.use_beam_search:
            params = request.to_beam_search_params(most, self._defaults)
        elif known and known.text:
            params = known.sampling(most, lambda: request.to_sampling_params(most, self._defaults))
        else:
            params = request.to_sampling_params(most, self._defaults)
        if self.log:
            parts = extract_prompt_components(self.config, prompt)
            self.log.log_inputs(name, parts.text, parts.token_ids, parts.embeds, params, adapter)
        return params, {
            "lora_request": adapter,
            "trace_headers": call.trace or None,
            "session_id": request.session_id or call.session or _session(request.vllm_xargs),
        }

    async def _tell_of_rejection(self, request: Any, client: Any) -> None:
        """If a request fails, tell the connector that KV of the request on another server is not
        fetched.
        """
        transfer = self._transfers and request.kv_transfer_params
        if transfer and transfer.get("do_remote_prefill"):
            try:
                await client.notify_kv_transfer_request_rejected(request.request_id, transfer)
            except Exception:
                log.warning("the connector was not told of a rejected request", exc_info=True)

    # What answers have

    def include_usage(self, request: Any) -> tuple[bool, bool]:
        """Whether a stream has its usage at the end, and in each event."""
        found: tuple[bool, bool] = should_include_usage(
            request.stream_options, self.args.enable_force_include_usage
        )
        return found

    def metrics(self, result: Any, generated: int) -> dict[str, Any] | None:
        """How quickly a sequence came, where the operator wants that told."""
        timed = self.args.enable_per_request_metrics
        found = build_per_request_timing_metrics(result.metrics, generated) if timed else None
        if (drafts := build_spec_decoding_metrics(result)) is not None:
            found = found or build_per_request_timing_metrics(None, generated)
            found.speculative_decoding = drafts
        return found.model_dump() if found else None

    def token(self, number: int, logprob: Any, *, by_id: bool) -> str:
        """A token's own text. logprob: vLLM's of it, if there is one."""
        if by_id:
            return f"token_id:{number}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token  # type: ignore[no-any-return]
        if self.tokenizer is None:
            raise VLLMValidationError(NO_TOKENIZER, parameter="skip_tokenizer_init")
        return self.tokenizer.decode([number])  # type: ignore[no-any-return]

    def by_id(self, request: Any) -> bool:
        """Whether tokens are written as their numbers."""
        asked = request.return_tokens_as_token_ids
        return self.args.return_tokens_as_token_ids if asked is None else asked  # type: ignore[no-any-return]


class _Beams(BeamSearchOnlineMixin):  # type: ignore[misc]  # vLLM is not type-checked
    """vLLM's beam search, whose requests are a call's."""

    def __init__(self, client: Any) -> None:
        self.engine_client = client
        self.renderer = client.renderer


async def _parts(answer: Answer, results: list[Any], client: Any) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(merge_async_iterators(*results)) as merged:
        async for number, result in merged:
            for output in result.outputs:
                client.require_success(output.finish_reason)
                if part := answer.part(output, result, number):
                    yield part
    for part in answer.end():
        yield part


async def _last(results: list[Any], client: Any) -> list[Any]:
    """The last result of each."""
    found: list[Any] = [None] * len(results)
    if len(results) == 1:  # as mostly; a generator more takes longer than what it does
        async for found[0] in results[0]:
            pass
    else:
        async with contextlib.aclosing(merge_async_iterators(*results)) as merged:
            async for number, result in merged:
                found[number] = result
    for result in found:
        for output in result.outputs:
            client.require_success(output.finish_reason)
    return found


def _timeless(rendered: Any) -> Any:
    """A rendered request without the time when it came."""
    conversation, prompts = rendered
    return conversation, [{**it, "arrival_time": None} for it in prompts]


def _session(more: Mapping[str, Any] | None) -> str | None:
    found = (more or {}).get("session_id")
    return found if isinstance(found, str) and found else None


def shown(request: Any, asked: int | None, beside: int = 0) -> int | None:
    """Return the number of log probabilities that are written for a position; None for all. asked:
    the number that the request asks for. beside: the number of further ones.
    """
    return None if request.logprob_token_ids or asked == -1 else (asked or 0) + beside


def counts(prompt: int, generated: int) -> dict[str, Any]:
    """The usage of an answer."""
    total = prompt + generated
    return {"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": generated}


def event(data: Any) -> bytes:
    return b"data: %b\n\n" % encode(data)


def beginning(head: Any) -> bytes:
    """How an event with a choice begins: up to the choice."""
    return b'data: %b,"choices":[' % encode(head)[:-1]


def chunk(before: bytes, choice: Any, more: Mapping[str, Any]) -> bytes:
    """An event with a choice. before: its beginning(). more: fields that follow the choice."""
    after = b"," + encode(more)[1:-1] if more else b""
    return b"%b%b]%b}\n\n" % (before, encode(choice), after)


def without_nulls(value: Any) -> Any:
    """A JSON object without the members that are null."""
    if not isinstance(value, dict):
        return value
    return {key: without_nulls(it) for key, it in value.items() if it is not None}


def bounded(prompt_logprobs: Any) -> Any:
    """Log probabilities of a prompt, as JSON may have them."""
    for position in prompt_logprobs or ():
        for it in (position or {}).values():
            if it.logprob == float("-inf"):
                it.logprob = LOWEST
    return prompt_logprobs


def experts(output: Any) -> str | None:
    """Which experts took each token, where the operator wants that told."""
    found = output.routed_experts
    return None if found is None else numpy2base64(found)
