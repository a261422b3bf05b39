"""An engine at our own seam: an ASGI app that answers as vLLM's does, and misbehaves when told to.

It "generates" the prompt's words in reverse, a word a token. Words of the prompt give orders:
`wait` holds the answer until `gate` is set, `step` until `steps` lets one go on, `refuse` and
`break` answer 400 and 500, `raise` raises, and in a stream `fault` sends an error after the first
token and `cut` raises there.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serving.adapters import Adapters
from serving.errors import AdapterFailed
from serving.user_code import UserCode


def error(status: int, message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": "Some", "param": "prompt", "code": status}}


class FakeEngine:
    def __init__(self) -> None:
        self.failure: str | None = None
        self.stopped = False
        self.running = 0
        self.most = 0  # that ever ran at once
        self.gate = asyncio.Event()
        self.steps = asyncio.Semaphore(0)
        self.bodies: list[dict[str, object]] = []
        self.request_ids: list[str] = []
        self.adapters: Adapters | None = None
        self.code: UserCode | None = None
        self.concurrency = 4
        self.embeds = False
        self.loaded: list[str] = []
        self.loads: list[str] = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.fails_to_load = False
        self.app = Starlette(
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
        self.loads.append(name)
        await self.may_load.wait()
        if self.fails_to_load:
            raise AdapterFailed("the engine cannot load it")
        self.loaded.append(name)

    async def unload_adapter(self, name: str) -> None:
        self.loaded.remove(name)

    async def pin_adapter(self, name: str) -> None:
        assert name in self.loaded

    async def not_found(self, request: Request, exception: Exception) -> Response:
        return JSONResponse(error(404, "Not Found"), 404)

    async def models(self, request: Request) -> Response:
        found = [
            {"id": "fake"},
            *({"id": it, "parent": "fake"} for it in self.loaded),
        ]
        return JSONResponse({"object": "list", "data": found})

    async def kv_event_sources(self, request: Request) -> Response:
        return JSONResponse({"0": {"endpoint": "tcp://*:5557"}})

    async def embeddings(self, request: Request) -> Response:
        """The length of each input; it is for models that embed only."""
        if not self.embeds:
            return JSONResponse(error(404, "Not Found"), 404)
        body = await request.json()
        self.bodies.append(body)
        inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [{"index": n, "embedding": [float(len(it))]} for n, it in enumerate(inputs)]
        return JSONResponse({"data": data[::-1]})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.request_ids.append(request.headers["x-request-id"])
        prompts = body.get("prompt") or body["messages"][-1]["content"]
        words = " ".join(prompts if isinstance(prompts, list) else [prompts]).split()
        if "refuse" in words:
            return JSONResponse(error(400, body.get("message") or "not like this"), 400)
        if "break" in words:
            return JSONResponse(error(500, "the engine failed"), 500)
        if "raise" in words:
            raise RuntimeError("boom")
        if body.get("stream"):
            return StreamingResponse(self.stream(words), media_type="text/event-stream")
        # As vLLM does it: whoever leaves cancels the work, and the answer goes nowhere.
        work = asyncio.ensure_future(self.work(words))
        leaving = asyncio.ensure_future(self.left(request))
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not work.done():
            work.cancel()
            return JSONResponse(None)
        listed = prompts if isinstance(prompts, list) else [prompts]
        return JSONResponse(
            {
                "choices": [self.choice(it.split()[::-1], n) for n, it in enumerate(listed)],
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

    async def stream(self, words: list[str]) -> AsyncIterator[str]:
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
                last = place == len(words) - 1
                chunk = {"choices": [self.choice([word], 0, "length" if last else None)]}
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1

    def choice(self, words: list[str], n: int, finish: str | None = "length") -> dict[str, object]:
        return {
            "index": n,
            "text": " ".join(words),
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": [len(word) for word in words],
            "prompt_token_ids": None,
            "logprobs": {"tokens": words, "token_logprobs": [-1.0] * len(words)},
        }
