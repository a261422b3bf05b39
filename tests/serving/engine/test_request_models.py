# SPDX-License-Identifier: Apache-2.0
"""Requests have vLLM's models, whether or not their parameters were read before."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

from serving.engine.texts import request_models
from serving.engine.texts.prompts import SHORT
from serving.engine.texts.request_models import RequestModels, are_texts, is_text

PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"max_tokens": 3, "temperature": 0},
    {"max_tokens": 3, "temperature": False},
    {"n": True},
    {"n": 1},
    {"seed": 1, "unknown": 1},
    {"seed": 1, "unknown": True},
    {"seed": 1, "unknown": "1"},
    {"temperature": float("inf")},
    {"temperature": None},
    {"stop": ["a"], "vllm_xargs": {"a": 1}},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"response_format": {"type": "json_object"}},
    {"request_id": "a"},
    {"cache_salt": "of one tenant"},
    {"cache_salt": "of another"},
    {"n": "no number"},
    {"min_tokens": -1, "logprobs": "a"},
)
PROMPTS: tuple[Any, ...] = (
    *("a b", "é ☃ 𝄞", "", "half \ud800", None),
    *(["a", "b"], [1, 2], [[1], [2]], [None], {"a": 1}),
)
USUAL = {"role": "user", "content": "a b"}
MESSAGES: tuple[Any, ...] = (
    *([USUAL], [{"role": "system", "content": "x"}, USUAL, {"role": "assistant", "content": "y"}]),
    *([], None, "a", [USUAL, "a"], [USUAL, {}], [USUAL | {"name": "n"}], [USUAL | {"role": "no"}]),
    [USUAL | {"content": "half \ud800"}],
    [USUAL | {"content": ""}],
    [USUAL | {"content": None}],
    [USUAL | {"content": [{"type": "text", "text": "a"}]}],
    [{"role": "assistant", "content": "a", "reasoning_content": "b"}],
    [{"role": "developer", "content": "a"}],
    [{"role": "tool", "content": "a", "tool_call_id": "1"}],
)
PATHS = (
    (CompletionRequest, "prompt", is_text, PROMPTS),
    (ChatCompletionRequest, "messages", are_texts, MESSAGES),
)
paths = pytest.mark.parametrize("path", PATHS, ids=["completions", "chats"])


def shown(read: Any, values: dict[str, Any]) -> Any:
    """The model that is made, or the error."""
    try:
        found = read(values)
    except (ValidationError, VLLMValidationError, TypeError) as error:
        return type(error), str(error)
    kept = found.model_fields_set
    left = set() if "request_id" in values else {"request_id"}
    return found.model_dump(exclude=left), kept - left


@paths
def test_a_model_is_vllms(path):
    kind, key, is_plain, prompts = path
    models, vllms = RequestModels(kind, key, is_plain), TypeAdapter(kind).validate_python
    for parameters in PARAMETERS * 2:
        for prompt in prompts:
            given = {key: prompt, **parameters}
            ours = shown(lambda it: models.of(it, 1)[0], given)
            assert ours == shown(lambda it: vllms(it, from_attributes=True), given), given


@paths
def test_parameters_are_read_once_and_a_prompt_is_not_kept(path):
    kind, key, is_plain, prompts = path
    models = RequestModels(kind, key, is_plain)
    first, second = (models.of({key: prompts[it], "max_tokens": 3}, 1)[0] for it in (0, 1))
    assert (getattr(first, key), getattr(second, key)) == prompts[:2]
    assert first.request_id != second.request_id
    (known,) = models._known.values()
    assert getattr(known.model, key) is None
    first.min_tokens = 2
    third, again = models.of({key: prompts[0], "max_tokens": 3}, 1)
    assert (second.min_tokens, third.min_tokens, again) == (0, 0, known)


@pytest.mark.parametrize(
    ("more", "size"), [({}, SHORT + 1), ({"stop": []}, 1), ({"vllm_xargs": {}}, 1)]
)
def test_what_is_long_or_could_change_is_not_shared(more, size):
    models = RequestModels(CompletionRequest, "prompt", is_text)
    models.of({"prompt": "a", **more}, size)
    assert not models._known


def test_few_parameters_are_remembered(monkeypatch):
    monkeypatch.setattr(request_models, "REMEMBERED", 3)
    models = RequestModels(CompletionRequest, "prompt", is_text)
    for seed in range(10):
        assert models.of({"prompt": "a", "seed": seed}, 1)[0].seed == seed
        assert len(models._known) <= 3
