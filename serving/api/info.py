# SPDX-License-Identifier: Apache-2.0
"""What the server says of itself: its health, its models, its series, and how to use it."""

import msgspec
from prometheus_client import REGISTRY, make_asgi_app
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from lmi_config.options.declared import Settings
from serving.api.backend import Backend
from serving.engine.vllm_errors import from_engine
from serving.inference.pipeline import Pipeline
from serving.inference.request import HttpCall

# vLLM registers its series with the process's default registry.
_prometheus = make_asgi_app(REGISTRY)


class Ping:
    """/ping: whether requests are answered."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, answer = self._backend.health()
        await JSONResponse(answer, status)(scope, receive, send)


async def metrics(scope: Scope, receive: Receive, send: Send) -> None:
    """/metrics, always as plain text: in OpenMetrics it writes vllm_… for vllm:…, and headers that
    are no UTF-8 make it fail.
    """
    await _prometheus({**scope, "headers": []}, receive, send)


async def models(call: HttpCall, pipeline: Pipeline) -> None:
    """/v1/models: the engine's models, and adapters by their own names."""
    status, answer = 0, bytearray()

    async def keep(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        answer.extend(message.get("body", b""))

    await pipeline.engine.app(call.scope, call.receive, keep)
    if status != 200:
        raise from_engine(status, bytes(answer), b"")
    listed = msgspec.json.decode(answer)
    base = [model for model in listed["data"] if not model.get("parent")]
    listed["data"] = base + [
        {**base[0], "id": adapter.name, "root": adapter.src, "parent": base[0]["id"]}
        for adapter in (pipeline.adapters.listed() if pipeline.adapters else ())
    ]
    await JSONResponse(listed)(call.scope, call.receive, call.send)


async def kv_event_sources(call: HttpCall, pipeline: Pipeline) -> None:
    """/kv_event_sources, as the engine answers it: where each rank's KV events are."""
    await pipeline.engine.app(call.scope, call.receive, call.send)


class Parameters:
    """/execution-parameters: how batch transform should send its records.

    SageMaker allows 100 MB for all that is under way together.
    """

    def __init__(self, settings: Settings) -> None:
        self._queue_size = settings.job_queue_size
        self._largest_mb = settings.max_request_size // 10**6

    async def answer(self, call: HttpCall, pipeline: Pipeline) -> None:
        transforms = min(pipeline.engine.concurrency, self._queue_size, 100)
        parameters = {
            "MaxConcurrentTransforms": transforms,
            "BatchStrategy": "MULTI_RECORD",
            "MaxPayloadInMB": min(100 // transforms, self._largest_mb) or 1,
        }
        await JSONResponse(parameters)(call.scope, call.receive, call.send)
