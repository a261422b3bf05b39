# SPDX-License-Identifier: Apache-2.0
"""An engine at our own seam: an ASGI app that answers as vLLM's does, and misbehaves when told to.

It "generates" the prompt's words in reverse, a word a token. Words of the prompt give orders:
`wait` holds the answer until `gate` is set, `step` until `steps` lets one go on, `refuse` and
`break` answer 400 and 500, `raise` raises, and in a stream `fault` sends an error after the first
token and `cut` raises there.

It refuses what vLLM refuses: wrong bodies, types and models, and adapters that are loaded twice, or
unloaded or pinned without having been loaded. tests/e2e/test_doubles.py compares the two.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.engine.base import USAGE, Pace, Tokens
from serving.errors import AdapterFailed, AlreadyLoaded, NotLoaded
from serving.http.bodies import WRITER, Writer


def error(status: int, message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": "Some", "param": "prompt", "code": status}}


class _Body(msgspec.Struct):
    """What both calls read of a body, with vLLM's types; keys that are not here are let through."""

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
    """names: what the model is called, the first of them in its list of models."""

    def __init__(self, names: tuple[str, ...] = ("fake",)) -> None:
        self.names = names
        self.failure: str | None = None
        self.stopped = False
        self.running = 0
        self.most = 0  # that ever ran at once
        self.gate = asyncio.Event()
        self.steps = asyncio.Semaphore(0)
        self.bodies: list[dict[str, object]] = []
        self.request_ids: list[str] = []
        self.concurrency = 4
        self.first_s = self.between_s = 0.0  # how long tokens take, as it says
        self.embeds = self.classifies = self.hears = False
        self.loaded: list[str] = []
        self.loads: list[str] = []
        self.misused: list[str] = []  # adapters that were loaded twice, or missing when needed
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.fails_to_load = False
        self.app: ASGIApp = Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.completions, methods=["POST"]),
                Route("/v1/embeddings", self.embeddings, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/kv_event_sources", self.kv_event_sources),
            ],
            exception_handlers={404: self.not_found},
        )

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

    def refusal(self, content: bytes, *needed: str) -> Response | None:
        """What vLLM says of a body that it does not take. needed: keys that have to be there."""
        try:
            body = msgspec.json.decode(content, type=_Body)
        except msgspec.DecodeError as fault:
            return JSONResponse(error(400, str(fault)), 400)
        if missing := [key for key in needed if getattr(body, key) is None]:
            return JSONResponse(error(400, f"{missing[0]}: Field required"), 400)
        if body.model and body.model not in (*self.names, *self.loaded):
            return JSONResponse(error(404, f"The model `{body.model}` does not exist."), 404)
        return None

    async def not_found(self, request: Request, exception: Exception) -> Response:
        return JSONResponse(error(404, "Not Found"), 404)

    async def models(self, request: Request) -> Response:
        found = [
            *(
                {"id": it, "object": "model", "parent": None, "root": "/cache/models--a--b"}
                for it in self.names
            ),
            *({"id": it, "object": "model", "parent": self.names[0]} for it in self.loaded),
        ]
        return JSONResponse({"object": "list", "data": found})

    async def kv_event_sources(self, request: Request) -> Response:
        return JSONResponse({"0": {"endpoint": "tcp://*:5557"}})

    async def embeddings(self, request: Request) -> Response:
        """The length of each input; it is for models that embed only."""
        if not self.embeds:
            return JSONResponse(error(404, "Not Found"), 404)
        if refused := self.refusal(await request.body(), "input"):
            return refused
        body = await request.json()
        self.bodies.append(body)
        inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [{"index": n, "embedding": [float(len(it))]} for n, it in enumerate(inputs)]
        return JSONResponse({"data": data[::-1]})

    async def completions(self, request: Request) -> Response:
        key = "messages" if "chat" in request.url.path else "prompt"
        if refused := self.refusal(await request.body(), key):
            return refused
        body = await request.json()
        templates = (body, body.get("chat_template_kwargs") or {})
        if any("chat_template" in it for it in templates):
            return JSONResponse(error(400, "Chat template is passed with request, but …"), 400)
        parts = [it for message in body.get("messages", ()) for it in message["content"]]
        if any(isinstance(it, dict) and it["type"] != "text" for it in parts):
            return JSONResponse(error(400, "it is not a multimodal model"), 400)
        self.bodies.append(body)
        self.request_ids.append(request.headers["x-request-id"])
        prompts = body.get("prompt") or body["messages"][-1]["content"]
        listed = [str(it) for it in prompts] if isinstance(prompts, list) else [prompts]
        words = " ".join(listed).split()
        if "refuse" in words:
            return JSONResponse(error(400, body.get("message") or "not like this"), 400)
        if "break" in words:
            return JSONResponse(error(500, "the engine failed"), 500)
        if "raise" in words:
            raise RuntimeError("boom")
        generated: list[str] = []  # so far
        if usage := USAGE.get():
            cached = words.count("cached")
            usage.sources.append(lambda: Tokens(len(words), cached, len(generated)))
            first_at = time.time() + self.first_s
            further = self.between_s if len(words) > 1 else None
            usage.paces.append(lambda: Pace(first_at, further) if generated else None)
        if body.get("stream"):
            return StreamingResponse(
                self.stream(words, key, generated, body.get("model"), request.scope.get(WRITER)),
                media_type="text/event-stream",
            )
        # As vLLM does it: whoever leaves cancels the work, and the answer goes nowhere.
        work = asyncio.ensure_future(self.work(words))
        leaving = asyncio.ensure_future(self.left(request))
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not work.done():
            work.cancel()
            return JSONResponse(None)
        generated += words
        answers = [(it.split()[::-1], n) for n, it in enumerate(listed)]
        return JSONResponse(
            {
                "choices": [self.choice(*it, key.replace("messages", "message")) for it in answers],
                "model": body.get("model"),
                "usage": {"prompt_tokens": len(words), "completion_tokens": len(words)},
            }
        )

    async def left(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def work(self, words: list[str]) -> None:
        self.run()
        try:
            if "wait" in words:
                await self.gate.wait()
            if "step" in words:
                await self.steps.acquire()
        finally:
            self.running -= 1

    def run(self) -> None:
        self.running += 1
        self.most = max(self.most, self.running)

    async def stream(
        self,
        words: list[str],
        key: str,
        generated: list[str],
        model: str | None,
        writer: Writer | None,
    ) -> AsyncIterator[str]:
        """Events; those between the first and the last are written where they come."""
        self.run()
        try:
            for place, word in enumerate(reversed(words)):
                if place and "fault" in words:
                    yield f"data: {json.dumps(error(500, 'deep inside'))}\n\n"
                    break
                if place and "cut" in words:
                    raise RuntimeError("boom")
                if place and "wait" in words:
                    await self.gate.wait()
                generated.append(word)
                last = place == len(words) - 1
                kind, finish = key.replace("messages", "delta"), "length" if last else None
                chunk = {"choices": [self.choice([word], 0, kind, finish)], "model": model}
                event = f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"
                if writer and place and not last and writer.takes():
                    writer.write(event.encode())
                else:
                    yield event
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1

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
