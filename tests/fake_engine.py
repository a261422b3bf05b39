# SPDX-License-Identifier: Apache-2.0
"""An engine for the port serving.engine.base. It answers as vLLM does, and misbehaves on command.

It "generates" the prompt's words in reverse, a word a token. Words of the prompt are commands.
`wait` holds the answer until `gate` is set, and `step` until `steps` lets one go on. `refuse` and
`break` fail with a refusal and a failure, and `raise` raises. In a stream, `fault` fails after the
first token, and `cut` raises there.

It refuses the same requests as vLLM: wrong bodies, types and models, and adapters that are loaded
twice, or unloaded or pinned without having been loaded. tests/e2e/test_doubles.py compares the two.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from handlers.records import Step
from serving.cancellation import ClientLeft
from serving.engine.base import Call, Pace, Sink, Tokens, Usage
from serving.engine.vllm_errors import from_engine
from serving.errors import (
    AdapterFailed,
    AlreadyLoaded,
    EngineFailed,
    NotFound,
    NotLoaded,
    ServingError,
)
from serving.protocol import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS

Answer = Callable[[Call, Sink, Usage], Awaitable[None]]
"""Answers calls of a path."""


def refused(status: int, message: str, call: Call) -> ServingError:
    return from_engine(status, message, "prompt", call)


def whole(make: Callable[[Call], Any]) -> Answer:
    """Answers with a JSON value."""

    async def answer(call: Call, sink: Sink, usage: Usage) -> None:
        await sink.answer(json.dumps(make(call)).encode())

    return answer


def streaming(*events: bytes | Step | Exception) -> Answer:
    """Answers with these events and steps. It raises an exception among them; an error among them
    fails the call.
    """

    async def answer(call: Call, sink: Sink, usage: Usage) -> None:
        sink.stream()
        for event in events:
            if isinstance(event, ServingError):
                await sink.fail(event)
                return
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Step):
                await sink.step(event)
            else:
                await sink.event(event)
        await sink.end()

    return answer


class _Body(msgspec.Struct):
    """The keys of a body that both calls read, with vLLM's types. Other keys are ignored."""

    model: str | None = None
    stream: bool | None = False
    max_tokens: int | None = None
    n: int | None = 1
    temperature: float | None = None
    stop: str | list[str] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    input: str | list[str] | None = None


class FakeEngine:
    """names: the model's names; the list of models has the first of them."""

    def __init__(self, names: tuple[str, ...] = ("fake",)) -> None:
        self.names = names
        self.failure: str | None = None
        self.stopped = False
        self.asleep = False
        self.insomnia = False
        self.running = 0
        self.most = 0  # the maximum that ever ran at once
        self.gate = asyncio.Event()
        self.steps = asyncio.Semaphore(0)
        self.bodies: list[dict[str, object]] = []
        self.request_ids: list[str] = []
        self.calls: list[Call] = []
        self.concurrency = 4
        self.first_s = self.between_s = 0.0  # the time per token that it reports
        self.embeds = self.classifies = self.hears = False
        self.loaded: list[str] = []
        self.loads: list[str] = []
        self.misused: list[str] = []  # adapters that were loaded twice, or missing when needed
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.fails_to_load = False
        self.answers: dict[str, Answer] = {
            COMPLETIONS: self.completions,
            CHAT_COMPLETIONS: self.completions,
            EMBEDDINGS: self.embeddings,
        }

    async def generate(self, call: Call, sink: Sink) -> None:
        usage = Usage()
        sink.begin(usage)
        self.calls.append(call)
        assert not self.asleep
        try:
            with call.cancellation.raising():
                await self.answers.get(call.path, self.nothing)(call, sink, usage)
                if call.cancellation.cause:
                    await asyncio.sleep(0)
        except (ServingError, ClientLeft) as error:
            if isinstance(error, ServingError) and error is not call.cancellation.cause:
                await sink.fail(error)

    async def nothing(self, call: Call, sink: Sink, usage: Usage) -> None:
        raise NotFound(f"the model does not answer {call.path}")

    async def sleep(self) -> None:
        if self.insomnia:
            raise RuntimeError("it cannot sleep")
        assert not self.asleep
        self.asleep = True

    async def wake_up(self) -> None:
        assert self.asleep
        self.asleep = False

    async def stop(self) -> None:
        self.stopped = True

    async def load_adapter(self, name: str, folder: Path) -> None:
        if name in self.loaded:
            self.misused.append(name)
            raise AlreadyLoaded(name)
        self.loads.append(name)
        await self.may_load.wait()
        if self.fails_to_load or not folder.is_dir():
            raise AdapterFailed("the engine cannot load it")
        if name in self.loaded:
            self.misused.append(name)
            raise AlreadyLoaded(name)
        self.loaded.append(name)

    async def unload_adapter(self, name: str) -> None:
        self._require_loaded(name)
        self.loaded.remove(name)

    async def pin_adapter(self, name: str) -> None:
        self._require_loaded(name)

    def _require_loaded(self, name: str) -> None:
        if name not in self.loaded:
            self.misused.append(name)
            raise NotLoaded(name)

    def require(self, call: Call, *needed: str) -> None:
        """Raise the errors that vLLM raises for a body that it refuses. needed: keys that must be
        there.
        """
        try:
            body = msgspec.convert(call.request, _Body)
        except msgspec.ValidationError as fault:
            raise refused(400, str(fault), call) from None
        if missing := [key for key in needed if getattr(body, key) is None]:
            raise refused(400, f"{missing[0]}: Field required", call)
        if body.model and body.model not in (*self.names, *self.loaded):
            raise refused(404, f"The model `{body.model}` does not exist.", call)

    async def models(self) -> dict[str, Any]:
        found = [
            *(
                {"id": it, "object": "model", "parent": None, "root": "/cache/models--a--b"}
                for it in self.names
            ),
            *({"id": it, "object": "model", "parent": self.names[0]} for it in self.loaded),
        ]
        return {"object": "list", "data": found}

    async def kv_event_sources(self) -> dict[str, Any]:
        return {"0": {"endpoint": "tcp://*:5557"}}

    async def embeddings(self, call: Call, sink: Sink, usage: Usage) -> None:
        """The length of each input. Only an embedding model has this call."""
        if not self.embeds:
            await self.nothing(call, sink, usage)
        self.require(call, "input")
        self.bodies.append(call.request)
        given = call.body["input"]
        inputs = given if isinstance(given, list) else [given]
        data = [{"index": n, "embedding": [float(len(it))]} for n, it in enumerate(inputs)]
        await sink.answer(json.dumps({"data": data[::-1]}).encode())

    async def completions(self, call: Call, sink: Sink, usage: Usage) -> None:
        key = "messages" if call.path == CHAT_COMPLETIONS else "prompt"
        self.require(call, key)
        body = call.request
        templates = (body, body.get("chat_template_kwargs") or {})
        if any("chat_template" in it for it in templates):
            raise refused(400, "Chat template is passed with request, but …", call)
        parts = [it for message in body.get("messages", ()) for it in message["content"] or ()]
        if any(isinstance(it, dict) and it["type"] != "text" for it in parts):
            raise refused(400, "it is not a multimodal model", call)
        self.bodies.append(body)
        self.request_ids.append(call.request_id)
        prompts = body.get("prompt") or body["messages"][-1]["content"]
        listed = [str(it) for it in prompts] if isinstance(prompts, list) else [prompts]
        words = " ".join(listed).split()
        if "refuse" in words:
            raise refused(400, body.get("message") or "not like this", call)
        if "break" in words:
            raise refused(500, "the engine failed", call)
        if "raise" in words:
            raise RuntimeError("boom")
        generated: list[str] = []  # so far
        cached = words.count("cached")
        usage.sources.append(lambda: Tokens(len(words), cached, len(generated)))
        first_at = time.time() + self.first_s
        further = self.between_s if len(words) > 1 else None
        usage.paces.append(lambda: Pace(first_at, further) if generated else None)
        self.run()
        try:
            if body.get("stream"):
                await self.stream(words, key, generated, call, sink)
                return
            if "wait" in words:
                await self.gate.wait()
            if "step" in words:
                await self.steps.acquire()
        finally:
            self.running -= 1
        generated += words
        answers = [(it.split()[::-1], n) for n, it in enumerate(listed)]
        answer = {
            "choices": [self.choice(*it, key.replace("messages", "message")) for it in answers],
            "model": body.get("model"),
            "usage": {"prompt_tokens": len(words), "completion_tokens": len(words)},
        }
        await sink.answer(json.dumps(answer, separators=(",", ":")).encode())

    def run(self) -> None:
        self.running += 1
        self.most = max(self.most, self.running)

    async def stream(
        self, words: list[str], key: str, generated: list[str], call: Call, sink: Sink
    ) -> None:
        """Events or steps; those between the first and the last are written at once."""
        sink.stream()
        for place, word in enumerate(reversed(words)):
            if place and "fault" in words:
                raise EngineFailed("deep inside")
            if place and "cut" in words:
                raise RuntimeError("boom")
            if place and "wait" in words:
                await self.gate.wait()
            generated.append(word)
            last = place == len(words) - 1
            kind, finish = key.replace("messages", "delta"), "length" if last else None
            chunk = {
                "choices": [self.choice([word], 0, kind, finish)],
                "model": call.request.get("model"),
            }
            event = f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()
            step = Step(word, (len(word),), (word,), (-1.0,), finish)
            if place and not last and sink.takes():
                sink.write_step(step) if call.steps else sink.write(event)
            else:
                await (sink.step(step) if call.steps else sink.event(event))
            await asyncio.sleep(0)
        if not call.steps:
            await sink.event(b"data: [DONE]\n\n")
        await sink.end()

    def choice(
        self, words: list[str], n: int, kind: str, finish: str | None = "length"
    ) -> dict[str, object]:
        """kind: `prompt` for a completion, `message` for a chat's answer, `delta` for a piece."""
        text = " ".join(words)
        said = (
            {"text": text, "prompt_token_ids": None}
            if kind == "prompt"
            else {kind: {"role": "assistant", "content": text}}
        )
        return {
            "index": n,
            **said,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": [len(word) for word in words],
            "logprobs": {"tokens": words, "token_logprobs": [-1.0] * len(words)},
        }
