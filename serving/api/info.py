# SPDX-License-Identifier: Apache-2.0
"""Information about the server: its health, models, series, and parameters for batch transform.

Answers of LMI's management API have the shapes of DJL Serving 0.36 (ListModelsResponse,
DescribeWorkflowResponse).
"""

from typing import Any
from urllib.parse import parse_qs

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from lmi_config.options.declared import Settings
from serving.access.access import Access
from serving.api.backend import Backend
from serving.errors import Conflict, NotFound
from serving.http.bodies import header
from serving.http.exposition import exposition
from serving.inference.pipeline import Pipeline
from serving.inference.request import HttpCall
from serving.protocol import CHALLENGE, MODELS
from serving.ui import page as ui


class Ping:
    """/ping: whether requests are answered."""

    def __init__(self, backend: Backend, access: Access) -> None:
        self._backend = backend
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, answer = self._backend.health()
        response = JSONResponse(answer, status)
        response.raw_headers += self._access.introduction(header(scope, CHALLENGE))
        await response(scope, receive, send)


class Status:
    """/ui/status: the page's data that no other path has."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(self._backend.status())(scope, receive, send)


async def page(scope: Scope, receive: Receive, send: Send) -> None:
    """/ui and its files."""
    kind, content = ui.FILES[scope["path"]]
    response = Response(content)
    response.raw_headers += [*ui.HEADERS.items(), (b"content-type", kind)]
    await response(scope, receive, send)


class Metrics:
    """/metrics: all series of this process, also the engine's and the cache server's, or only
    those that `name[]` names, as Prometheus' clients have it.
    """

    def __init__(self, backend: Backend) -> None:
        self._exemplars = backend.tracer is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accept = header(scope, b"accept")
        # vLLM registers its series with the process's default registry.
        registry: Collector = REGISTRY
        if names := parse_qs(scope["query_string"].decode("latin-1")).get("name[]"):
            registry = REGISTRY.restricted_registry(names)
        kind, content = exposition(registry, accept, exemplars=self._exemplars)
        response = Response(content)
        response.raw_headers.append((b"content-type", kind))
        await response(scope, receive, send)


async def models(call: HttpCall, pipeline: Pipeline) -> dict[str, Any]:
    """/v1/models: the engine's models, and the caller's adapters by their own names."""
    listed = await pipeline.engine.models()
    caller = call.record.caller
    base = [
        {**model, "root": pipeline.model_id}  # vLLM's root is its model folder
        for model in listed["data"]
        if not model.get("parent")
    ]
    listed["data"] = base + [
        {**base[0], "id": adapter.name, "root": adapter.src, "parent": base[0]["id"]}
        for adapter in (pipeline.adapters.listed() if pipeline.adapters else ())
        if caller.may_use(adapter.name)
    ]
    return listed


async def model(call: HttpCall, pipeline: Pipeline) -> dict[str, Any]:
    """/v1/models/ID: one entry of the list. Clients test a connection with it."""
    name = call.scope["path_params"]["id"]
    found: dict[str, Any]
    for found in (await models(call, pipeline))["data"]:
        if found["id"] == name:
            return found
    raise NotFound(f"the model {name!r:.140} does not exist; GET {MODELS} lists those that do")


async def kv_event_sources(call: HttpCall, pipeline: Pipeline) -> dict[str, Any]:
    """/kv_event_sources: the engine's answer with the address of each rank's KV events."""
    return await pipeline.engine.kv_event_sources()


class Parameters:
    """/execution-parameters: how batch transform should send its records.

    SageMaker allows 100 MB for all requests in flight together.
    """

    def __init__(self, settings: Settings) -> None:
        self._queue_size = settings.job_queue_size
        self._largest_mb = settings.max_request_size // 10**6

    async def answer(self, call: HttpCall, pipeline: Pipeline) -> dict[str, Any]:
        transforms = min(pipeline.engine.concurrency, self._queue_size, 100)
        return {
            "MaxConcurrentTransforms": transforms,
            "BatchStrategy": "MULTI_RECORD",
            "MaxPayloadInMB": min(100 // transforms, self._largest_mb) or 1,
        }


class Management:
    """Answers LMI's management API: /models, /workflows, which wrap a model each, /server/logging.

    One model runs here, in one worker. Calls that would change that are refused with an
    alternative.
    """

    def __init__(self, settings: Settings, backend: Backend) -> None:
        self._settings = settings
        self._backend = backend

    async def models(self, call: HttpCall, pipeline: Pipeline) -> dict[str, Any]:
        listed = {"modelName": self._name, "modelUrl": self._settings.model_id, "status": "READY"}
        return {"models": [listed]}

    async def register(self, call: HttpCall, pipeline: Pipeline) -> None:
        raise Conflict(
            "models are not registered here: this server has the one that it was started with, "
            f"{self._name}; set OPTION_MODELS for several, or SAGEMAKER_MULTI_MODEL=true for calls "
            "that load them"
        )

    async def workflows(self, call: HttpCall, pipeline: Pipeline) -> dict[str, Any]:
        return {"workflows": [{"workflowName": self._name}]}

    async def register_workflow(self, call: HttpCall, pipeline: Pipeline) -> None:
        raise Conflict("there are no workflows here; have clients call one model after another")

    async def model(self, call: HttpCall, pipeline: Pipeline) -> list[dict[str, Any]]:
        name = call.scope["path_params"]["model"]
        return [{"workflowName": name, "models": [self._described(name, pipeline)]}]

    async def scale(self, call: HttpCall, pipeline: Pipeline) -> None:
        raise Conflict(
            "workers are not scaled here: OPTION_COPIES says at the start how many copies of the "
            "model there are, and OPTION_MAX_ROLLING_BATCH_SIZE how many requests each answers at "
            "a time; start more servers behind the router, or more instances"
        )

    async def unload(self, call: HttpCall, pipeline: Pipeline) -> None:
        raise Conflict(
            f"{self._name} is not unloaded while the server runs; stop the server instead"
        )

    async def logging(self, call: HttpCall, pipeline: Pipeline) -> None:
        """POST would set the log's level."""
        level = Request(call.scope).query_params.get("level", "INFO").upper()
        raise Conflict(
            f"the log's level is not set by requests; start with OPTION_LOG_LEVEL={level:.20}, or "
            "send the process SIGUSR1 for more and SIGUSR2 for less"
        )

    @property
    def _name(self) -> str:
        return self._settings.names_in_paths[0]

    def _described(self, name: str, pipeline: Pipeline) -> dict[str, Any]:
        gpus = self._backend.gpus
        started = self._backend.opened.isoformat(timespec="milliseconds")
        worker = {"id": 1, "startTime": started.replace("+00:00", "Z"), "status": "READY"}
        device = {"deviceType": "gpu", "deviceId": 0} if gpus else _CPU
        group = {"device": device, "minWorkers": 1, "maxWorkers": 1, "workers": [worker]}
        return {
            "modelName": name,
            "modelUrl": self._settings.model_id,
            "batchSize": 1,
            "maxBatchDelayMillis": 0,
            "maxIdleSeconds": 0,
            "queueSize": self._settings.job_queue_size,
            "requestInQueue": pipeline.waiting,
            "status": "Unhealthy" if self._backend.trouble else "Healthy",
            "loadedAtStartup": True,
            "workerGroups": [group],
        }


_CPU = {"deviceType": "cpu", "deviceId": -1}
