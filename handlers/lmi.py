# SPDX-License-Identifier: Apache-2.0
"""LMI's text generation format: `inputs` and `parameters` in, `generated_text` out.

The schema is that of Amazon SageMaker's LMI container, which took it from Hugging Face's text
generation inference server. It becomes an OpenAI completion for the engine.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from handlers.records import EngineCall, FormatError, Step, flag, read

DEFAULT_MAX_NEW_TOKENS = 30
BESIDE = 128 * 1024
"""Most bytes beside `inputs` and `adapters` if these are lists: each input gets a copy of them."""

_RENAMED = {
    "max_new_tokens": "max_tokens",
    "truncate": "truncate_prompt_tokens",
    "ignore_eos_token": "ignore_eos",
}

MEANINGLESS = frozenset(
    ("best_of", "early_stopping", "num_beams", "top_n_tokens", "typical_p", "watermark")
)
"""Parameters of other engines, for search and watermarks, which vLLM lacks."""
_UNDERSTOOD = {
    *("decoder_input_details", "details", "do_sample", "return_full_text"),
    *("stop", "stop_sequences"),
}
_ELSEWHERE = {"adapters", "model", "stream"}
"""Keys that only count beside the parameters, and not in them."""
SAMPLING = frozenset(
    (
        *("allowed_token_ids", "bad_words", "do_sample", "frequency_penalty", "ignore_eos"),
        *("ignore_eos_token", "include_stop_str_in_output", "length_penalty", "logit_bias"),
        *("max_new_tokens", "max_tokens", "min_p", "min_tokens", "presence_penalty"),
        *("repetition_penalty", "response_format", "seed", "skip_special_tokens"),
        *("spaces_between_special_tokens", "stop", "stop_sequences", "stop_token_ids"),
        *("structured_outputs", "temperature", "top_k", "top_p", "truncate"),
        *("truncate_prompt_tokens", "use_beam_search"),
    )
)
"""Parameters that also count beside `inputs`: they change the generated tokens, not the form of the
answer.
"""
PASSED = SAMPLING | {
    *("add_special_tokens", "cache_salt", "echo", "guided_choice", "guided_decoding_backend"),
    *("guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern"),
    *("ec_transfer_params", "kv_transfer_params", "logprob_token_ids", "logprobs", "n", "priority"),
    *("prompt_logprobs", "repetition_detection", "request_id", "return_mm_kwargs"),
    *("return_token_ids", "return_token_offsets", "return_tokens_as_token_ids", "session_id"),
    *("routed_experts_prompt_start", "stream_interval", "stream_options", "suffix"),
    *("thinking_token_budget", "truncation_side", "user", "vllm_xargs", "watermarking"),
    *("mm_payload", "prompt", "prompt_embeds"),
}
"""Parameters with an effect in vLLM's completions."""
_EFFECTIVE = PASSED | _UNDERSTOOD | _ELSEWHERE
_NOT_PASSED = MEANINGLESS | _UNDERSTOOD | _ELSEWHERE
KNOWN = (
    PASSED
    | MEANINGLESS
    | _UNDERSTOOD
    | {"max_completion_tokens", "messages", "tool_choice", "tools", "top_logprobs"}
)
"""Names that clients send on purpose, with or without effect here."""
BESIDE_INPUTS = frozenset(
    ("inputs", "parameters", "stream", "model", "cache_salt", "adapters", "requestType")
)
"""Keys of a request with an effect here."""


class _Parameters(msgspec.Struct):
    """The parameters that Slipway reads; the others are passed to vLLM unchanged."""

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    return_full_text: bool | None = None
    stop: str | list[str] | None = None
    stop_sequences: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    seed: int | None = None


_FLAGS = {"do_sample", "details", "decoder_input_details", "return_full_text"}


class _Request(msgspec.Struct):
    inputs: str | list[str]
    parameters: dict[str, Any] | None = None
    stream: bool | float | str | None = None
    model: str | None = None
    cache_salt: str | None = None


class _Lists(msgspec.Struct):
    inputs: msgspec.Raw = msgspec.Raw()
    adapters: msgspec.Raw = msgspec.Raw()


_read_request = msgspec.json.Decoder(_Request).decode
_read_values = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_read_lists = msgspec.json.Decoder(_Lists).decode
_encode = msgspec.json.encode


def parse(body: bytes) -> EngineCall:
    """Read an LMI request. Raises FormatError for a wrong type or an impossible request."""
    request = read(_read_request, body)
    given = request.parameters or {}
    ignored = sorted(given.keys() - _EFFECTIVE)
    ignored += _take_in(given, read(_read_values, body))
    given |= {name: flag(given[name]) for name in _FLAGS & given.keys()}
    stream = False if request.stream is None else flag(request.stream)
    if not isinstance(stream, bool):
        raise FormatError(f"Expected true or false, got {stream!r:.50} - at `$.stream`", "stream")
    try:
        # LMI reads "50" as a number, and "true" as true.
        parameters = msgspec.convert(given, _Parameters, strict=False)
    except msgspec.ValidationError as error:
        raise FormatError(str(error)) from None
    if stream and isinstance(request.inputs, list):
        raise FormatError("a list of inputs cannot be streamed; send one per request", "inputs")
    if stream and (parameters.n or 1) > 1:
        raise FormatError("more than one sequence cannot be streamed; leave n at 1", "n")
    if (parameters.n or 1) > 1 and not parameters.details:
        raise FormatError(
            "n above 1 needs details: true, where the others are in best_of_sequences", "n"
        )

    call: dict[str, Any] = {
        _RENAMED.get(name, name): value
        for name, value in (given | msgspec.structs.asdict(parameters)).items()
        if name not in _NOT_PASSED and value is not None
    }
    call["prompt"] = request.inputs
    call.setdefault("max_tokens", DEFAULT_MAX_NEW_TOKENS)
    if parameters.do_sample is False:
        call["temperature"] = 0
    if stop := [*_listed(parameters.stop), *_listed(parameters.stop_sequences)]:
        call["stop"] = stop
    if request.model:
        call["model"] = request.model
    if request.cache_salt is not None:
        call["cache_salt"] = request.cache_salt
    if stream or parameters.details:
        call.setdefault("logprobs", 0)  # only of the chosen tokens
        call["return_token_ids"] = True
    if stream:
        call["stream"] = True
    elif parameters.details and parameters.decoder_input_details:
        call.setdefault("prompt_logprobs", 0)
    reply = LmiReply(request.inputs, parameters)
    return EngineCall("/v1/completions", call, reply, reply if stream else None, (*ignored,))


def _take_in(parameters: dict[str, Any], request: dict[str, msgspec.Raw]) -> list[str]:
    """Move sampling parameters beside `inputs` into the parameters, which take precedence.

    Returns the names of the keys that have no effect.
    """
    beside = request.keys() - BESIDE_INPUTS
    if not beside:
        return []
    named = {_RENAMED.get(name, name) for name in parameters}
    taken = {it for it in beside & SAMPLING if _RENAMED.get(it, it) not in named}
    parameters |= {name: msgspec.json.decode(request[name]) for name in taken}
    return sorted(beside - taken)


def split(body: bytes, count: int) -> list[bytes]:
    """Return a request for each of the inputs, with the other fields and its adapter.

    Raises FormatError if the numbers of inputs and adapters differ, or the other fields are too
    large.
    """
    lists = read(_read_lists, body)
    several = bytes(lists.inputs).startswith(b"[")
    prompts = read(_read_list, lists.inputs) if several else []
    if not several or len(prompts) != count:
        raise FormatError(
            f"adapters is a list of {count}; inputs should be a list of as many", "adapters"
        )
    if len(body) - len(lists.inputs) - len(lists.adapters) > BESIDE:
        raise FormatError(
            f"a request with a list of adapters may have {BESIDE} bytes beside it and its inputs"
        )
    request = read(_read_values, body)
    del request["inputs"], request["adapters"]
    if flag(msgspec.json.decode(request.get("stream", b"null"))) not in (None, False):
        raise FormatError("a list of inputs cannot be streamed; send one per request", "inputs")
    return [_encode({**request, "inputs": prompt}) for prompt in prompts]


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]


class _PromptLogprob(msgspec.Struct):
    logprob: float
    decoded_token: str | None = None


class _Choice(msgspec.Struct):
    text: str
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_read_completion = msgspec.json.Decoder(_Completion).decode


class LmiReply:
    """Renders an OpenAI completion, whole or step by step, as LMI does."""

    def __init__(self, inputs: str | list[str], parameters: _Parameters) -> None:
        self._inputs = inputs
        self._parameters = parameters
        self._text: list[str] = []
        self._generated_tokens = 0
        self._input_length: int | None = None

    def whole(self, answer: bytes) -> bytes:
        choices = sorted(_read_completion(answer).choices, key=lambda choice: choice.index)
        if isinstance(self._inputs, str):
            return _encode(self._sequence(self._inputs, choices))
        n = self._parameters.n or 1
        return _encode(
            [
                self._sequence(prompt, choices[place * n : (place + 1) * n])
                for place, prompt in enumerate(self._inputs)
            ]
        )

    def step(
        self, step: Step, *, before: bytes, after: bytes, write: Callable[[bytes], object]
    ) -> None:
        if step.prompt_tokens is not None:
            self._input_length = step.prompt_tokens
        self._generated_tokens += len(step.token_ids)
        self._text.append(step.text)
        lines = [_Line(token) for token in _tokens(step)]
        if step.finish_reason:
            self._end(lines[-1], step)
        write(b"".join([b"%b%b%b" % (before, _encode(line), after) for line in lines]))

    def _end(self, line: "_Line", step: Step) -> None:
        """Add the summary of the whole answer to the last object of a stream."""
        line.generated_text = self._full_text(str(self._inputs), "".join(self._text))
        if self._parameters.details:
            line.details = {
                "finish_reason": self._finish_reason(step),
                "seed": self._parameters.seed,
                "generated_tokens": self._generated_tokens,
                "input_length": self._input_length,
            }

    def _sequence(self, prompt: str, choices: list[_Choice]) -> dict[str, Any]:
        """Return the object for a prompt: its first choice, with the others in the details."""
        first, *others = choices
        sequence: dict[str, Any] = {"generated_text": self._full_text(prompt, first.text)}
        if not self._parameters.details:
            return sequence
        sequence["details"] = self._details(first)
        sequence["details"]["prefill"] = _prefill(first)
        sequence["details"]["input_length"] = len(first.prompt_token_ids or ())
        if others:
            sequence["details"]["best_of_sequences"] = [
                {"generated_text": self._full_text(prompt, other.text)} | self._details(other)
                for other in others
            ]
        return sequence

    def _details(self, choice: _Choice) -> dict[str, Any]:
        return {
            "finish_reason": self._finish_reason(choice),
            "generated_tokens": len(choice.token_ids or ()),
            "seed": self._parameters.seed,
            "tokens": _tokens(_step(choice)),
        }

    def _full_text(self, prompt: str, text: str) -> str:
        return prompt + text if self._parameters.return_full_text else text

    def _finish_reason(self, choice: _Choice | Step) -> str | None:
        """Return LMI's reason for vLLM's: `stop` is an end-of-sequence token or a requested stop.

        A model may have several end-of-sequence tokens; vLLM names all but one in stop_reason.
        """
        if choice.finish_reason != "stop":
            return choice.finish_reason
        asked = isinstance(choice.stop_reason, str) or choice.stop_reason in (
            self._parameters.stop_token_ids or ()
        )
        return "stop_sequence" if asked else "eos_token"


class _Token(msgspec.Struct, gc=False):
    """A token with both names: LMI's code has logprob, and its documentation has log_prob."""

    id: int | None
    text: str | None
    logprob: float | None
    log_prob: float | None


class _Line(msgspec.Struct, tag_field="index", tag=0):
    """One object of a stream, whose index is 0: there is one sequence."""

    token: _Token
    generated_text: str | None = None
    details: dict[str, Any] | None = None


def _step(choice: _Choice) -> Step:
    """Return a whole choice as a step."""
    logprobs = choice.logprobs
    return Step(
        choice.text,
        choice.token_ids or (),
        logprobs.tokens if logprobs else (),
        logprobs.token_logprobs if logprobs else (),
        choice.finish_reason,
        choice.stop_reason,
    )


def _tokens(step: Step) -> list[_Token]:
    """Return the tokens of a step. Their joined texts are always the step's text.

    A stop sequence cuts text off the end, so each token gets its part of the step's text. If that
    fails, because several tokens form one character, the last token has the whole text.
    """
    ids: Sequence[int | None] = step.token_ids or (None,)
    logprobs = step.logprobs
    if len(ids) != len(logprobs):
        logprobs = [None] * len(ids)
    if len(ids) == 1:
        return [_Token(ids[0], step.text, logprobs[0], logprobs[0])]
    own = step.texts
    if len(own) == len(ids) and "".join(own).startswith(step.text):
        ends = list(itertools.accumulate(len(text) for text in own))
        texts = [step.text[end - len(text) : end] for text, end in zip(own, ends, strict=True)]
    else:
        texts = [""] * (len(ids) - 1) + [step.text]
    return [
        _Token(token, text, logprob, logprob)
        for token, text, logprob in zip(ids, texts, logprobs, strict=True)
    ]


def _prefill(choice: _Choice) -> list[_Token]:
    """The prompt's tokens with their log probabilities; the first token has none."""
    prefill = []
    for token, logprobs in zip(
        choice.prompt_token_ids or (), choice.prompt_logprobs or (), strict=False
    ):
        found = (logprobs or {}).get(str(token))
        logprob = found.logprob if found else None
        text = found.decoded_token if found else None
        prefill.append(_Token(token, text, logprob, logprob))
    return prefill
