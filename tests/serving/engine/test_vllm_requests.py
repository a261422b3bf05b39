# SPDX-License-Identifier: Apache-2.0
"""The fields of vLLM's request models that clients can reach: a new vLLM's additions fail here.

After an update of vLLM, check each new field that this test reports: if clients could misuse it,
add a limit in serving/inference/content/checks.py; otherwise add a reason here.
"""

import dataclasses
import inspect
import typing
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError
from vllm import PoolingParams, SamplingParams
from vllm.entrypoints.anthropic.api_router import count_tokens, create_messages
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.api_router import create_responses
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.classify.api_router import create_classify
from vllm.entrypoints.pooling.classify.protocol import ClassificationRequest
from vllm.entrypoints.pooling.embed.api_router import create_embedding
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.pooling.pooling.api_router import create_pooling
from vllm.entrypoints.pooling.pooling.protocol import IOProcessorRequest, PoolingRequest
from vllm.entrypoints.pooling.scoring.api_router import create_score, do_rerank
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
from vllm.entrypoints.serve.tokenize.api_router import detokenize, tokenize
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
from vllm.entrypoints.speech_to_text.transcription.api_router import create_transcriptions
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.api_router import create_translations
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest
from vllm.multimodal.image import ALLOWED_IMAGE_FORMATS
from vllm.renderers.chat_utils import MM_PARSER_MAP, TEXT_PART_TYPES

from handlers import lmi
from serving.engine.requests import pooling as ours
from serving.inference.content import checks, media
from serving.inference.content.fields import PAIRS
from serving.protocol import ENGINE_PATHS, RERANK_PATHS, SCORE_PATHS
from tests import agents

REQUESTS = {
    "/v1/chat/completions": (create_chat_completion, ChatCompletionRequest),
    "/v1/completions": (create_completion, CompletionRequest),
    "/v1/embeddings": (create_embedding, EmbeddingRequest),
    "/v1/responses": (create_responses, ResponsesRequest),
    "/v1/messages": (create_messages, AnthropicMessagesRequest),
    "/v1/messages/count_tokens": (count_tokens, AnthropicCountTokensRequest),
    **dict.fromkeys(RERANK_PATHS, (do_rerank, RerankRequest)),
    **dict.fromkeys(SCORE_PATHS, (create_score, ScoreRequest)),
    "/classify": (create_classify, ClassificationRequest),
    "/pooling": (create_pooling, PoolingRequest),
    "/tokenize": (tokenize, TokenizeRequest),
    "/detokenize": (detokenize, DetokenizeRequest),
    "/v1/audio/transcriptions": (create_transcriptions, TranscriptionRequest),
    "/v1/audio/translations": (create_translations, TranslationRequest),
}

LIMITED = {
    *(*checks._INTERNAL, *checks._LONGEST, *PAIRS),
    *("n", "prompt", "input", "messages", "echo", "prompt_logprobs", "repetition_detection"),
    *("system", "top_k", "stream_interval", "priority"),
    *("instruction", "max_tokens_per_query", "max_tokens_per_doc"),
}
"""Limited by serving/inference/content/checks.py."""

REWRITTEN = {
    "cache_salt": "the engine gets a digest",
    "session_id": "the engine gets a digest",
    "model": "the model's own name or an adapter's inner one, else the engine refuses it",
}
REFUSED = dict.fromkeys(
    ("chat_template",),
    "by vLLM, unless the operator trusts clients",
) | {
    "prompt_embeds": "by vLLM, unless the operator enables them; VLLM_MAX_EMBED_DECODE_BYTES",
    "suffix": "by vLLM, always",
    **dict.fromkeys(checks.KEPT.keys() - {"prompt"}, "by checks.check_kept()"),
}
VLLM_LIMITS = {
    "logprobs": "max_logprobs",
    "top_logprobs": "max_logprobs",
    "max_tokens": "max_model_len",
    "max_completion_tokens": "max_model_len",
    "max_output_tokens": "max_model_len",
    "min_tokens": "max_tokens",
    "truncate_prompt_tokens": "it only shortens; text beyond max_model_len is not tokenised",
    "thinking_token_budget": "a number; it only shortens",
    "padding": "pads to max_model_len, which an input may have anyway",
    "dimensions": "those of the model",
}
ONE_NUMBER = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty"),
    *("temperature", "top_p", "min_p", "seed"),
    *("routed_experts_prompt_start", "top_n"),
)
ONE_OF_A_FEW = (
    *("stream", "reasoning_effort", "include_reasoning", "parallel_tool_calls", "watermarking"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "truncation_side"),
    *("spaces_between_special_tokens", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "return_tokens_as_token_ids", "return_token_ids", "mm_payload"),
    *("stream_include_usage", "stream_continuous_usage_stats"),
    *("return_token_offsets", "return_prompt_text", "return_mm_kwargs", "encoding_format"),
    *("embed_dtype", "endianness", "use_activation", "task", "return_token_strs"),
)
HARMLESS = {
    **dict.fromkeys(ONE_NUMBER, "one number, which costs the same whatever it is"),
    **dict.fromkeys(ONE_OF_A_FEW, "one of a few values"),
    "use_beam_search": "n beams with 2 n log probabilities, so max_logprobs limits n",
    "user": "not read",
    "service_tier": "not read, one of a few values",
    "prompt_cache_key": "read by serving/cache_hints alone, with a limit",
    "max_tool_calls": "not read: no tools run here",
    "truncation": "one of two values; it only shortens",
    "reasoning": "an effort of a few, and a text that is not read",
    "thinking": "a number or a switch",
    "enable_response_messages": "the prompt's tokens are sent back once",
    "instructions": "becomes a part of the prompt",
    "stream_options": "two flags",
    "tokens": "a list in a body that has a limit of its own",
    "file": "its length, by serving/engine/speech/sound.py",
    "hotwords": "becomes a part of the prompt; the fields of a form have a limit",
    "language": "one that the model knows",
    "to_language": "one that the model knows",
    "timestamp_granularities": "not read",
}
NESTED = {
    "StreamOptions": "flags",
    "ResponseFormat": "response_format",
    "JsonSchemaResponseFormat": "response_format",
    "StructuralTagResponseFormat": "response_format",
    "LegacyStructuralTagResponseFormat": "response_format",
    "LegacyStructuralTag": "response_format",
    "StructuredOutputsParams": "structured_outputs",
    "ChatCompletionToolsParam": "tools",
    "FunctionDefinition": "tools",
    "ChatCompletionNamedToolChoiceParam": "tool_choice",
    "ChatCompletionNamedFunction": "tool_choice",
    "AnthropicTool": "tools",
    "AnthropicToolChoice": "tool_choice",
    "AnthropicOutputConfig": "output_config",
    "AnthropicJsonOutputFormat": "output_config",
    "AnthropicThinkingConfigEnabled": "thinking",
    "AnthropicThinkingConfigDisabled": "thinking",
    "AnthropicThinkingConfigAdaptive": "thinking",
}
"""Models within a field that has a limit as a whole, whatever their own fields are."""
FIELDS = {
    "RepetitionDetectionParams": {"max_pattern_size", "min_pattern_size", "min_count"},
    # The content of a message becomes a part of the prompt.
    "CustomChatCompletionMessageParam": {
        *("role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "tools", "task")
    },
    "AnthropicMessage": {"role", "content"},
    "AnthropicContentBlock": {
        *("type", "text", "source", "id", "tool_use_id", "name", "input", "content", "is_error"),
        *("tool_name", "thinking", "signature", "data", "tool"),
    },
    "AnthropicToolChangeReference": {"type", "name"},
    "AnthropicToolChangeDefinition": {"type", "definition"},
    "ScoreMultiModalParam": {"content"},
    "AudioURL": {"url"},
    "VideoURL": {"url"},
    "PILImage": {"image_pil"},  # JSON cannot express it
    "CustomThinkCompletionContentParam": {"thinking", "closed", "type"},
    "CustomChatCompletionContentToolReferenceParam": {"name", "type"},
    "ChatCompletionContentPartPromptEmbedsParam": {"data", "type"},
}
SAMPLING = {
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens"),
    *("logprobs", "prompt_logprobs", "logprob_token_ids", "skip_special_tokens", "watermarking"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "stream_interval"),
    *("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "output_kind"),
    *("thinking_token_budget", "repetition_detection", "routed_experts_prompt_start"),
    "extra_args",  # of vllm_xargs and the two for transfers
}
NOT_OF_REQUESTS = {
    *("prompt_logprob_token_ids", "prompt_logprob_start", "flat_logprobs", "detokenize"),
    *("skip_clone", "output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids"),
    *("_watermarking_skipped", "_bad_words_token_ids", "skip_reading_prefix_cache"),
    "trace_decode_token_ids",
}
POOLING = {
    *("use_activation", "dimensions"),  # no request can set the others
    *("step_tag_id", "returned_token_ids", "task", "requires_token_ids", "output_kind"),
    *("skip_reading_prefix_cache", "late_interaction_params", "extra_kwargs"),
}


def fields_of(kind: Any) -> dict[str, Any] | None:
    """A model's fields and their types; None if it is not a model of vLLM's."""
    if not inspect.isclass(kind) or not kind.__module__.startswith("vllm"):
        return None
    if hasattr(kind, "model_fields"):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    hints = typing.get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}
    return hints if hasattr(kind, "__required_keys__") else None


def models(*roots: Any) -> dict[Any, dict[str, Any]]:
    """vLLM's models that these types can reach, with their fields."""
    found: dict[Any, dict[str, Any]] = {}
    left = [*roots]
    while left:
        kind = left.pop()
        left.extend(get_args(kind))
        if kind not in found and not get_args(kind) and (fields := fields_of(kind)):
            found[kind] = fields
            left.extend(fields.values())
    return found


TOP = [
    *(ChatCompletionRequest, CompletionRequest, *get_args(get_args(EmbeddingRequest)[0])),
    *(ResponsesRequest, AnthropicMessagesRequest, AnthropicCountTokensRequest),
    *(RerankRequest, *get_args(ScoreRequest), DetokenizeRequest, *get_args(TokenizeRequest)),
    *get_args(get_args(ClassificationRequest)[0]),
    *(it for it in get_args(get_args(PoolingRequest)[0]) if it is not IOProcessorRequest),
    *(TranscriptionRequest, TranslationRequest),
]


def test_the_requests_are_those_of_our_paths():
    assert {*ENGINE_PATHS} == REQUESTS.keys()
    for endpoint, model in REQUESTS.values():
        asked = inspect.get_annotations(endpoint)["request"]
        assert model in (asked, *get_args(asked))


@pytest.mark.parametrize("model", TOP, ids=lambda it: it.__name__)
def test_every_field_has_a_limit_or_needs_none(model):
    known = LIMITED | REWRITTEN.keys() | REFUSED.keys() | VLLM_LIMITS.keys() | HARMLESS.keys()
    assert {*model.model_fields} - known == set(), "limit them, or say why they need no limit"


def test_no_reason_is_out_of_date():
    fields = {name for model in TOP for name in model.model_fields}
    reasons = [*LIMITED, *REWRITTEN, *REFUSED, *VLLM_LIMITS, *HARMLESS]
    assert {*reasons} - fields == set()
    assert len({*reasons}) == len(reasons), "one reason for each"


def test_every_model_within_is_known():
    parts = {*media._KEYS, "uuid", "type"}
    for model, fields in models(*TOP).items():
        name = model.__name__
        if model in TOP or name in NESTED:
            continue
        assert fields.keys() <= FIELDS.get(name, parts), name


def test_parameters_of_sampling_and_pooling():
    assert {*SamplingParams.__struct_fields__} == SAMPLING | NOT_OF_REQUESTS
    assert {*PoolingParams.__struct_fields__} == POOLING


def test_formats_of_pictures():
    assert media.FORMATS == ALLOWED_IMAGE_FORMATS


def test_parts_of_messages():
    # Embedded prompts have neither a uuid nor a cache, and operators must allow them.
    known = {*media._BY_TYPE, *TEXT_PART_TYPES, "tool_reference", "prompt_embeds"}
    assert known == MM_PARSER_MAP.keys()


MESSAGE = {"role": "user", "content": "a"}
EMBEDDINGS = [
    {"input": "a"},
    {"input": ["a", "b"], "dimensions": 2},
    {"input": [1, 2]},
    {"input": [[1, 2], [3]]},
    {"input": []},
    {"messages": [MESSAGE], "add_generation_prompt": True},
    {"messages": [[MESSAGE], [MESSAGE, MESSAGE]]},
    {"input": [MESSAGE]},
    {"input": [[MESSAGE], [MESSAGE]]},
]


PAIRED = [
    {"text_1": "a", "text_2": ["b"]},
    {"queries": ["a"], "documents": ["b"]},
    {"queries": "a", "items": ["b"], "instruction": "c"},
    {"queries": "a", "documents": ["c"], "items": ["b"]},
    {"data_1": "a", "data_2": {"content": [{"type": "text", "text": "b"}]}},
]
READ_ONCE = [
    *((ours.EmbeddingRequest, EmbeddingRequest, body) for body in EMBEDDINGS),
    *((ours.ScoreRequest, ScoreRequest, body) for body in PAIRED),
    *(
        (one, theirs, body)
        for one, theirs in (
            (ours.ClassificationRequest, ClassificationRequest),
            (ours.PoolingRequest, PoolingRequest),
        )
        for body in EMBEDDINGS[:6]
    ),
]


@pytest.mark.parametrize(("one", "theirs", "body"), READ_ONCE, ids=lambda it: f"{it}"[-40:])
def test_a_request_is_what_vllm_takes_it_for(one, theirs, body):
    read, expected = (TypeAdapter(kind).validate_python(body) for kind in (one, theirs))
    assert type(read) is type(expected)
    assert read.model_dump(exclude={"request_id"}) == expected.model_dump(exclude={"request_id"})


@pytest.mark.parametrize("body", [{"input": [None]}, {"messages": [[None]]}, {"input": [[{}]]}, []])
def test_a_request_for_embeddings_is_read_as_one_kind(body):
    """vLLM's own union reads it as all five."""
    with pytest.raises(ValidationError) as error:
        TypeAdapter(ours.EmbeddingRequest).validate_python(body)
    assert len({it["loc"][0] for it in error.value.errors()}) == 1


@pytest.mark.parametrize("sent", agents.sent(), ids=str)
def test_vllm_accepts_what_released_clients_send(sent):
    _, theirs = REQUESTS[sent.path.partition("?")[0]]
    theirs.model_validate(sent.body)


def test_every_field_of_a_completion_is_a_parameter_of_lmis():
    """The server would claim that a field of a later vLLM has no effect."""
    fields = CompletionRequest.model_fields.keys()
    assert fields - lmi.PASSED == {"model", "stream"}  # these two are outside of `parameters`
