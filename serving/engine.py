"""vLLM inside our process. The only file that knows vLLM's Python interface (0.32).

To everybody else the engine is an ASGI app that speaks the OpenAI API, and may die.
"""

import contextlib
import random
import signal
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx
from prometheus_client import REGISTRY
from starlette.types import ASGIApp

from serving.adapters import Adapters
from serving.errors import AdapterFailed, EngineFailed
from serving.threads import in_thread
from serving.user_code import UserCode

Note = Callable[[str], None]
"""Told what the start is busy with, for people who wait."""


MEASURED = 1024  # tokens of the prompt that tells how fast the engine is
TERM_S = 1.5  # between SIGTERM and SIGKILL of the engine's processes


class Engine(Protocol):
    """The seam: what the rest of Slipway knows of an engine."""

    app: ASGIApp
    adapters: Adapters | None
    code: UserCode | None
    """The model's own model.py."""
    concurrency: int
    """Requests that it works on at once; more wait in it."""
    embeds: bool
    """Whether the model makes embeddings rather than text."""

    @property
    def failure(self) -> str | None:
        """Why the engine cannot answer any more, or None while it can."""

    async def stop(self) -> None:
        """Stop the engine. Requests should have ended before."""


class EngineError(Exception):
    """The engine could not be started. The message says why."""


class Prefilled(NamedTuple):
    """What the engine has computed of prompts: requests, their tokens, and seconds for each."""

    requests: float
    tokens: float
    seconds: float


def prefilled() -> Prefilled:
    """Sums over all requests that have ended, from vLLM's series; cached tokens do not count."""
    tokens, seconds = "vllm:request_prefill_kv_computed_tokens", "vllm:request_prefill_time_seconds"
    names = [f"{tokens}_count", f"{tokens}_sum", f"{seconds}_sum"]
    found = dict.fromkeys(names, 0.0)
    for series in REGISTRY.restricted_registry(names).collect():
        for sample in series.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return Prefilled(*found.values())


class VllmEngine:
    """A running vLLM: its ASGI app and the client of its processes."""

    def __init__(self, app: Any, client: Any, until_stopped: contextlib.AsyncExitStack) -> None:
        self.app = app
        self.adapters: Adapters | None = None
        self.code: UserCode | None = None
        config = client.vllm_config
        ranks = config.parallel_config.data_parallel_size
        self.concurrency: int = config.scheduler_config.max_num_seqs * ranks
        self.embeds = client.model_config.runner_type == "pooling"
        self._client = client
        self._processes = client.engine_core.resources.engine_manager.processes
        self._until_stopped = until_stopped

    @property
    def failure(self) -> str | None:
        if not self._client.errored:
            return None
        # vLLM itself terminates those that are left.
        codes = (process.exitcode or 0 for process in self._processes)
        killed = next((code for code in codes if code < 0 and code != -signal.SIGTERM), None)
        told = "an engine process ended unexpectedly"
        return f"{told}: exit code {killed}" if killed else told

    async def load_adapter(self, name: str, folder: Path) -> None:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        request = LoadLoRAAdapterRequest(lora_name=name, lora_path=str(folder))
        answer = await self.app.state.openai_serving_models.load_lora_adapter(request)
        if not isinstance(answer, str):
            raise AdapterFailed(f"the engine cannot load it: {answer.error.message}")

    async def unload_adapter(self, name: str) -> None:
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        models = self.app.state.openai_serving_models
        number = models.lora_requests[name].lora_int_id
        await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
        with _alive():
            await self._client.remove_lora(number)

    async def pin_adapter(self, name: str) -> None:
        number = self.app.state.openai_serving_models.lora_requests[name].lora_int_id
        with _alive():
            await self._client.pin_lora(number)

    async def stop(self) -> None:
        await self._until_stopped.aclose()
        await in_thread(self._client.shutdown, TERM_S)


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Raise EngineFailed where vLLM says that its engine has died. The server ends of it, too."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise EngineFailed("the engine has died") from None


async def load(note: Note) -> None:
    """Import vLLM, which takes many seconds, in a thread. Raises EngineError when it cannot be."""
    note("importing vLLM")
    try:
        await in_thread(_import)
    except Exception as error:
        raise EngineError(_reason(error)) from error


async def start(arguments: list[str], note: Note) -> VllmEngine:
    """Start vLLM, which was loaded, with these command-line arguments and have it generate once.

    The event loop stays free to answer while vLLM loads and compiles in a thread. Raises
    EngineError when vLLM cannot start; its processes may then still be there.
    """
    try:
        args = await in_thread(_parse, arguments)
        note("loading the model")
        client = await in_thread(_build, args)
        note("preparing the API")
        engine = await _serve(client, args)
        note("warming up")
        await _warm_up(engine.app, await client.get_supported_tasks())
        if args.kv_transfer_config:
            await _measure(engine.app, client.model_config)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(_reason(error)) from error
    return engine


def _import() -> None:
    # Everything that a later step imports, so that none of them holds up the event loop.
    import vllm.entrypoints.generate.api_router
    import vllm.entrypoints.launchers.api_server.app_state
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.entrypoints.launchers.cli_args
    import vllm.entrypoints.openai.chat_completion.batch_serving
    import vllm.entrypoints.openai.responses.serving
    import vllm.entrypoints.pooling.factories
    import vllm.v1.engine.async_llm  # noqa: F401


def _parse(arguments: list[str]) -> Namespace:
    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.logger import configure_logging_from_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not type-checked
        def error(self, message: str) -> Any:  # argparse would print its usage and exit
            raise ValueError(message)

    args: Namespace = make_arg_parser(Parser()).parse_args(arguments)
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    launcher.validate_api_server_args(args)
    return args


def _build(args: Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import resolve_default_chat_template_kwargs
    from vllm.renderers import ChatParams
    from vllm.renderers.chat_utils import load_chat_template
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # Ctrl-C reaches every process of a terminal's group. The engine's processes inherit this
    # thread's mask and never see it: they are to work on while requests drain. Python's resource
    # tracker unblocks the signal where it is started, so it is started first.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    engine_args = AsyncEngineArgs.from_cli_args(args)
    usage = UsageContext.OPENAI_API_SERVER
    client = AsyncLLM.from_vllm_config(
        vllm_config=engine_args.create_engine_config(usage_context=usage),
        usage_context=usage,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
    )
    # init_app_state() does this too, on the event loop, where it would hold up /ping for as long as
    # a second tokenizer takes to load; done once, it is quick.
    client.renderer.warmup(
        ChatParams(
            chat_template=load_chat_template(args.chat_template),
            chat_template_content_format=args.chat_template_content_format,
            chat_template_kwargs=resolve_default_chat_template_kwargs(args),
        )
    )
    return client


async def _serve(client: Any, args: Namespace) -> VllmEngine:
    """Wrap the engine in the routes of vLLM's API that Slipway answers with.

    vLLM's own build_app() also mounts its administration, and runs any model.py it finds in the
    model folder as a SageMaker script; a model.py there is LMI's business.
    """
    from fastapi import FastAPI
    from vllm.entrypoints.generate.api_router import register_generate_api_routers
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.utils.server_utils import lifespan
    from vllm.entrypoints.openai.models.api_router import attach_router as attach_models
    from vllm.entrypoints.pooling.factories import register_pooling_api_routers
    from vllm.entrypoints.serve.instrumentator.basic import kv_event_sources
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router as attach_metrics
    from vllm.tasks import POOLING_TASKS

    tasks = await client.get_supported_tasks()
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.args = args

    def attach() -> None:
        attach_metrics(app)
        attach_models(app)
        app.add_api_route("/kv_event_sources", kv_event_sources)
        if "generate" in tasks:
            register_generate_api_routers(app)
        if any(task in POOLING_TASKS for task in tasks):
            register_pooling_api_routers(app, tasks, client.model_config)
        _tell_errors(app)

    await in_thread(attach)
    await client.reset_mm_cache()
    await init_app_state(client, app.state, args, tasks)
    if "generate" in tasks:
        from serving.lean_stream import Completions

        app.state.openai_serving_completion.__class__ = Completions
    until_stopped = contextlib.AsyncExitStack()
    await until_stopped.enter_async_context(lifespan(app))
    return VllmEngine(app, client, until_stopped)


def _tell_errors(app: Any) -> None:
    """Answer errors in OpenAI's shape, with messages that repeat nothing of the request.

    vLLM's own handlers put the value at fault into the message, and that may be the prompt.
    """
    import pydantic
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
    from vllm.exceptions import VLLMError, VLLMUnprocessableEntityError, VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    def answer(status: int, message: str, parameter: str | None) -> JSONResponse:
        told = {"message": message, "type": "", "param": parameter, "code": status}
        return JSONResponse({"error": told}, status)

    def told(errors: Any) -> tuple[str, str | None]:
        """A sentence for the first fault that pydantic found, and the parameter it is in."""
        first = errors[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, VLLMValidationError):
            return cause.args[0], cause.parameter
        if first["type"] == "json_invalid":
            return f"the body is not JSON: {cause}", None
        where = clean_loc_for_param(tuple(part for part in first["loc"] if part != "body"))
        what = first["msg"].removeprefix("Value error, ")
        return (f"{where}: {what}", where) if where else (what, None)

    async def handle(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError | pydantic.ValidationError):
            return answer(400, *told(error.errors()))
        if isinstance(error, HTTPException):
            return answer(error.status_code, str(error.detail), None)
        if isinstance(error, EngineDeadError | EngineGenerateError):
            return answer(500, "the engine failed; the server's log says why", None)
        info = create_error_response(error).error
        if isinstance(error, VLLMValidationError | VLLMUnprocessableEntityError):
            return answer(info.code, error.args[0], error.parameter)
        if info.code >= 500 and not isinstance(error, VLLMError):
            return answer(info.code, "the engine failed on this request", None)
        return answer(info.code, info.message, info.param)

    kinds = (HTTPException, RequestValidationError, VLLMError, ValueError, TypeError)
    for kind in (*kinds, OverflowError, NotImplementedError, Exception):
        app.add_exception_handler(kind, handle)


async def _warm_up(app: ASGIApp, tasks: Collection[str]) -> None:
    """Have the engine answer once. vLLM's own health says nothing of whether it can."""
    prompt = "Say that you are ready."
    if "generate" in tasks:
        # Drawn at random and with log probabilities: vLLM compiles both at their first use.
        path, body = "/v1/completions", {"prompt": prompt, "max_tokens": 8, "logprobs": 0}
    elif "embed" in tasks:
        path, body = "/v1/embeddings", {"input": prompt}
    else:
        return
    answer = await _post(app, path, body)
    if answer.status_code != 200:
        raise EngineError(f"the first generation failed: {answer.text}")


async def _measure(app: ASGIApp, model: Any) -> None:
    """Have the engine compute a prompt that no cache has, for prefilled() to tell how fast it is.

    Without it an engine whose prompts all come from a slow store would never know better.
    """
    tokens = [random.randrange(256, min(model.get_vocab_size(), 1256)) for _ in range(MEASURED)]
    body = {"prompt": tokens[: model.max_model_len - 1], "max_tokens": 1}
    await _post(app, "/v1/completions", body)


async def _post(app: ASGIApp, path: str, body: object) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        return await client.post(path, json=body, timeout=None)


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
    return " ".join(f"{type(error).__name__}: {error}".split())
