# SPDX-License-Identifier: Apache-2.0
"""Tokenization of short prompts on the event loop.

vLLM uses a thread, twice for a chat. For a short prompt, the switch to the thread and back takes
longer than the work. On the ceiling bench completions took 0.73 of plain vLLM's CPU time with it,
and 0.81 without, in two runs.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

SHORT = 4096
"""The prompt of a body up to this many bytes counts as short."""


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


class _Renderer:
    """vLLM's renderer of prompts, with another tokenization."""

    def __init__(self, renderer: Any, prompts: Prompts, *, is_short: bool) -> None:
        self._renderer = renderer
        self._prompts = prompts
        self._is_short = is_short

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_cmpl_async(self, prompts: Any, *rest: Any, **more: Any) -> Any:
        if self._is_at_once:
            return self._renderer.render_cmpl(prompts, *rest, **more)
        with self._in_thread():
            return await self._renderer.render_cmpl_async(prompts, *rest, **more)

    async def render_chat_async(self, conversations: Any, *rest: Any, **more: Any) -> Any:
        if self._is_at_once and _are_texts(conversations):
            return self._renderer.render_chat(conversations, *rest, **more)
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


def _are_texts(conversations: Any) -> bool:
    """Whether they have only text. Media take longer."""
    return all(
        isinstance(message.get("content"), str)
        for conversation in conversations
        for message in conversation
    )
