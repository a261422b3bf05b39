# SPDX-License-Identifier: Apache-2.0
"""vLLM's arguments and its environment."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lmi_config.facts.chat import Chat, Parser
from lmi_config.facts.machine import HELPERS, Machine
from lmi_config.facts.model import ModelFacts
from lmi_config.options.declared import LORA_DEFAULTS, OPTIONS, Settings, vllm_knows
from lmi_config.options.parsers import HUB, hub_id, names_repo
from lmi_config.options.settings import SettingsError, traces_protocol
from lmi_config.plan.compile_cache import CompileCache
from lmi_config.plan.devices.parallelism import Parallelism

_DERIVED = {
    "model",  # its local folder
    "download_dir",  # vLLM downloads nothing
    *("host", "port"),  # ... and does not listen
    "config",  # Slipway reads its options
    "spec_model",  # a part of speculative_config
    "spec_tokens",
}

# LMI's task → vLLM's options for it.
_TASKS: Mapping[str, Mapping[str, str]] = {
    "text-generation": {"runner": "generate"},
    "generate": {"runner": "generate"},
    "text-embedding": {"runner": "pooling", "convert": "embed"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "feature-extraction": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"},  # the model's own scores, or scores from its embeddings
    "reward": {"runner": "pooling"},
}

_NEEDED: Mapping[str, str] = {
    "enable_auto_tool_choice": "tool_call_parser",
    "enable_log_outputs": "enable_log_requests",
}
"""vLLM's options → other options that they need (its validate_parsed_serve_args)."""


def options(
    settings: Settings,
    machine: Machine,
    parallelism: Parallelism,
    derived: Mapping[str, Any],
) -> dict[str, Any]:
    """Return vLLM's options for these settings on this machine, by vLLM's names.

    derived: options that follow from other facts, under vLLM's names; they take precedence over the
    operator's.

    Raises SettingsError for a list's item that vLLM would read as another option, and for an option
    without another one that it needs.
    """
    found: dict[str, Any] = {
        "model": settings.model_id,
        "served_model_name": settings.model_names,
        "tensor_parallel_size": parallelism.tensor,
    }
    for field, option in OPTIONS.items():
        value = getattr(settings, field)
        if option.vllm and option.vllm not in found.keys() | _DERIVED and value != option.default:
            found[option.vllm] = value
    if settings.enable_lora:
        slots = min(
            LORA_DEFAULTS["max_loras"], settings.max_cpu_loras or LORA_DEFAULTS["max_loras"]
        )
        found = {**LORA_DEFAULTS, "max_loras": slots, **found}
    found["enable_prompt_tokens_details"] = True  # answers have the number of cached tokens
    if not machine.gpus:
        # Without a GPU, compiling takes more time than it saves.
        found.setdefault("enforce_eager", True)
    if parallelism.workerless:
        found["distributed_executor_backend"] = "uni"
    found |= {**_TASKS.get(settings.task, {}), **settings.engine, **derived}
    for name in PARSERS:
        if found.get(name) == NO_PARSER:
            del found[name]
    found.pop(LORA_MODULES, None)  # Slipway registers these
    faults = [*_flags(settings, found), *_incomplete(settings, found), *_unknown(settings, found)]
    if faults:
        raise SettingsError(faults)
    return found


PARSERS = {"tool_call_parser": "tools", "reasoning_parser": "reasoning"}
"""vLLM's options that name a parser → the field of Chat that decides by default."""
_PLUGINS = {"tool_call_parser": "tool_parser_plugin", "reasoning_parser": "reasoning_parser_plugin"}
"""... → the option for a file with further parsers."""
NO_PARSER = "none"
_REUSE = "enable_prefix_caching"
_HEARING = 4096  # tokens of a step without a GPU: at least two windows of Whisper's audio

LORA_MODULES = "lora_modules"
"""vLLM's option of adapters, each with a name. They are registered here. In vLLM's hands they would
bypass the checks, the lists, and the access rules for keys.
"""
_LORA_FORMS = 'write name=path, or {"name": NAME, "path": PATH}'
_LORA_KEYS = {"name", "path", "base_model_name", "is_3d_lora_weight"}
"""The keys of vLLM's LoRAModulePath. vLLM only displays the third. The adapter's files decide about
the fourth."""


class LoraModule(NamedTuple):
    """An adapter: its name, and the place of its files."""

    name: str
    src: str


def lora_modules(settings: Settings) -> tuple[LoraModule, ...]:
    """Return the adapters of the option, in the two forms of vLLM's LoRAParserAction. Raises
    SettingsError.
    """
    words: Any = settings.engine.get(LORA_MODULES) or ()
    option = settings.named(LORA_MODULES)
    found, faults = [], []
    for word in (words,) if isinstance(words, str) else words:
        if not word:
            continue
        try:
            module = _lora_module(word)
        except ValueError as fault:
            faults.append(f"{option}={word!r:.200}: {fault}")
        else:
            found.append(module)
            if (on_hub := hub_id(module.src)) and not names_repo(
                on_hub.repo, settings.adapter_repos
            ):
                faults.append(
                    f"{option}={word!r:.200}: there is no such folder, and adapters of the hub "
                    f"need their names in OPTION_ADAPTER_REPOS={on_hub.repo}"
                )
    counted = Counter(module.name for module in found)
    faults += [f"{option} names {name!r} twice" for name, count in counted.items() if count > 1]
    if found and not settings.enable_lora:
        faults.append(f"{option}: adapters need OPTION_ENABLE_LORA=true")
    if faults:
        raise SettingsError(faults)
    return tuple(found)


def _lora_module(word: str) -> LoraModule:
    """Read one adapter. Raises ValueError with the fault and the fix."""
    if "=" in word and "," not in word:
        name, _, path = word.partition("=")
    else:
        try:
            written = json.loads(word)
        except (ValueError, RecursionError):
            raise ValueError(_LORA_FORMS) from None
        if not isinstance(written, dict) or written.keys() - _LORA_KEYS:
            raise ValueError(_LORA_FORMS)
        name, path = (written.get(key) or "" for key in ("name", "path"))
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ValueError(_LORA_FORMS)
    if "://" in path:
        return LoraModule(name, path)
    if path.startswith("~"):
        path = str(Path(path).expanduser())
    if hub_id(path) and not Path(path).exists():
        return LoraModule(name, f"{HUB}{path}")
    return LoraModule(name, str(Path(path).absolute()))


def generates(settings: Settings) -> bool:
    """Whether the model generates text, by the settings alone."""
    return {**_TASKS.get(settings.task, {}), **settings.engine}.get("runner") != "pooling"


def pools(settings: Settings, model: ModelFacts) -> bool:
    """Whether vLLM answers with embeddings or scores (_get_runner_type in vllm/config/model.py)."""
    given = {**_TASKS.get(settings.task, {}), **settings.engine}
    if given.get("runner", "auto") != "auto":
        return bool(given["runner"] == "pooling")
    return model.kept.pooled or given.get("convert", "auto") not in ("auto", "none")


def parsers(settings: Settings, chat: Chat) -> dict[str, Any]:
    """Return vLLM's options for parsers of tool calls and reasoning, unless they are set."""
    given = settings.engine
    found: dict[str, Any] = {}
    if not generates(settings):
        return found
    # vLLM's "hf" reads both, and excludes any other parser.
    if "hf" not in map(given.get, PARSERS):
        for name, kind in PARSERS.items():
            known: Parser | None = getattr(chat, kind)
            if known and name not in given:
                found[name] = known.name
    parser = {**given, **found}.get("tool_call_parser", NO_PARSER)
    if "enable_auto_tool_choice" not in given and parser != NO_PARSER:
        found["enable_auto_tool_choice"] = True
    return found


def batch(settings: Settings, machine: Machine, model: ModelFacts) -> dict[str, Any]:
    """Return vLLM's option for the tokens of a step for speech-to-text models, unless it is set.
    vLLM does not split an encoder's output for audio, and its default without a GPU may be smaller.
    """
    if machine.gpus or not model.heard or settings.max_rolling_batch_prefill_tokens:
        return {}
    return {"max_num_batched_tokens": max(model.heard, _HEARING)}


def reuse(settings: Settings, machine: Machine, model: ModelFacts) -> dict[str, Any]:
    """Return vLLM's option that disables its prefix cache, if the cache would crash the engine and
    the option is not set. For models with a state, vLLM (0.32) needs the states within a prompt.
    Its code for CPUs only keeps the last state (mamba_mixer2.py; seen with Falcon-H1).
    """
    if machine.gpus or not model.kept.state or _REUSE in settings.engine:
        return {}
    return {_REUSE: False}


def _flags(settings: Settings, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each list item that begins with a dash.

    vLLM gets a list as separate arguments. So argparse would read such an item as an option, for
    example a model's name as --trust-remote-code.
    """
    fields = {option.vllm: field for field, option in OPTIONS.items()}
    for name, value in options.items():
        for word in value if isinstance(value, tuple) else ():
            if word.startswith("-"):
                option = settings.named(fields.get(name, name))
                yield f"{option}: {word!r} begins with a dash; choose a name that does not"


def _incomplete(settings: Settings, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each option without another one that it needs."""
    for name, needed in _NEEDED.items():
        if options.get(name) and not options.get(needed):
            option = settings.named(name)
            yield f"{option}: vLLM refuses it without OPTION_{needed.upper()}; set both or neither"
    if options.get("disable_log_stats"):
        option = settings.named("disable_log_stats")
        if options.get("otlp_traces_endpoint"):
            yield f"{option}: vLLM's traces need its statistics, and its engine dies without them"
        for name in ("slo_ttft_ms", "slo_itl_ms"):
            if getattr(settings, name):
                yield f"{option}: {settings.named(name)} needs vLLM's statistics; set one of them"


def _unknown(settings: Settings, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each parser that vLLM does not have."""
    for name, plugin in _PLUGINS.items():
        word = options.get(name)
        if word and not options.get(plugin) and word not in (known := vllm_knows(name)):
            option = settings.named(name)
            yield f"{option}={word!r:.80}: vLLM has no such parser; use one of {', '.join(known)}"


def arguments(options: Mapping[str, Any]) -> list[str]:
    """The options as vLLM's command line, without the program's name."""
    return [part for name, value in options.items() for part in _rendered(name, value)]


def environment(
    settings: Settings,
    machine: Machine,
    parallelism: Parallelism,
    environ: Mapping[str, str],
    compile_cache: CompileCache | None = None,
) -> dict[str, str]:
    """Return variables to set before vLLM is imported. The operator's variables stay unchanged."""
    wanted = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_MAX_AUDIO_DECODE_DURATION_S": str(settings.max_audio_seconds),
        # An audio file may be as large as a body.
        "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": str(-(-settings.max_request_size // 1024**2)),
    }
    if not settings.trust_remote_code and not settings.engine.keys() & {
        "tokenizer",
        "hf_config_path",
    }:
        # All files are local by then. Another request to the hub can take minutes to fail.
        wanted["HF_HUB_OFFLINE"] = "1"
    if settings.otlp_traces_endpoint:
        wanted["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = traces_protocol(environ)
        if "service.name" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            wanted["OTEL_SERVICE_NAME"] = "slipway"  # vLLM would be an unknown service
    if "SAGEMAKER_SAFE_PORT_RANGE" in environ and len(machine.ports) >= HELPERS:
        wanted["VLLM_PORT"] = str(machine.ports[HELPERS - 1] + 1)
    if machine.gpus and compile_cache:
        # vLLM then keeps the result of memory profiling beside its compiled graphs.
        wanted["VLLM_ENABLE_STARTUP_PLAN"] = "1"
    if not machine.gpus:
        # oneDNN keeps code for each shape that a batch has had: with its default of 1,024 shapes,
        # 0.3 GiB more within minutes for a tiny model, and a heap that grew to 1.4 GiB in 20 of
        # them. With 256 it is 0.06 GiB, the heap 0.6 to 1 GiB, and requests take no longer.
        wanted["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "256"
        if settings.enforce_eager is not False:
            # vLLM would still compile some helpers of its sampler. That takes 20 s at the first
            # request, needs a compiler, and is no faster on a CPU.
            wanted["TORCHDYNAMO_DISABLE"] = "1"
        if (count := parallelism.local_workers) > 1:
            # By default, vLLM needs a NUMA node for each rank. Here each rank gets a share of CPUs.
            share = len(machine.cpus) // count
            shares = [machine.cpus[rank * share : (rank + 1) * share] for rank in range(count)]
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
                ",".join(str(cpu) for cpu in cpus) for cpus in shares
            )
    if parallelism.workerless:
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # otherwise vLLM overrides the executor
        # vLLM gives a worker all CPUs except one, but the engine core all of them. The core's
        # threads spin. On two busy CPUs they took 2.2 times a worker's CPU time for a token, and on
        # one CPU 0.5 times as much.
        wanted["OMP_NUM_THREADS"] = str(max(len(machine.cpus) - 1, 1))
    return {name: value for name, value in wanted.items() if name not in environ}


def kv_event_ports(settings: Settings, copies: int) -> tuple[int, int]:
    """Return the first port of KV events and the first of their logs; vLLM adds each copy's rank.

    copies: the copies of the model on all machines.
    """
    return settings.kv_events_port, settings.kv_events_port + copies


def kv_events(settings: Settings, copies: int) -> dict[str, Any]:
    """vLLM's kv_events_config."""
    events, log = kv_event_ports(settings, copies)
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",  # vLLM listens on a wildcard, and connects otherwise
        "replay_endpoint": f"tcp://*:{log}",
    }


def kv_events_faults(settings: Settings, copies: int) -> list[str]:
    """Return why KV events cannot be published as requested, a sentence each."""
    if not settings.kv_events:
        return []
    found = []
    if "kv_events_config" in settings.engine:
        name = settings.named("kv_events_config")
        found.append(f"OPTION_KV_EVENTS=true and {name} both set the address of events; keep one")
    first, last = settings.kv_events_port, settings.kv_events_port + 2 * copies - 1
    told = f"OPTION_KV_EVENTS_PORT={first}: events and their logs take the ports to {last}"
    if last > 65535:
        found.append(f"{told}; choose a lower one")
    if first <= settings.port <= last:
        found.append(f"{told}, and requests come in at {settings.port}; choose another")
    return found


# Quantisation methods: a model with one of them cannot run with another.
_FP8 = (8, 9)  # the lowest compute capability with fp8
_QUANTISED = ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq")


def quantization_faults(settings: Settings, machine: Machine, model: ModelFacts) -> list[str]:
    """Return a sentence for each number format that differs between options and the model's files.

    vLLM compares them in ModelConfig._verify_quantization, and the KV cache in its attention layer.
    """
    found = []
    own, asked = model.quantization, settings.quantize
    if own in _QUANTISED and asked in _QUANTISED and own != asked:
        name = settings.named("quantize")
        found.append(f"{name}={asked}: the model's files are quantised with {own}; leave it out")
    dtype = settings.engine.get("kv_cache_dtype", "auto")
    name = settings.named("kv_cache_dtype")
    if own == "fp8" and dtype == "fp8_e5m2":
        found.append(f"{name}=fp8_e5m2: vLLM refuses it for models in fp8; set it to fp8_e4m3")
    older = [gpu for gpu in machine.gpus if gpu.capability and gpu.capability < _FP8]
    if model.latent and dtype.startswith("fp8") and older:
        found.append(
            f"{name}={dtype}: vLLM has latent attention with an fp8 cache only for GPUs newer than "
            f"the {older[0].name}; leave it out"
        )
    return found


def _rendered(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + name.replace("_", "-")]
    if isinstance(value, tuple):
        return [flag, *value] if value else []
    if isinstance(value, Mapping):
        value = json.dumps(value, separators=(",", ":"))
    return [f"{flag}={value}"]  # one argument, so that a value may begin with a dash
