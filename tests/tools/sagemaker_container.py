# SPDX-License-Identifier: Apache-2.0
"""A container that keeps SageMaker's contract, without a model, and with the faults that FAULTS
names.

Its answer repeats the request. In a body, `stream` asks for events, `wait` is a delay in seconds,
`break` breaks a stream off, `fail` answers 424, `padding` adds headers, and `exit` ends the
process.
"""

import asyncio
import json
import os
import signal
import sys
import time
import uuid
from pathlib import Path

from aiohttp import web

ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
SESSION = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION = "X-Amzn-SageMaker-Closed-Session-Id"
PAYLOAD = 30_000_000
EVENTS = 8


class Refusal(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Container:
    """faults: names of the contract's rules that it breaks, and some more."""

    def __init__(self, faults=()):
        self.faults = {*faults}
        self.adapters = {}
        self.sessions = set()
        self.models = {}
        self.under_way = 0
        self.app = web.Application()
        self.app.add_routes(
            [
                web.get("/ping", self.ping),
                web.get("/metrics", self.metrics),
                web.get("/execution-parameters", self.parameters),
                web.post("/adapters", self.register),
                web.delete("/adapters/{name}", self.unregister),
                web.post("/invocations", self.answered),
                web.post("/v1/chat/completions", self.answered),
                web.post("/models", self.load),
                web.delete("/models/{model}", self.unload),
                web.post("/models/{model}/invoke", self.answered),
            ]
        )
        if "admin-closed" in self.faults:
            self.app.add_routes([web.post("/sleep", self.ping)])

    async def ping(self, request):
        if "silent" in self.faults:
            await asyncio.sleep(3600)
        sick = "ping" in self.faults or ("ping-loaded" in self.faults and self.under_way)
        return web.Response(status=503 if sick else 200)

    async def metrics(self, request):
        if "metrics" in self.faults:
            raise web.HTTPUnauthorized
        text = f"# TYPE a gauge\nvllm:num_requests_running {self.under_way}\nb 1\n"
        return web.Response(text=text)

    async def parameters(self, request):
        if "execution-parameters" in self.faults:
            raise web.HTTPNotFound
        found = {"MaxConcurrentTransforms": 4, "BatchStrategy": "MULTI_RECORD", "MaxPayloadInMB": 6}
        return web.json_response(found)

    async def load(self, request):
        """Load a model. There is memory for one."""
        asked = json.loads(await request.read())
        folder = Path(asked["url"])
        if asked["model_name"] in self.models:
            return web.Response(status=409)
        if self.models:
            return web.Response(status=507)
        if not any(folder.iterdir()):
            return web.Response(status=400, text="there is no model in it")
        self.models[asked["model_name"]] = sorted(it.name for it in folder.iterdir())
        return web.Response()

    async def unload(self, request):
        gone = self.models.pop(request.match_info["model"], None)
        return web.Response(status=404 if gone is None else 200)

    async def register(self, request):
        name, src = request.query.get("name", ""), request.query.get("src", "")
        odd = not name.replace("-", "").isalnum() or not name.isascii()
        if odd:
            return web.Response(status=500 if "adapter-names" in self.faults else 400)
        if ".." in src and "adapter-traversal" not in self.faults:
            return web.Response(status=400, text="no adapters are there")
        if "adapter-register" in self.faults:
            return web.Response(status=400, text="name is missing in the body")
        if "adapter-again" in self.faults and name in self.adapters:
            return web.Response(status=400, text="it is registered already")
        self.adapters[name] = Path(src, "adapter_config.json").read_text()
        return web.json_response({"status": "registered"})

    async def unregister(self, request):
        name = request.match_info["name"]
        if "adapter-update" in self.faults and name in self.adapters:
            return web.Response(status=500)
        if "adapter-delete" not in self.faults:
            self.adapters.pop(name, None)
        return web.json_response({})

    async def answered(self, request):
        self.under_way += 1
        try:
            return await self.answer(request)
        except Refusal as refusal:
            told = {"code": refusal.status, "error": str(refusal)}
            if "error-body" in self.faults:
                told["stack"] = "Traceback (most recent call last)"
            padding = {"X-Error": "x" * 5000} if "headers-small" in self.faults else {}
            reason = str(refusal) if "reason-phrase" in self.faults else None
            text = json.dumps(told)
            return web.Response(
                text=text,
                status=refusal.status,
                reason=reason,
                headers=padding,
                content_type="application/json",
            )
        finally:
            self.under_way -= 1

    async def answer(self, request):
        body = await self.read(request)
        headers = self.in_session(request, body)
        if headers is not None:
            return web.json_response({}, headers=headers)
        adapter = self.adapter(request)
        if body.get("exit"):
            os._exit(7)
        if body.get("fail"):
            raise Refusal(424, "as you like it")
        await asyncio.sleep(body.get("wait", 0.2 if "ping-loaded" in self.faults else 0))
        if body.get("stream"):
            return await self.stream(request, body)
        if "invocations" in self.faults:
            return web.Response(text="hello")
        seen = {
            "choices": [{"text": f"by {adapter}"}],
            "headers": {k.lower(): v for k, v in request.headers.items()},
            "body": body,
            "environ": {k: v for k, v in os.environ.items() if k.startswith("TEST_")},
        }
        if model := request.match_info.get("model"):
            seen["files"] = self.models[model]
            seen["multi"] = os.environ.get("SAGEMAKER_MULTI_MODEL")
        if attributes := body.get("attributes"):
            headers = {ATTRIBUTES: attributes}
        if "attributes" in self.faults and "route=" in request.headers.get(ATTRIBUTES, ""):
            seen = {"data": []}
        if padding := body.get("padding"):
            headers = {"X-Padding": "x" * padding}
        answer = web.json_response(seen, headers=headers)
        if "content-length" in self.faults:
            answer.enable_chunked_encoding()
        return answer

    async def read(self, request):
        size, parts = 0, []
        limit = 6_000_000 if "payload" in self.faults else PAYLOAD
        async for part in request.content.iter_any():
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif "payload-large" in self.faults:
                request.transport.abort()
        if size > limit:
            raise Refusal(413, f"the body is larger than {limit} bytes")
        kind = request.headers.get("Content-Type")
        if "content-type" in self.faults and kind != "application/json":
            raise Refusal(415, "no JSON")
        if "accept" in self.faults and "unheard" in request.headers.get("Accept", ""):
            raise Refusal(406, "no such kind")
        if "headers-unknown" in self.faults and "X-Amzn-SageMaker-Unheard-Of" in request.headers:
            raise Refusal(400, "no such header")
        try:
            body = json.loads(b"".join(parts))
        except ValueError:
            raise Refusal(424, "the body is not JSON") from None
        except RecursionError:
            raise Refusal(500 if "json-depth" in self.faults else 424, "too deep") from None
        if not isinstance(body.get("prompt", ""), str):
            raise Refusal(424, "prompt should be a string")
        if "openai" in self.faults and body.get("model") == "":
            raise Refusal(404, "no such model")
        return body

    def in_session(self, request, body):
        """The headers of an answer to a call that begins or ends a session, or None."""
        session = request.headers.get(SESSION, "")
        if body.get("requestType") == "NEW_SESSION":
            session = str(uuid.uuid4())
            if "session-new" in self.faults:
                session = session.replace("-", "_")
            self.sessions.add(session)
            expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 1200))
            names = [SESSION, NEW_SESSION][: 1 if "session-headers" in self.faults else 2]
            return dict.fromkeys(names, f"{session}; Expires={expires}")
        if session and session not in self.sessions and "session-unknown" not in self.faults:
            raise Refusal(424, "session not found")
        if body.get("requestType") == "CLOSE":
            self.sessions.discard(session)
            return {} if "session-close" in self.faults else {CLOSED_SESSION: session}
        if session and body.get("stream") and "session-use" in self.faults:
            raise Refusal(400, "no streams in sessions")
        return None

    def adapter(self, request):
        name = request.headers.get(ADAPTER)
        if name and name not in self.adapters and "adapter-unknown" not in self.faults:
            raise Refusal(424, f"adapter {name} is not registered")
        return None if "adapter-answers" in self.faults else self.adapters.get(name)

    async def stream(self, request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if body.get("ignore_eos") and "client-leaves" in self.faults:
            self.under_way += 1  # it never ends
        for number in range(EVENTS):
            event = f'data: {{"text": "wörd {number}"}}\n\n'.encode()
            cut = len(event) // 2 if "stream" in self.faults else 0
            for part in (event[:cut], event[cut:]):
                if part:
                    await response.write(part)
            await asyncio.sleep(body.get("pause", 0.01))
            if body.get("break"):
                request.transport.abort()
                return response
        await response.write(b"data: [DONE]\n\n")
        return response


def main():
    faults = os.environ.get("FAULTS", "").split(",")
    if "dies" in faults:
        sys.exit('{"message": "failed", "reason": "no such model"}')
    assert sys.argv[1:] == ["serve"]
    if store := os.environ.get("SERVING_MODEL_STORE"):
        sys.stdout.write(f"files: {sorted(it.name for it in Path(store).iterdir())}\n")
        if "writes" in faults:
            Path(store, "cache").write_text("x")
    app = Container(faults).app

    async def at_start(app):
        if "deaf" in faults:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
        if "sigterm" in faults:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    app.on_startup.append(at_start)
    port = int(os.environ["SAGEMAKER_BIND_TO_PORT"])
    web.run_app(app, host="127.0.0.1", port=port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
