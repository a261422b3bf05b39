# SPDX-License-Identifier: Apache-2.0
"""Chats. vLLM's parsers find the calls and the reasoning in what a model has written."""

import copy
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage, ToolCall
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
)
from vllm.parser.abstract_parser import DelegatingParser
from vllm.renderers.inputs.preprocess import extract_prompt_components

from serving.engine.patches.frontend import forced_calls
from serving.engine.requests import tools
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
from serving.engine.texts.prompts import Prompts, TextParams
from serving.engine.texts.request_models import RequestModels, are_texts
from serving.engine.texts.streams import LOWEST, Part
from serving.engine.versions import moved

_TAIL = b',"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'


class Chats(Generation):
    requests = RequestModels(ChatCompletionRequest, "messages", are_texts)
    prefix = "chatcmpl-"

    def __init__(self, client: Any, state: Any, args: Any, prompts: Prompts) -> None:
        super().__init__(client, state, args, prompts)
        self._renderer = renderer = state.online_renderer
        binds = not renderer.use_harmony and forced_calls.PATCH.applies() is None
        self._forced = tools.forced_parser(renderer.parser, args) if binds else None
        """The parser of forced calls, if there is no grammar for the model's format."""
        self.reasons = bool(args.structured_outputs_config.reasoning_parser)

    def most_tokens(self, request: Any) -> int | None:
        found = request.max_completion_tokens
        return request.max_tokens if found is None else found  # type: ignore[no-any-return]

    def adapter_by_media(self, request: Any) -> Any:
        adapters = self._models.lora_requests
        if not adapters:
            return None
        kinds = {
            part["type"].split("_")[0]
            for message in request.messages
            if isinstance(parts := message.get("content"), list)
            for part in parts
            if "type" in part
        }
        found = [it for it in adapters.values() if it.lora_name in kinds]
        return found[0] if len(found) == 1 else None

    async def render(self, request: Any, renderer: Any) -> Any:
        if self._forced and tools.is_forced(request):
            renderer = copy.copy(renderer)
            renderer.parser = self._forced
        return await renderer.render_chat(request)

    def text_params(self, request: Any) -> TextParams | None:
        renderer = self._renderer
        if renderer.parser is not None:
            return None
        options = {**renderer.default_chat_template_kwargs, "tokenize": False}
        chat = request.build_chat_params(
            renderer.chat_template, renderer.chat_template_content_format
        )
        return TextParams(request.build_tok_params(self.config), chat.with_defaults(options))

    def answer(self, request: Any) -> "_Answer":
        return _Answer(self, request)

    def more(self, answer: Any, request: Any, prompt: Any) -> Mapping[str, Any]:
        parser, options = answer.parser, None
        tokens: list[int] = []
        if parser is not None and parser.reasoning_parser is not None:
            tokens = extract_prompt_components(self.config, prompt).token_ids or []
            options = {"chat_template_kwargs": answer.options}
        return {
            "reasoning_ended": moved.reasoning_ended(request, parser, tokens),
            "reasoning_parser_kwargs": options,
        }

    def parser(self, request: Any) -> Any:
        """vLLM's parser of the model's text, or None."""
        forced = self._forced and tools.is_forced(request)
        return self._forced if forced else self._renderer.parser

    def options(self, request: Any) -> dict[str, Any]:
        """The options of the chat template."""
        renderer = self._renderer
        params = request.build_chat_params(
            renderer.chat_template, renderer.chat_template_content_format
        )
        found = params.with_defaults(renderer.default_chat_template_kwargs)
        return found.chat_template_kwargs  # type: ignore[no-any-return]

    @property
    def calls_tools(self) -> bool:
        """Whether the model may call tools without being asked to."""
        return bool(self._renderer.enable_auto_tools)


class _Answer:
    """parser: vLLM's parser of the model's text; it keeps the state of an answer. options: of the
    chat template, for the parser.
    """

    def __init__(self, path: Chats, request: Any) -> None:
        self._path = path
        self._request = request
        self._kind = path.parser(request)
        self.options = path.options(request) if self._kind else {}
        self.parser = self._new_parser()
        self._hides = self._kind is not None and not request.include_reasoning
        """Whether what could show reasoning is left out."""
        self._n = request.n or 1
        self._by_id = path.by_id(request)
        self._named = type(request.tool_choice) is ChatCompletionNamedToolChoiceParam
        self._logs = path.log if path.args.enable_log_outputs else None

    def begin(self, asked: Asked) -> None:
        request = self._request
        self._asked = asked
        self._head = {
            "id": asked.name,
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(time.time()),
            "model": asked.model,
        }
        generates = request.add_generation_prompt
        self._role = self._path.args.response_role if generates else request.messages[-1]["role"]
        if request.stream:
            self._begin_stream()

    # A stream

    def _begin_stream(self) -> None:
        request = self._request
        self._has_usage, self._always_usage = self._path.include_usage(request)
        more = request.logprobs or request.return_token_ids or self._always_usage or self._logs
        self._before = beginning(self._head)
        self._plain = not more
        """Whether events have a delta alone."""
        self._parses = self._kind is not None and not _passes_on(self._kind, request)
        # By the number of a choice
        self._parsers = [self._new_parser() for _ in range(self._n)] if self._parses else []
        self._ended: set[int] = set()
        self._called: set[int] = set()
        """Numbers of the choices that have called tools."""
        self._generated: dict[int, int] = defaultdict(int)
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._texts: dict[int, list[str]] = defaultdict(list)
        self._first: Any = None
        self._last: Any = None

    def part(self, output: Any, result: Any, prompt: int) -> bytes:
        self._last = result
        if self._first is None:
            self._first = result
            return b"".join([*self._beginning(result), self._event(output)])
        return self._event(output)

    def _beginning(self, result: Any) -> Iterable[bytes]:
        request = self._request
        usage = self._usage_so_far(0, 0) if self._always_usage else {}
        more = usage | {
            "prompt_token_ids": result.prompt_token_ids if request.return_token_ids else None,
            "prompt_text": result.prompt if request.return_prompt_text else None,
        }
        for choice in range(self._n):
            yield self._written(choice, {"role": self._role, "content": ""}, more)
        if request.echo and (text := self._echoed()):
            for choice in range(self._n):
                yield self._written(choice, {"content": text}, usage)

    def _written(self, choice: int, delta: Any, more: Mapping[str, Any]) -> bytes:
        found = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return chunk(self._before, found, more)

    def _event(self, output: Any) -> bytes:
        request, choice = self._request, output.index
        text, token_ids = output.text, output.token_ids
        if choice in self._ended or not (text or token_ids or self._generated[choice]):
            return b""
        self._generated[choice] += len(token_ids)
        reason = output.finish_reason
        delta = self._delta(output, choice)
        if self._plain and reason is None:
            return b"" if delta is None else self._of_delta(choice, encode(delta))
        logprobs = None
        if request.logprobs and not self._hides:
            logprobs = self._logprobs(token_ids, output.logprobs)
        shows_tokens = request.return_token_ids and not self._hides
        if delta is None and reason is None and logprobs is None and not shows_tokens:
            return b""
        if self._logs:
            self._texts[choice].append(text)
            if self._path.args.enable_log_deltas:
                self._log(_said(delta or {}), [*token_ids], reason, stream=True, delta=True)
        found = {"index": choice, "delta": delta or {}, "logprobs": logprobs}
        found["finish_reason"] = reason
        more: dict[str, Any] = {}
        if reason is not None:
            self._ended.add(choice)
            if choice in self._called and not self._named and reason == "stop":
                found["finish_reason"] = "tool_calls"
            found["stop_reason"] = output.stop_reason
        found["token_ids"] = [*token_ids] if shows_tokens else None
        if self._always_usage:
            more = self._usage_so_far(self._generated[choice], self._reasoned(choice))
        elif reason is not None and not self._has_usage and self._path.fingerprint is not None:
            more["system_fingerprint"] = self._path.fingerprint
        return chunk(self._before, found, more)

    def token(self, text: str, token_ids: Sequence[int], logprobs: Any, prompt: int) -> bytes:
        if self._parses or not self._plain:
            return self._event(Part(text, token_ids, logprobs))
        self._generated[0] += len(token_ids)
        if not text and self._kind is not None:
            return b""
        return self._of_delta(0, b'{"content":%b}' % encode(text))

    def _of_delta(self, choice: int, delta: bytes) -> bytes:
        """An event that has a delta alone."""
        return b'%b{"index":%d,"delta":%b%b' % (self._before, choice, delta, _TAIL)

    def _delta(self, output: Any, choice: int) -> dict[str, Any] | None:
        """Return the new part of a choice; None if the parser needs more tokens first."""
        if not self._parses:
            return {"content": output.text} if output.text or self._kind is None else None
        token_ids = [*output.token_ids]
        delta = self._parsers[choice].parse_delta(
            delta_text=output.text,
            delta_token_ids=token_ids,
            request=self._request,
            prompt_token_ids=self._first.prompt_token_ids,
            finished=output.finish_reason is not None,
        )
        if self._path.reasons:
            self._tokens[choice] += token_ids
        if delta is None:
            return None
        if delta.tool_calls:
            self._called.add(choice)
            if self._request.parallel_tool_calls is False:
                delta.tool_calls = [it for it in delta.tool_calls if it.index == 0]
        if type(delta) is not DeltaMessage or delta.tool_calls:
            return delta.model_dump(exclude_unset=True)  # type: ignore[no-any-return]
        given = delta.model_fields_set
        return {it: getattr(delta, it) for it in ("role", "content", "reasoning") if it in given}

    def _reasoned(self, choice: int) -> int:
        """Tokens of a choice's reasoning so far."""
        tokens = self._tokens[choice]
        return self._parsers[choice].count_reasoning_tokens((*tokens,)) if tokens else 0

    def _usage_so_far(self, generated: int, reasoned: int) -> dict[str, Any]:
        details = {"completion_tokens_details": self._reasoning_details(reasoned)}
        return {"usage": counts(_prompt_tokens(self._first), generated) | details}

    def end(self) -> Iterable[bytes]:
        generated = sum(self._generated.values())
        if self._has_usage:
            data = self._head | {
                "choices": [],
                "usage": self._usage(
                    self._first, generated, sum(map(self._reasoned, range(self._n)))
                ),
                "system_fingerprint": self._path.fingerprint,
                "metrics": self._path.metrics(self._last, generated) if self._n == 1 else None,
            }
            yield event(without_nulls(data))
        if self._logs:
            for choice in range(self._n):
                self._log("".join(self._texts[choice]), None, "streaming_complete", stream=True)
        yield DONE

    # A whole answer

    def whole(self, results: Sequence[Any]) -> bytes:
        request = self._request
        (result,) = results
        reasoned = 0
        choices = []
        for number, output in enumerate(result.outputs):
            parser = self._new_parser() if number else self.parser
            reasoning, text, calls = None, output.text, []
            if parser is not None:
                if hasattr(parser, "set_prompt_token_ids"):  # since 0.32
                    parser.set_prompt_token_ids(result.prompt_token_ids)
                reasoning, text, calls = parser.parse(
                    output.text,
                    request,
                    enable_auto_tools=self._path.calls_tools,
                    model_output_token_ids=output.token_ids,
                )
                reasoned += parser.count_reasoning_tokens(output.token_ids)
            choices.append(self._choice(output, reasoning, text, calls or []))
        if request.echo:
            before = self._echoed()
            for it in choices:
                it["message"]["content"] = before + (it["message"]["content"] or "")
        if self._logs:
            for it, output in zip(choices, result.outputs, strict=True):
                self._log(_said(it["message"]), output.token_ids, it["finish_reason"])
        generated = sum(len(it.token_ids) for it in result.outputs)
        data = self._head | {
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._path.fingerprint,
            "usage": self._usage(result, generated, reasoned),
            "prompt_logprobs": bounded(result.prompt_logprobs),
            "prompt_token_ids": result.prompt_token_ids if request.return_token_ids else None,
            "prompt_text": result.prompt if request.return_prompt_text else None,
            "kv_transfer_params": result.kv_transfer_params,
            "ec_transfer_params": result.ec_transfer_params,
            "metrics": self._path.metrics(result, generated) if self._n == 1 else None,
        }
        return encode(data)

    def _choice(
        self, output: Any, reasoning: str | None, text: str | None, calls: list[Any]
    ) -> dict[str, Any]:
        """calls: those that the parser has found."""
        request, reason = self._request, output.finish_reason or "stop"
        forced = self._named or request.tool_choice == "required"
        chosen = request.tools and request.tool_choice == "auto" and self._path.calls_tools
        if not forced and not (chosen and self._kind and self._kind.tool_parser_cls):
            calls = []
        if (calls and not forced) or (request.tool_choice == "required" and reason == "stop"):
            reason = "tool_calls"
        if request.parallel_tool_calls is False:
            calls = calls[:1]
        message = {
            "role": self._role,
            "content": text or "" if forced else text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if calls:
            message["tool_calls"] = [
                ToolCall(**({"id": it.id} if it.id else {}), function=it).model_dump()
                for it in calls
            ]
        message["reasoning"] = reasoning if request.include_reasoning else None
        logprobs = None
        if request.logprobs and not self._hides:
            logprobs = self._logprobs(output.token_ids, output.logprobs)
        shows_tokens = request.return_token_ids and not self._hides
        return {
            "index": output.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
            "token_ids": [*output.token_ids] if shows_tokens else None,
            "routed_experts": experts(output),
        }

    # Both

    def _new_parser(self) -> Any:
        if self._kind is None:
            return None
        return self._kind(
            self._path.tokenizer,
            self._request.tools,
            chat_template_kwargs=self.options,
            model_config=self._path.config,
        )

    def _echoed(self) -> str:
        """The text of the conversation's last message, if the answer continues it."""
        last = self._asked.conversation[-1] if self._asked.conversation else {}
        if not isinstance(last, dict):
            return ""  # Harmony's, which has no role in that sense
        content = (last.get("role") == self._role and last.get("content")) or ""
        return content if isinstance(content, str) else "\n".join(it["text"] for it in content)

    def _usage(self, result: Any, generated: int, reasoned: int) -> dict[str, Any]:
        found = counts(_prompt_tokens(result), generated)
        cached, created = result.num_cached_tokens, result.num_cache_creation_tokens
        media = {
            kind: sum(it.length for it in places)
            for kind, places in (self._asked.prompts[0].get("mm_placeholders") or {}).items()
            if places
        }
        told = self._path.args.enable_prompt_tokens_details
        details = {
            "cached_tokens": cached,
            "created_cache_tokens": created,
            "cache_write_tokens": created,  # OpenAI's name of it
            "multimodal_tokens": media or None,
        }
        told = told and any(it is not None for it in details.values())
        found["prompt_tokens_details"] = details if told else None
        found["completion_tokens_details"] = self._reasoning_details(reasoned)
        return found

    def _reasoning_details(self, reasoned: int) -> dict[str, Any] | None:
        return {"reasoning_tokens": reasoned} if self._path.reasons else None

    def _logprobs(self, token_ids: Sequence[int], given: Any) -> dict[str, Any]:
        """Log probabilities as OpenAI's chats have them."""
        text = self._path.token
        most = shown(self._request, self._request.top_logprobs)
        found = []
        assert given is not None, "Did not output logprobs"
        for number, token_id in enumerate(token_ids):
            alternatives = given[number]
            chosen = alternatives.get(token_id) if alternatives else None
            if chosen is None:
                own = text(token_id, None, by_id=self._by_id)
                found.append(_logprob(own, LOWEST) | {"top_logprobs": []})
                continue
            decoded = chosen.decoded_token
            one = _logprob(text(token_id, chosen, by_id=self._by_id), chosen.logprob)
            one["bytes"] = None if decoded is None else _bytes(decoded)
            one["top_logprobs"] = [
                _logprob(text(another, it, by_id=self._by_id), it.logprob)
                for another, it in itertools.islice(alternatives.items(), most)
            ]
            found.append(one)
        return {"content": found}

    def _log(
        self, said: str, tokens: Any, reason: Any, *, stream: bool = False, delta: bool = False
    ) -> None:
        if self._logs and said:
            self._logs.log_outputs(self._asked.name, said, tokens, reason, stream, delta)


def _passes_on(kind: Any, request: Any) -> bool:
    """Whether the parser passes a token's text on unchanged. Parsers of tool calls do so for a
    request without tools, but read the whole text again with each token.
    """
    return (
        kind.parse_delta is DelegatingParser.parse_delta
        and not kind.reasoning_parser_cls
        and not kind.tool_parser_cls.engine_based_streaming
        and request.tool_choice == "none"
        and request.include_reasoning
    )


def _said(message: Mapping[str, Any]) -> str:
    """The log's text of a message, or of a part of one."""
    found = [message.get("content") or ""]
    if reasoning := message.get("reasoning"):
        found.append(f"[reasoning: {reasoning}]")
    for it in message.get("tool_calls", ()):
        function = it.get("function", {})
        found.append(f"[tool_calls: {function.get('name', '')}({function.get('arguments', '')})]")
    return " ".join(it for it in found if it)


def _prompt_tokens(result: Any) -> int:
    return len(result.prompt_token_ids) + len(result.encoder_prompt_token_ids or ())


def _bytes(text: str) -> list[int]:
    return [*text.encode("utf-8", errors="replace")]


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": _bytes(text)}
