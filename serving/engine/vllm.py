# SPDX-License-Identifier: Apache-2.0
"""vLLM inside our process: started, warmed up, stopped (vLLM 0.32, by its Python interface)."""

import contextlib
import functools
import gc
import io
import os
import random
import signal
import wave
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY
from starlette.datastructures import State

from lmi_config.facts.adapter import look
from lmi_config.facts.model import Folder, ModelError
from serving.aio import in_thread
from serving.cancellation import Cancellation
from serving.engine.base import Call, EngineError, Hits, Prefilled, Sink, Usage
from serving.engine.canary.canary import Canary
from serving.engine.canary.comparison import Verification
from serving.engine.patches.engine_core import plugin
from serving.engine.versions import moved, table
from serving.engine.vllm_errors import by_options
from serving.engine.weights import loader
from serving.errors import AdapterFailed, AlreadyLoaded, EngineFailed, NotLoaded, ServingError
from serving.lifecycle import Note, Step
from serving.protocol import (
    CHAT_COMPLETIONS,
    CLASSIFY,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    TRANSCRIPTIONS,
    TRANSLATIONS,
)

MEASURED = 1024  # tokens of the prompt that shows how fast the engine is
_TRANSCRIPTION = "transcription"  # vLLM's name of it
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
    """A running vLLM: its serving objects and the client of its processes."""

    def __init__(
        self,
        state: Any,
        calls: Any,
        client: Any,
        task: str,
        hears: bool,
        until_stopped: contextlib.AsyncExitStack,
    ) -> None:
        """state: vLLM's serving objects. calls: answers calls with them (calls.Calls). task: the
        model's task, in vLLM's words. hears: whether it also transcribes.
        """
        self._state = state
        self._calls = calls
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

    async def generate(self, call: Call, sink: Sink) -> None:
        await self._calls.generate(call, sink)

    async def models(self) -> dict[str, Any]:
        listed = await self._state.openai_serving_models.show_available_models()
        found: dict[str, Any] = listed.model_dump(mode="json")
        return found

    async def kv_event_sources(self) -> dict[str, Any]:
        from pydantic_core import to_jsonable_python

        found: dict[str, Any] = to_jsonable_python(self._client.get_kv_event_sources())
        return found

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

    async def sleep(self) -> None:
        # Level 1 keeps the weights in the host's memory, also with adapters. Level 2 would drop
        # them, and a wake-up with adapters may then fail in vLLM 0.32.
        await self._client.sleep(level=1)

    async def wake_up(self) -> None:
        await self._client.wake_up()

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
    """Raise EngineFailed if vLLM reports that its engine has died. This also ends the server."""
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
    """Start vLLM, which is already imported, with these command-line arguments, and let it generate
    once.

    verification: how to verify KV that comes from tiers, if at all.

    The event loop can answer while a thread loads and compiles. Raises EngineError when vLLM cannot
    start; vLLM's processes may then still run.
    """
    try:
        waits = f"--load-format={loader.FORMAT}" in arguments
        plugin.want(os.environ, adapters="--enable-lora" in arguments, loader=waits)
        args = await in_thread(parse, arguments)
        plugin.require()
        note(Step.LOADING)
        in_flight: dict[str, Any] = {}
        client = await in_thread(_build, args, in_flight)
        note(Step.PREPARING)
        engine = await _serve(client, args, in_flight)
        note(Step.WARMING_UP)
        await _warm_up(engine)
        if args.kv_transfer_config:
            await _measure(engine, client.model_config)
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
    import vllm.entrypoints.anthropic.serving
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


def _build(args: Namespace, in_flight: dict[str, Any]) -> Any:
    """vLLM's client of an engine that it starts. in_flight: the calls that get the client's outputs
    (calls.Calls). Raises EngineError if this vLLM's outputs cannot be delivered.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import ChatParams
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from serving.engine.patches.frontend import registry
    from serving.engine.patches.outputs import arrays, processor

    registry.check_outputs()
    # Ctrl-C reaches every process of a terminal's group. The engine's processes inherit this
    # thread's mask and never see it: they are to work on while requests drain. Python's resource
    # tracker unblocks the signal when it starts, so it is started first.
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
    processor.install(client, in_flight)
    arrays.install(client)
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


COLLECT = (10_000, 20, 5)
"""When Python collects garbage in the server's process. By its own measure (700 new objects) that
takes a tenth of a short request's CPU time, on the ceiling bench.
"""


async def _serve(client: Any, args: Namespace, in_flight: dict[str, Any]) -> VllmEngine:
    """Build vLLM's serving objects, and the engine that answers calls with them.

    vLLM's HTTP app is not built. It would mount its administration, and run any model.py that it
    finds in the model folder as a SageMaker script; a model.py there is LMI's business.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.utils.server_utils import lifespan

    tasks = await client.get_supported_tasks()
    hears = _TRANSCRIPTION in tasks
    app = SimpleNamespace(state=State({"args": args}))  # as much of an app as vLLM looks at
    await in_thread(_prepare, hears)
    await client.reset_mm_cache()
    await init_app_state(client, app.state, args, tasks)
    from serving.engine.calls import Calls
    from serving.engine.patches.frontend import registry
    from serving.engine.patches.frontend.context import Context

    reasoning = client.vllm_config.reasoning_config
    thinks = bool(reasoning and reasoning.enabled)
    registry.mend_serving(Context(app.state, args, thinks, _is_constrained))
    _look_up_once(client.renderer)
    state = app.state  # vLLM takes it off the app at the end
    routes = await in_thread(_routes, state, tasks, client, args)
    calls = Calls(client, routes, in_flight, prefilled)
    until_stopped = contextlib.AsyncExitStack()
    await until_stopped.enter_async_context(lifespan(app))  # which freezes the collector's objects
    gc.set_threshold(*COLLECT)
    writing = next((it for it in ("generate", _TRANSCRIPTION) if it in tasks), None)
    task = writing or client.model_config.get_pooling_task(tasks)
    return VllmEngine(state, calls, client, task, hears, until_stopped)


def _is_constrained(serving: Any) -> bool:
    """Whether the answer has a constraint that one of vLLM's serving objects is making."""
    return bool(getattr(serving.engine_client, "is_constrained", False))


def _prepare(hears: bool) -> None:
    """Import the modules that vLLM needs before it builds its serving objects."""
    import serving.engine.calls  # which takes a while
    import serving.engine.texts.chats
    import serving.engine.texts.completions  # noqa: F401

    if hears:
        from serving.engine.speech import transcription as speech

        speech.limit()


def _routes(state: Any, tasks: tuple[str, ...], client: Any, args: Namespace) -> Mapping[str, Any]:
    """Path → how it is answered (calls.Way), of all that the model does. The types of requests
    and answers are vLLM's.
    """
    from pydantic import TypeAdapter
    from vllm.entrypoints.anthropic.protocol import (
        AnthropicCountTokensRequest,
        AnthropicMessagesRequest,
    )
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest

    from serving.engine.calls import Route
    from serving.engine.requests import anthropic_usage, pooling
    from serving.engine.texts.chats import Chats
    from serving.engine.texts.completions import Completions
    from serving.engine.texts.prompts import Prompts

    found: dict[str, Any] = {}

    def add(path: str, kind: Any, name: str, create: Any, **more: Any) -> None:
        if (serving := getattr(state, name, None)) is None:
            return
        # As FastAPI does, whose words some faults have.
        read = functools.partial(TypeAdapter(kind).validate_python, from_attributes=True)

        def answer(serving: Any, request: Any, raw: Any) -> Any:
            return getattr(serving, create)(request, raw)

        way = answer if isinstance(create, str) else create
        found[path] = Route(lambda call: read(call.request), serving, way, **more)

    for path, (kind, name) in pooling.kinds(tasks, client.model_config).items():
        add(path, kind, name, "__call__")
    of_messages = "anthropic_serving_messages"
    whole, tokens = {"exclude_none": True}, "serving_tokenization"
    if "generate" in tasks:
        # A client's template has no limit on its time, and would hold the event loop.
        prompts = Prompts(state.online_renderer, at_once=not args.trust_request_chat_template)
        found[COMPLETIONS] = Completions(client, state, args, prompts)
        found[CHAT_COMPLETIONS] = Chats(client, state, args, prompts)
        add(
            *(RESPONSES, ResponsesRequest, "openai_serving_responses", "create_responses"),
            dump={"by_alias": True},
            event=_named_event,
        )
        add(MESSAGES, AnthropicMessagesRequest, of_messages, anthropic_usage.messages)
        add(COUNT_TOKENS, AnthropicCountTokensRequest, of_messages, "count_tokens", dump=whole)
    add(TOKENIZE, TokenizeRequest, tokens, "create_tokenize")
    add(DETOKENIZE, DetokenizeRequest, tokens, "create_detokenize")
    if _TRANSCRIPTION in tasks:
        from serving.engine.speech import transcription as speech

        for path, make, name, create in (
            *((TRANSCRIPTIONS, speech.transcription, "transcription", speech.transcribe),),
            *((TRANSLATIONS, speech.translation, "translation", speech.translate),),
        ):
            read = functools.partial(_read_form, make)
            found[path] = Route(read, getattr(state, f"openai_serving_{name}"), create)
    return found


def _named_event(event: Any) -> str:
    """An event of Responses, as vLLM's HTTP app writes it."""
    data = event.model_dump_json(indent=None, by_alias=True)
    return f"event: {getattr(event, 'type', 'unknown')}\ndata: {data}\n\n"


def _read_form(make: Any, call: Call) -> Any:
    return make(call.request, call.file or b"")


def _look_up_once(renderer: Any) -> None:
    """Cache two lookups that vLLM repeats for each request although their results do not change.
    One is vLLM's environment variables. The other is the token that ends a text; the tokenizer
    would search its vocabulary.
    """
    from vllm.envs import enable_envs_cache

    enable_envs_cache()  # as its engine does
    if renderer.tokenizer is not None:
        end = renderer.get_eos_token_id()
        renderer.get_eos_token_id = lambda: end


async def _warm_up(engine: VllmEngine) -> None:
    """Make the engine answer once. vLLM's own health check does not show whether it can."""
    prompt = "Say that you are ready."
    file = None
    if engine.task == "generate":
        # Drawn at random and with log probabilities: vLLM compiles both at their first use.
        path, body = COMPLETIONS, {"prompt": prompt, "max_tokens": 8, "logprobs": 0}
    elif engine.task == "embed":
        path, body = EMBEDDINGS, {"input": prompt}
    elif engine.task == "classify":
        path, body = CLASSIFY, {"input": prompt}
    elif engine.task == _TRANSCRIPTION:
        path, body, file = TRANSCRIPTIONS, {"language": "en"}, _silence()
    else:
        return
    if error := await _ask(engine, path, body, file):
        raise EngineError(f"the first generation failed: {error}")


async def _measure(engine: VllmEngine, model: Any) -> None:
    """Make the engine compute a prompt that no cache has, so that prefilled() shows its speed.
    Without this, an engine that loads all prompts from a slow store would never measure its own
    speed.
    """
    tokens = [random.randrange(256, min(model.get_vocab_size(), 1256)) for _ in range(MEASURED)]
    body = {"prompt": tokens[: model.max_model_len - 1], "max_tokens": 1}
    await _ask(engine, COMPLETIONS, body)


async def _ask(
    engine: VllmEngine, path: str, body: dict[str, Any], file: bytes | None = None
) -> ServingError | None:
    """Have a call of the server's answered, without a stream. Returns its error."""
    sink: Any = _ErrorSink()
    await engine.generate(Call(path, body, 0, Cancellation(), "slipway", file), sink)
    found: ServingError | None = sink.error
    return found


class _ErrorSink:
    """A sink for a call without a stream; it only keeps the error."""

    error: ServingError | None = None

    def begin(self, usage: Usage) -> None:
        pass

    async def answer(self, *answer: Any) -> None:
        pass

    async def fail(self, error: ServingError) -> None:
        self.error = error


def _silence() -> bytes:
    """A second of silence, as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(bytes(2 * 16_000))
    return file.getvalue()


def _reason(error: Exception) -> str:
    """The error in one line."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        found = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
    else:
        found = " ".join(f"{type(error).__name__}: {error}".split())
    return by_options(found)
