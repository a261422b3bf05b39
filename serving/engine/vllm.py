# SPDX-License-Identifier: Apache-2.0
"""vLLM inside our process: started, warmed up, stopped (vLLM 0.32, by its Python interface)."""

import contextlib
import functools
import gc
import io
import os
import random
import signal
import time
import wave
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import REGISTRY
from starlette.types import ASGIApp

from lmi_config.facts.adapter import look
from lmi_config.facts.model import Folder, ModelError
from serving.aio import in_thread
from serving.engine.base import USAGE, EngineError, Hits, Pace, Prefilled, Tokens
from serving.engine.canary.canary import Canary
from serving.engine.canary.verdict import Verification
from serving.engine.patches.engine_core import plugin
from serving.engine.versions import moved, table
from serving.engine.vllm_errors import by_options
from serving.errors import AdapterFailed, AlreadyLoaded, EngineFailed, NotLoaded
from serving.lifecycle import Note, Step
from serving.protocol import (
    CLASSIFY,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    KV_EVENT_SOURCES,
    TOKENIZE,
    TRANSCRIPTIONS,
)

MEASURED = 1024  # tokens of the prompt that shows how fast the engine is
_TRANSCRIPTION = "transcription"  # what vLLM calls it
TERM_S = 1.5  # between SIGTERM and SIGKILL of the engine's processes


def prefilled() -> Prefilled:
    """Sums over all requests that have ended, from vLLM's series; cached tokens do not count."""
    tokens, seconds = "vllm:request_prefill_kv_computed_tokens", "vllm:request_prefill_time_seconds"
    return Prefilled(*_sums(f"{tokens}_count", f"{tokens}_sum", f"{seconds}_sum"))


def hits() -> Hits:
    """Sums over all requests, from vLLM's series."""
    return Hits(*_sums("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"))


def _sums(*names: str) -> Iterable[float]:
    """The sums of series over their labels."""
    sums = dict.fromkeys(names, 0.0)
    for series in REGISTRY.restricted_registry(names).collect():
        for sample in series.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    return sums.values()


class VllmEngine:
    """A running vLLM: its ASGI app and the client of its processes."""

    def __init__(
        self,
        of_vllm: Any,
        app: ASGIApp,
        client: Any,
        task: str,
        hears: bool,
        until_stopped: contextlib.AsyncExitStack,
    ) -> None:
        """task: what the model does, in vLLM's words. hears: whether it transcribes as well."""
        self.app = app
        self._state = of_vllm.state
        config = client.vllm_config
        ranks = config.parallel_config.data_parallel_size
        self.concurrency: int = config.scheduler_config.max_num_seqs * ranks
        self.task = task
        self.classifies = task == "classify"
        self.embeds = task not in ("generate", "classify", _TRANSCRIPTION)
        self.hears = hears
        self._client = client
        self._processes = client.engine_core.resources.engine_manager.processes
        self._until_stopped = until_stopped
        self._canary: Canary | None = None

    @property
    def failure(self) -> str | None:
        if not self._client.errored:
            return None
        # vLLM itself terminates those that are left.
        codes = (process.exitcode or 0 for process in self._processes)
        killed = next((code for code in codes if code < 0 and code != -signal.SIGTERM), None)
        failure = "an engine process ended unexpectedly"
        return f"{failure}: exit code {killed}" if killed else failure

    async def load_adapter(self, name: str, folder: Path) -> None:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        try:
            fused = (await in_thread(look, Folder(folder))).fused
        except ModelError as error:
            raise AdapterFailed(f"the engine cannot load it: {error}") from None
        models = self._state.openai_serving_models
        if name in models.lora_requests:
            raise AlreadyLoaded(name)
        request = LoadLoRAAdapterRequest(
            lora_name=name, lora_path=str(folder), is_3d_lora_weight=bool(fused)
        )
        answer = await models.load_lora_adapter(request)
        if not isinstance(answer, str):
            told = by_options(answer.error.message)
            raise AdapterFailed(f"the engine cannot load it: {told}")

    async def unload_adapter(self, name: str) -> None:
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        number = self._number(name)
        request = UnloadLoRAAdapterRequest(lora_name=name)
        await self._state.openai_serving_models.unload_lora_adapter(request)
        with _alive():
            await self._client.remove_lora(number)

    async def pin_adapter(self, name: str) -> None:
        number = self._number(name)
        with _alive():
            await self._client.pin_lora(number)

    def _number(self, name: str) -> int:
        """vLLM's id of a loaded adapter."""
        try:
            return int(self._state.openai_serving_models.lora_requests[name].lora_int_id)
        except KeyError:
            raise NotLoaded(name) from None

    def verify(self, verification: Verification) -> None:
        """Verify hits of the KV cache tiers from now on."""
        self._canary = Canary(self._client, verification)
        self._client.output_processor.canary = self._canary

    async def stop(self) -> None:
        if self._canary:
            await self._canary.stop()
        from vllm.envs import disable_envs_cache

        disable_envs_cache()
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
    note(Step.IMPORTING)
    try:
        await in_thread(_import)
    except Exception as error:
        raise EngineError(_reason(error)) from error


async def start(
    arguments: list[str], note: Note, verification: Verification | None = None
) -> VllmEngine:
    """Start vLLM, which was loaded, with these command-line arguments and have it generate once.

    verification: of the KV that comes from tiers.

    The event loop stays free to answer while vLLM loads and compiles in a thread. Raises
    EngineError when vLLM cannot start; its processes may then still be there.
    """
    try:
        plugin.want(os.environ, adapters="--enable-lora" in arguments)
        args = await in_thread(parse, arguments)
        plugin.require()
        note(Step.LOADING)
        client = await in_thread(_build, args)
        note(Step.PREPARING)
        engine = await _serve(client, args)
        note(Step.WARMING_UP)
        await _warm_up(engine.app, engine.task)
        if args.kv_transfer_config:
            await _measure(engine.app, client.model_config)
        if verification and engine.task == "generate":
            engine.verify(verification)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(_reason(error)) from error
    return engine


def _import() -> None:
    table.check()
    # Everything that a later step imports, so that none of them holds up the event loop.
    from serving.engine.patches.frontend import registry

    registry.mend_models()
    import vllm.entrypoints.generate.api_router
    import vllm.entrypoints.launchers.api_server.app_state
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.entrypoints.openai.chat_completion.batch_serving
    import vllm.entrypoints.openai.responses.serving
    import vllm.entrypoints.pooling.factories
    import vllm.v1.engine.async_llm  # noqa: F401

    moved.cli_args()


def parse(arguments: list[str]) -> Namespace:
    from vllm.entrypoints.launchers import launcher
    from vllm.logger import configure_logging_from_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    args: Namespace = _parser().parse_args(arguments)
    configure_logging_from_args(args)
    moved.cli_args().validate_parsed_serve_args(args)
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    launcher.validate_api_server_args(args)
    return args


@functools.cache
def _parser() -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not type-checked
        def error(self, message: str) -> Any:  # argparse would print its usage and exit
            raise ValueError(message)

    return moved.cli_args().make_arg_parser(Parser())


def _build(args: Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import ChatParams
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
            chat_template=moved.chat_utils().load_chat_template(args.chat_template),
            chat_template_content_format=args.chat_template_content_format,
            chat_template_kwargs=moved.cli_args().resolve_default_chat_template_kwargs(args),
        )
    )
    return client


COLLECT = (10_000, 20, 20)
"""When Python collects garbage in the server's process. By its own measure (700 new objects) that
takes a tenth of a short request's CPU time, on the ceiling bench.
"""


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
    from vllm.entrypoints.serve.instrumentator.basic import kv_event_sources
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router as attach_metrics
    from vllm.entrypoints.serve.tokenize.api_router import detokenize, tokenize

    tasks = await client.get_supported_tasks()
    hears = _TRANSCRIPTION in tasks
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.args = args

    def attach() -> None:
        from serving.engine import error_handlers
        from serving.engine.requests.pooling import JSON_ONLY
        from serving.engine.requests.pooling import attach as attach_pooling
        from serving.engine.speech.routes import attach as attach_speech

        attach_metrics(app)
        attach_models(app)
        app.add_api_route(KV_EVENT_SOURCES, kv_event_sources)
        if "generate" in tasks:
            register_generate_api_routers(app)
        attach_pooling(app, tasks, client.model_config)
        if hears:
            attach_speech(app)
        for path, endpoint in ((TOKENIZE, tokenize), (DETOKENIZE, detokenize)):
            app.add_api_route(path, endpoint, methods=["POST"], dependencies=JSON_ONLY)
        error_handlers.attach(app)

    await in_thread(attach)
    await client.reset_mm_cache()
    await init_app_state(client, app.state, args, tasks)
    from serving.engine.direct import Direct
    from serving.engine.patches.frontend import registry
    from serving.engine.patches.frontend.context import Context
    from serving.engine.speech.routes import keep_tenants_apart

    reasoning = client.vllm_config.reasoning_config
    thinks = bool(reasoning and reasoning.enabled)
    constrained = lambda: bool((usage := USAGE.get()) and usage.is_constrained)  # noqa: E731
    registry.mend_serving(Context(app.state, args, thinks, constrained))
    if hears:
        keep_tenants_apart(app.state)
    _tell_of_requests(client.output_processor)
    _name_adapters_publicly(client.output_processor.lora_states)
    _look_up_once(client.renderer)
    until_stopped = contextlib.AsyncExitStack()
    await until_stopped.enter_async_context(lifespan(app))  # which freezes what the collector knows
    gc.set_threshold(*COLLECT)
    writing = next((it for it in ("generate", _TRANSCRIPTION) if it in tasks), None)
    task = writing or client.model_config.get_pooling_task(tasks)
    return VllmEngine(app, Direct(app), client, task, hears, until_stopped)


def _look_up_once(renderer: Any) -> None:
    """Keep what vLLM looks up again for each request, and is always the same: its variables, and
    which token ends a text, for which the tokenizer looks through all that it has.
    """
    from vllm.envs import enable_envs_cache

    enable_envs_cache()  # as its engine does
    if renderer.tokenizer is not None:
        end = renderer.get_eos_token_id()
        renderer.get_eos_token_id = lambda: end


def _tell_of_requests(processor: Any) -> None:
    """Have what reads vLLM's outputs tell USAGE and WRITTEN of the requests that it gets.

    Their states know the tokens of streams, too, and of requests that are broken off, when no
    answer says how many there were. They count as in vLLM's series: a prompt when it is computed,
    and once for all of its `n` answers.
    """
    from serving.engine.direct import WRITTEN

    processor_class: Any = type(processor)
    processor.canary = None

    class Counted(processor_class):  # type: ignore[misc]  # vLLM is not type-checked
        canary: "Canary | None"

        def add_request(self, request: Any, *rest: Any, **more: Any) -> None:
            super().add_request(request, *rest, **more)
            if self.canary:
                self.canary.begin(request)
                self.request_states[request.request_id].asked = request
            if written := WRITTEN.get():
                written.begin(self.request_states[request.request_id])
            if usage := USAGE.get():
                state = self.request_states[request.request_id]
                usage.sources.append(functools.partial(_tokens, state, time.monotonic()))
                usage.paces.append(functools.partial(_pace, state))
                if getattr(request.sampling_params, "structured_outputs", None):
                    usage.is_constrained = True

        def process_outputs(self, outputs: Any, *rest: Any, **more: Any) -> Any:
            if self.canary:
                for it in outputs:
                    if it.prefill_stats and it.prefill_stats.num_external_cached_tokens:
                        state = self.request_states.get(it.request_id)
                        self.canary.hit(getattr(state, "asked", None), len(self.request_states))
            return super().process_outputs(outputs, *rest, **more)

    processor.__class__ = Counted


def _name_adapters_publicly(states: Any) -> None:
    """Have vllm:lora_requests_info name adapters as requests do: gateways route by it (the model
    server protocol of Kubernetes' inference extension).
    """
    states_class: Any = type(states)

    class PublicNames(states_class):  # type: ignore[misc]  # vLLM is not type-checked
        def update_scheduler_stats(self, stats: Any) -> None:
            super().update_scheduler_stats(stats)
            if stats is not None:
                stats.waiting_lora_adapters = _public(stats.waiting_lora_adapters)
                stats.running_lora_adapters = _public(stats.running_lora_adapters)

    states.__class__ = PublicNames


def _public(counts: Mapping[str, int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for inner, count in counts.items():
        found[inner.rpartition("@")[0] or inner] += count
    return dict(found)


def _tokens(state: Any, began: float) -> Tokens:
    """What is known of a request's tokens. began: when vLLM was given it, by the clock."""
    if state.is_prefilling:
        return Tokens(0 if state.request_index else _computed_about(state.prompt_len, began))
    generated = state.detokenizer.num_output_tokens() if state.detokenizer else 0
    if state.request_index:  # its prompt is the first one's
        return Tokens(generated=generated)
    return Tokens(state.prompt_len, state.num_cached_tokens, generated)


def _computed_about(length: int, began: float) -> int:
    """Tokens of a prompt that are computed before its first token is there. vLLM computes long ones
    in chunks and tells of none, so this follows from the time, and from how fast prompts were.
    """
    before = prefilled()
    if not before.seconds:
        return 0
    return min(length, int((time.monotonic() - began) * before.tokens / before.seconds))


def _pace(state: Any) -> Pace | None:
    stats = state.stats  # None where the operator has switched vLLM's statistics off
    if stats is None or not stats.num_generation_tokens:
        return None
    further = stats.num_generation_tokens - 1
    between = (stats.last_token_ts - stats.first_token_ts) / further if further else None
    return Pace(stats.arrival_time + stats.first_token_latency, between)


async def _warm_up(app: ASGIApp, task: str) -> None:
    """Have the engine answer once. vLLM's own health says nothing of whether it can."""
    prompt = "Say that you are ready."
    if task == "generate":
        # Drawn at random and with log probabilities: vLLM compiles both at their first use.
        path, body = COMPLETIONS, {"prompt": prompt, "max_tokens": 8, "logprobs": 0}
    elif task == "embed":
        path, body = EMBEDDINGS, {"input": prompt}
    elif task == "classify":
        path, body = CLASSIFY, {"input": prompt}
    elif task == _TRANSCRIPTION:
        path, body = TRANSCRIPTIONS, {"language": "en"}
    else:
        return
    answer = await _post(app, path, body)
    if answer.status_code != 200:
        raise EngineError(f"the first generation failed: {answer.text}")


async def _measure(app: ASGIApp, model: Any) -> None:
    """Have the engine compute a prompt that no cache has, so that prefilled() shows its speed.

    Without it an engine whose prompts all come from a slow store would never know better.
    """
    tokens = [random.randrange(256, min(model.get_vocab_size(), 1256)) for _ in range(MEASURED)]
    body = {"prompt": tokens[: model.max_model_len - 1], "max_tokens": 1}
    await _post(app, COMPLETIONS, body)


async def _post(app: ASGIApp, path: str, body: dict[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        if path == TRANSCRIPTIONS:
            return await client.post(path, data=body, files={"file": _silence()}, timeout=None)
        return await client.post(path, json=body, timeout=None)


def _silence() -> bytes:
    """A second of it, as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(bytes(2 * 16_000))
    return file.getvalue()


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        found = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
    else:
        found = " ".join(f"{type(error).__name__}: {error}".split())
    return by_options(found)
