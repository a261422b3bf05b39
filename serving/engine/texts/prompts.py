# SPDX-License-Identifier: Apache-2.0
"""Tokenization of short prompts on the event loop.

vLLM uses a thread, twice for a chat. For a short prompt, the switch to the thread and back takes
longer than the work. On the ceiling bench completions took 0.73 of plain vLLM's CPU time with it,
and 0.81 without, in two runs.

Most of the remaining time is that of transformers, which makes a batch, masks and offsets of one
text. The tokenizer of the library below it makes the same tokens without them.
"""

import contextlib
import copy
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

SHORT = 4096
"""The prompt of a body up to this many bytes counts as short."""


class TextParams(NamedTuple):
    """vLLM's parameters of a text. tokens: of its tokens. chat: of a chat's template; None of a
    completion.
    """

    tokens: Any
    chat: Any


class Prompts:
    """vLLM's renderers of requests. Short prompts are tokenized on the event loop while no thread
    tokenizes others: vLLM has a tokenizer for each thread and one more.

    renderer: vLLM's renderer of requests (OnlineRenderer). at_once: whether any prompt is
    tokenized on the event loop.
    """

    def __init__(self, renderer: Any, *, at_once: bool) -> None:
        self.in_threads = 0
        self._long = self._short = renderer
        if at_once:
            self._long, self._short = copy.copy(renderer), copy.copy(renderer)
            self._long.renderer = _Renderer(renderer.renderer, self, is_short=False)
            self._short.renderer = _Renderer(renderer.renderer, self, is_short=True)

    def renderer(self, size: int) -> Any:
        """vLLM's renderer for a body. size: the body's bytes."""
        return self._short if size <= SHORT else self._long

    @property
    def are_at_once(self) -> bool:
        """Whether short prompts are tokenized on the event loop now."""
        return self._short is not self._long and not self.in_threads

    def of_text(self, prompt: Any, params: TextParams, salt: str | None) -> Any:
        """Return the conversation and the prompts of a short text, or of a chat of texts, without
        vLLM's renderer of requests, while they are_at_once. Raises vLLM's errors.
        """
        renderer, arrival = self._short.renderer.at_once, time.time()
        conversation, text = None, {"prompt": prompt}
        if params.chat is not None:
            conversation, text = renderer.render_messages(prompt, params.chat)
        tokens = renderer.tokenize_prompt(text, params.tokens)
        if salt:
            tokens["cache_salt"] = salt
        return conversation, [renderer.process_for_engine(tokens, arrival)]


class _Renderer:
    """vLLM's renderer of prompts, with another tokenization. at_once: that on the event loop."""

    def __init__(self, renderer: Any, prompts: Prompts, *, is_short: bool) -> None:
        self._renderer = renderer
        self._prompts = prompts
        self._is_short = is_short
        self.at_once = renderer
        if is_short and (plain := plain_tokenizer(renderer.tokenizer)):
            self.at_once = copy.copy(renderer)
            self.at_once.tokenize_prompt = _Plain(renderer, plain).tokenized

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_cmpl_async(self, prompts: Any, *rest: Any, **more: Any) -> Any:
        if self._is_at_once:
            return self.at_once.render_cmpl(prompts, *rest, **more)
        with self._in_thread():
            return await self._renderer.render_cmpl_async(prompts, *rest, **more)

    async def render_chat_async(self, conversations: Any, *rest: Any, **more: Any) -> Any:
        if self._is_at_once and _are_texts(conversations):
            return self.at_once.render_chat(conversations, *rest, **more)
        with self._in_thread():
            return await self._renderer.render_chat_async(conversations, *rest, **more)

    @property
    def _is_at_once(self) -> bool:
        return self._is_short and not self._prompts.in_threads

    @contextlib.contextmanager
    def _in_thread(self) -> Iterator[None]:
        self._prompts.in_threads += 1
        try:
            yield
        finally:
            self._prompts.in_threads -= 1


class _Plain:
    """Tokenizes by a plain_tokenizer(). renderer: vLLM's, which checks and cuts prompts."""

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer

    def tokenized(self, prompt: Any, params: Any) -> Any:
        """Return a prompt with its tokens (BaseRenderer.tokenize_prompt). vLLM itself tokenizes
        prompts that are more than text, are cut, or need more than tokens. Raises vLLM's errors.
        """
        tokenizer = self._tokenizer
        cuts = params.truncate_prompt_tokens is not None or tokenizer.truncation
        if prompt.keys() == {"prompt"} and not (cuts or params.return_token_offsets):
            read = params.apply_pre_tokenization(self._renderer.tokenizer, {**prompt})
            special = params.add_special_tokens
            with contextlib.suppress(TypeError):  # a lone surrogate: vLLM refuses it in its words
                tokens = tokenizer.encode(read["prompt"], add_special_tokens=special).ids
                if params.max_input_tokens is None or len(tokens) <= params.max_input_tokens:
                    prompt = {**read, "prompt_token_ids": tokens}
        return self._renderer.tokenize_prompt(prompt, params)


_SAMPLES = ("", "a", " a  B\n", "<s>[INST] é ☃ 𝄞</s> 1234", "<|im_start|>user\n\tx<|im_end|>")


def plain_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer's own one of the library below transformers, if that makes the same tokens
    of a text by itself. Otherwise None.

    A class from a model's own files may change a text before. Its tokenizer is never used.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    places = {kind.__module__.partition(".")[0] for kind in type(tokenizer).__mro__}
    if not places <= {"transformers", "vllm", "builtins"}:
        return None
    plain = tokenizer.backend_tokenizer
    if plain.truncation or plain.padding or tokenizer.split_special_tokens:
        return None
    alike = all(
        tokenizer(text, add_special_tokens=special)["input_ids"]
        == plain.encode(text, add_special_tokens=special).ids
        for text in _SAMPLES
        for special in (False, True)
    )
    return plain if alike else None


def _are_texts(conversations: Any) -> bool:
    """Whether they have only text. Media take longer."""
    return all(
        isinstance(message.get("content"), str)
        for conversation in conversations
        for message in conversation
    )
