# SPDX-License-Identifier: Apache-2.0
"""Completions, also for the requests of LMI's API."""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers.inputs.preprocess import extract_prompt_components

from serving.engine.texts.generation import (
    DONE,
    Asked,
    Generation,
    beginning,
    bounded,
    chunk,
    counts,
    encode,
    event,
    experts,
    shown,
    without_nulls,
)
from serving.engine.texts.prompts import TextParams
from serving.engine.texts.request_models import RequestModels, is_text
from serving.engine.texts.streams import LOWEST, Part
from serving.errors import BadRequest

_TAIL = (
    b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null'
    b',"token_ids":null}]}\n\n'
)


class Completions(Generation):
    requests = RequestModels(CompletionRequest, "prompt", is_text)
    prefix = "cmpl-"

    async def render(self, request: Any, renderer: Any) -> Any:
        if request.stream and request.use_beam_search:
            raise BadRequest("Streaming is not currently supported with beam search")
        prompts = await renderer.render_completion(request)
        return prompts if isinstance(prompts, ErrorResponse) else (None, prompts)

    def text_params(self, request: Any) -> TextParams:
        return TextParams(request.build_tok_params(self.config), None)

    def answer(self, request: Any) -> "_Answer":
        return _Answer(self, request)


class _Answer:
    def __init__(self, path: Completions, request: Any) -> None:
        self._path = path
        self._request = request
        self._n = request.n or 1
        self._by_id = path.by_id(request)
        self._shown = shown(request, request.logprobs, beside=1)

    def begin(self, asked: Asked) -> None:
        path, request = self._path, self._request
        self._prompts = asked.prompts
        self._head: dict[str, Any] = {
            "id": asked.name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }
        if not request.stream:
            return
        self._has_usage, self._always_usage = path.include_usage(request)
        more = request.logprobs is not None or request.return_token_ids or self._always_usage
        self._before = beginning(self._head)
        self._plain = not more
        """Whether events have a text alone."""
        # By the number of a choice, of a stream
        self._begun: set[int] = set()
        self._generated: dict[int, int] = defaultdict(int)
        self._offsets: dict[int, int] = defaultdict(int)
        # By that of a prompt
        self._prompt_tokens: dict[int, int] = {}
        self._result: Any = None
        self._cached: int | None = None

    def part(self, output: Any, result: Any, prompt: int) -> bytes | None:
        request, choice = self._request, output.index + prompt * self._n
        if result is not None:
            if self._result is None:
                self._cached = result.num_cached_tokens
            self._result = result
            self._prompt_tokens[prompt] = len(result.prompt_token_ids)
        text, token_ids, logprobs = output.text, output.token_ids, output.logprobs
        ids = None
        if choice not in self._begun:
            if not (text or token_ids or request.echo):
                return None  # a part of the prompt was computed
            self._begun.add(choice)
            if request.echo or request.return_token_ids:
                ids = result.prompt_token_ids
            if request.echo:
                text, token_ids, logprobs = self._echoed(output, result, prompt)
        self._generated[choice] += len(output.token_ids)
        ends = output.finish_reason is not None
        if self._plain and not ends and ids is None:
            return self._text(choice, text)
        told = None
        if request.logprobs is not None:
            told = self._logprobs(token_ids, logprobs, self._offsets[choice])
            if told["tokens"]:
                self._offsets[choice] = told["text_offset"][-1] + len(told["tokens"][-1])
        more: dict[str, Any] = {}
        if self._always_usage:
            more["usage"] = counts(self._prompt_tokens[prompt], self._generated[choice])
        if ends and not self._has_usage and self._path.fingerprint is not None:
            more["system_fingerprint"] = self._path.fingerprint
        found = {
            "index": choice,
            "text": text,
            "logprobs": told,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": ids,
            "token_ids": [*output.token_ids] if request.return_token_ids else None,
        }
        return chunk(self._before, found, more)

    def token(
        self, text: str, token_ids: Sequence[int], logprobs: Any, prompt: int
    ) -> bytes | None:
        if not self._plain:
            return self.part(Part(text, token_ids, logprobs), None, prompt)
        self._generated[prompt] += len(token_ids)
        return self._text(prompt, text)

    def _text(self, choice: int, text: str) -> bytes:
        """An event that has a text alone."""
        return b'%b{"index":%d,"text":%b%b' % (self._before, choice, encode(text), _TAIL)

    def end(self) -> Iterable[bytes]:
        if self._has_usage:
            generated = sum(self._generated.values())
            usage = counts(sum(self._prompt_tokens.values()), generated)
            data = self._head | {
                "choices": [],
                "usage": usage | {"prompt_tokens_details": self._details(self._cached)},
                "system_fingerprint": self._path.fingerprint,
                "metrics": self._metrics(self._result, generated),
            }
            yield event(without_nulls(data))
        yield DONE

    def whole(self, results: Sequence[Any]) -> bytes:
        request = self._request
        choices: list[dict[str, Any]] = []
        for prompt, result in enumerate(results):
            logprobs_of_prompt = bounded(result.prompt_logprobs)
            for output in result.outputs:
                text, token_ids, logprobs = output.text, output.token_ids, output.logprobs
                if request.echo:
                    text, token_ids, logprobs = self._echoed(output, result, prompt)
                told = None
                if request.logprobs is not None:
                    told = self._logprobs(token_ids, logprobs, 0)
                choices.append(
                    {
                        "index": len(choices),
                        "text": text,
                        "logprobs": told,
                        "finish_reason": output.finish_reason,
                        "stop_reason": output.stop_reason,
                        "token_ids": [*output.token_ids] if request.return_token_ids else None,
                        "prompt_logprobs": logprobs_of_prompt,
                        "prompt_token_ids": (
                            result.prompt_token_ids if request.return_token_ids else None
                        ),
                        "routed_experts": experts(output),
                    }
                )
        first, last = results[0], results[-1]
        generated = sum(len(it.token_ids) for result in results for it in result.outputs)
        usage = counts(sum(len(it.prompt_token_ids) for it in results), generated)
        data = self._head | {
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._path.fingerprint,
            "usage": usage
            | {
                "prompt_tokens_details": self._details(last.num_cached_tokens),
                "completion_tokens_details": None,
            },
            "kv_transfer_params": first.kv_transfer_params,
            "ec_transfer_params": first.ec_transfer_params,
            "metrics": self._metrics(last, generated),
        }
        return encode(data)

    def _echoed(self, output: Any, result: Any, prompt: int) -> tuple[str, Sequence[int], Any]:
        """The text, the tokens and the log probabilities of an output behind its prompt's."""
        request, before = self._request, ""
        if not request.return_token_ids:
            before = result.prompt
            if before is None:
                parts = extract_prompt_components(self._path.config, self._prompts[prompt])
                before = parts.text
        if request.max_tokens == 0:
            return before, result.prompt_token_ids, result.prompt_logprobs
        logprobs = [*(result.prompt_logprobs or ()), *(output.logprobs or ())]
        return before + output.text, [*result.prompt_token_ids, *output.token_ids], logprobs

    def _logprobs(self, token_ids: Sequence[int], given: Any, offset: int) -> dict[str, Any]:
        """Log probabilities as OpenAI's completions have them. offset: of the first token."""
        text, by_id = self._path.token, self._by_id
        assert given is not None, "Did not output logprobs"
        offsets, own, tokens, top = [], [], [], []
        for number, token_id in enumerate(token_ids):
            found = given[number]
            chosen = found and found[token_id]
            tokens.append(token := text(token_id, chosen, by_id=by_id))
            own.append(max(chosen.logprob, LOWEST) if found else None)
            alternatives = {
                text(another, it, by_id=by_id): max(it.logprob, LOWEST)
                for another, it in itertools.islice(found.items() if found else (), self._shown)
            }
            top.append(alternatives if found else None)
            offsets.append(offset)
            offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": own,
            "tokens": tokens,
            "top_logprobs": top,
        }

    def _details(self, cached: int | None) -> dict[str, Any] | None:
        if not self._path.args.enable_prompt_tokens_details or cached is None:
            return None
        return {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}

    def _metrics(self, result: Any, generated: int) -> dict[str, Any] | None:
        if len(self._prompts) > 1 or self._n > 1 or result is None:
            return None  # they would be of one of the sequences
        return self._path.metrics(result, generated)
