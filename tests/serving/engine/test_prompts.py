# SPDX-License-Identifier: Apache-2.0
"""Prompts of vLLM's own renderer: short ones on the event loop, long ones in a thread."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.tokenizers.hf import get_cached_tokenizer

from serving.engine.texts.prompts import SHORT, Prompts, plain_tokenizer
from tests.support.models import tiny

pytestmark = pytest.mark.anyio

TEXTS = ("", "The import statement is", "<s> é ☃ 𝄞\n\n  x</s>", "<|im_start|>user\nHi<|im_end|>")
PARAMS = TokenizeParams(max_total_tokens=2048)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.make())


@pytest.fixture
def renderer(tokenizer) -> Any:
    """vLLM's of requests, as far as prompts need it."""
    model = SimpleNamespace(
        enable_prompt_embeds=False,
        hf_config=None,
        is_encoder_decoder=False,
        multimodal_config=None,
        max_model_len=2048,
        renderer_num_workers=1,
        supports_multimodal_inputs=False,
    )
    config: Any = SimpleNamespace(
        model_config=model, parallel_config=SimpleNamespace(_api_process_rank=0)
    )
    return SimpleNamespace(renderer=HfRenderer(config, get_cached_tokenizer(tokenizer)))


async def turns(work) -> int:
    """How many turns of the event loop others have until a coroutine has ended, up to 2."""
    task = asyncio.ensure_future(work)
    for turn in range(3):
        await asyncio.sleep(0)
        if task.done():
            return turn
    await task
    return 2


async def test_a_long_prompt_does_not_hold_the_loop_and_a_short_one_has_no_thread(renderer):
    prompts = Prompts(renderer, at_once=True)
    for size, rest in ((SHORT, 0), (SHORT + 1, 2)):
        work = prompts.renderer(size).renderer.render_cmpl_async([{"prompt": "a b"}], PARAMS)
        assert await turns(work) == rest
    long = asyncio.ensure_future(
        prompts.renderer(10**6).renderer.render_cmpl_async([{"prompt": "a " * 1000}], PARAMS)
    )
    await asyncio.sleep(0)
    short = prompts.renderer(1).renderer.render_cmpl_async([{"prompt": "a"}], PARAMS)
    assert await turns(short) == 2  # the thread has one of vLLM's tokenizers
    await long
    assert prompts.in_threads == 0


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 2},
        {"truncate_prompt_tokens": 2, "truncation_side": "left"},
        {"return_token_offsets": True},
        {"needs_detokenization": True},
        {"do_lower_case": True},
    ],
    ids=str,
)
async def test_a_short_prompt_has_vllms_tokens(renderer, text, more):
    params = TokenizeParams(max_total_tokens=2048, **more)
    ours = Prompts(renderer, at_once=True).renderer(1).renderer
    (found,) = await ours.render_cmpl_async([{"prompt": text}], params)
    (theirs,) = renderer.renderer.render_cmpl([{"prompt": text}], params)
    del found["arrival_time"], theirs["arrival_time"]
    assert found == theirs


async def test_too_long_a_prompt_is_refused_in_vllms_words(renderer):
    ours = Prompts(renderer, at_once=True).renderer(1).renderer
    for prompt in ("a b c d e f g h", "a" * 10_000, {"prompt_token_ids": [300] * 9}):
        given = [prompt if isinstance(prompt, dict) else {"prompt": prompt}]
        refusals = []
        for render in (ours.render_cmpl_async, renderer.renderer.render_cmpl_async):
            with pytest.raises(VLLMValidationError) as error:
                await render(given, TokenizeParams(max_total_tokens=4))
            refusals.append(str(error.value))
        assert refusals[0] == refusals[1]


async def test_a_chat_has_vllms_tokens(renderer, monkeypatch):
    chat = ChatParams("{% for it in messages %}<s>{{ it.content }}{% endfor %}", "string")
    messages = [[{"role": "user", "content": "The import statement is"}]]
    params = TokenizeParams(max_total_tokens=2048, add_special_tokens=False)
    ours = Prompts(renderer, at_once=True).renderer(1).renderer
    monkeypatch.setattr(
        "vllm.renderers.hf.resolve_chat_template_content_format", lambda **_: "string"
    )
    chat = ChatParams(chat.chat_template, "string", {"tokenize": False})
    _, (found,) = await ours.render_chat_async(messages, chat, params)
    _, (theirs,) = renderer.renderer.render_chat(messages, chat, params)
    assert found["prompt_token_ids"] == theirs["prompt_token_ids"]


def test_another_class_is_not_used(tokenizer):
    class OfAModel(PreTrainedTokenizerFast):  # type: ignore[misc]
        """A class of remote code."""

    assert plain_tokenizer(OfAModel(tokenizer_object=tokenizer.backend_tokenizer)) is None
    assert plain_tokenizer(None) is None


def test_a_tokenizer_that_would_cut_or_split_differently_is_not_used(tokenizer):
    tokenizer.backend_tokenizer.enable_truncation(5)
    assert plain_tokenizer(tokenizer) is None
    tokenizer.backend_tokenizer.no_truncation()
    assert plain_tokenizer(tokenizer)
    tokenizer.split_special_tokens = True
    assert plain_tokenizer(tokenizer) is None
