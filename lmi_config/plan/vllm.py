"""Settings and Machine → the arguments and environment that vLLM is started with."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lmi_config.facts.machine import Machine
from lmi_config.options.declared import LORA_DEFAULTS, OPTIONS, Settings
from lmi_config.options.settings import SettingsError, traces_protocol

_DERIVED = {
    "model",  # where it was fetched to
    "download_dir",  # vLLM downloads nothing
    *("host", "port"),  # ... and listens nowhere
    "spec_model",  # a part of speculative_config
    "spec_tokens",
}

# LMI's task → what vLLM calls it.
_TASKS: Mapping[str, Mapping[str, str]] = {
    "text-generation": {"runner": "generate"},
    "generate": {"runner": "generate"},
    "text-embedding": {"runner": "pooling", "convert": "embed"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "feature-extraction": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
}


WORKER_SHM = 256 * 1024**2
"""What one worker process wants of /dev/shm: 240 MB for its queues, as seen."""


def options(
    settings: Settings,
    machine: Machine,
    model: str,
    derived: Mapping[str, Any],
    cpu_lora: str,
) -> dict[str, Any]:
    """vLLM's options for these settings on this machine, by vLLM's names.

    model: the folder it is in by now. derived: options that follow from what else is known, by
    vLLM's names; they come before the operator's. cpu_lora: the path of the class that a worker is
    extended with where adapters run without a GPU.

    Raises SettingsError where the machine has fewer devices than the settings ask for, and for a
    word of a list that vLLM would take for another option.
    """
    found: dict[str, Any] = {"model": model, "served_model_name": settings.model_names}
    found["tensor_parallel_size"] = tensor_parallel(settings, machine)
    for field, option in OPTIONS.items():
        value = getattr(settings, field)
        if option.vllm and option.vllm not in found.keys() | _DERIVED and value != option.default:
            found[option.vllm] = value
    if settings.enable_lora:
        found = {**LORA_DEFAULTS, **found}
    found["enable_prompt_tokens_details"] = True  # answers tell how many tokens were cached
    if not machine.gpus:
        if settings.enable_lora:
            found.setdefault("worker_extension_cls", cpu_lora)
        # Compiling takes longer than it wins where there is no GPU.
        found.setdefault("enforce_eager", True)
    if workerless(settings, machine):
        found["distributed_executor_backend"] = "uni"
    found |= {**_TASKS.get(settings.task, {}), **settings.engine, **derived}
    if faults := list(_flags(settings, found)):
        raise SettingsError(faults)
    return found


def _flags(settings: Settings, options: Mapping[str, Any]) -> Iterator[str]:
    """Words of lists that begin with a dash: a sentence each.

    A list is given to vLLM in words of their own, so argparse would read such a one as an option:
    a model's name as --trust-remote-code.
    """
    fields = {option.vllm: field for field, option in OPTIONS.items()}
    for name, value in options.items():
        for word in value if isinstance(value, tuple) else ():
            if word.startswith("-"):
                origin = settings.origins.get(fields.get(name, name), f"OPTION_{name.upper()}")
                yield f"{origin}: {word!r} begins with a dash; choose a name that does not"


def arguments(options: Mapping[str, Any]) -> list[str]:
    """The options as vLLM's command line, without the program's name."""
    return [part for name, value in options.items() for part in _rendered(name, value)]


def environment(settings: Settings, machine: Machine, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before vLLM is imported. What the operator has set stays as it is."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if not settings.trust_remote_code and not settings.engine.keys() & {
        "tokenizer",
        "hf_config_path",
    }:
        # All files are here by then; asking the hub for them again can take minutes to fail.
        wanted["HF_HUB_OFFLINE"] = "1"
    if settings.otlp_traces_endpoint:
        wanted["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = traces_protocol(environ)
    if "SAGEMAKER_SAFE_PORT_RANGE" in environ and len(machine.ports) > 2:
        wanted["VLLM_PORT"] = str(machine.ports[-1] + 1)
    if not machine.gpus:
        # oneDNN keeps code for each shape that a batch has had: with its default of 1,024 shapes,
        # 0.3 GiB more within minutes for a tiny model, and a heap that grew to 1.4 GiB in 20 of
        # them. With 256 it is 0.06 GiB, the heap 0.6 to 1 GiB, and requests take no longer.
        wanted["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "256"
        if settings.enforce_eager is not False:
            # vLLM compiles some helpers of its sampler even so: 20 s at the first request, a
            # compiler needed on the machine, and no faster on a CPU.
            wanted["TORCHDYNAMO_DISABLE"] = "1"
        if (count := ranks(settings, machine)) > 1:
            # Left alone, vLLM wants a NUMA node for each rank. Each gets its share of the CPUs.
            share = len(machine.cpus) // count
            shares = [machine.cpus[rank * share : (rank + 1) * share] for rank in range(count)]
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
                ",".join(str(cpu) for cpu in cpus) for cpus in shares
            )
    if workerless(settings, machine):
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else vLLM overrules the executor
    return {name: value for name, value in wanted.items() if name not in environ}


def workerless(settings: Settings, machine: Machine) -> bool:
    """Whether the engine's core does the worker's work: without a GPU vLLM has a process for it
    even with one rank, which would not start with the 64 MiB of shared memory that containers get.
    """
    return (
        not machine.gpus
        and machine.shm < WORKER_SHM
        and ranks(settings, machine) == 1
        and "distributed_executor_backend" not in settings.engine
    )


def tensor_parallel(settings: Settings, machine: Machine) -> int:
    """Devices that each stage of the model is spread over.

    Raises SettingsError where that is more than there are.
    """
    asked = settings.tensor_parallel_degree
    stages = settings.pipeline_parallel_degree * _copies(settings)
    devices, kind = (len(machine.gpus), "GPU") if machine.gpus else (len(machine.cpus), "CPU")
    everywhere = len(machine.gpus) * settings.engine.get("nnodes", 1)
    degree = max(everywhere // stages, 1) if asked == "max" else asked
    if degree * stages <= devices or _elsewhere(settings):
        return degree
    if asked == "max":
        field, value, fix = "pipeline_parallel_degree", settings.pipeline_parallel_degree, ""
        if _copies(settings) > 1:
            field, value = "data_parallel_size", _copies(settings)
    else:
        field, value = "tensor_parallel_degree", degree
        fix = f"; use at most {max(devices // stages, 1)}, or max"
    name = settings.origins.get(field, f"OPTION_{field.upper()}")
    raise SettingsError(
        [f"{name}={value}: needs {degree * stages} {kind}s, but this machine shows {devices}{fix}"]
    )


def kv_event_ports(settings: Settings) -> tuple[int, int]:
    """The first port of KV events and the first of their logs; vLLM adds each copy's rank."""
    return settings.kv_events_port, settings.kv_events_port + _ranks(settings)


def kv_events(settings: Settings) -> dict[str, Any]:
    """vLLM's kv_events_config."""
    events, log = kv_event_ports(settings)
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",  # vLLM listens where there is a wildcard, and calls else
        "replay_endpoint": f"tcp://*:{log}",
    }


def kv_events_faults(settings: Settings) -> list[str]:
    """Why KV events cannot be published as asked: a sentence each."""
    if not settings.kv_events:
        return []
    found = []
    if "kv_events_config" in settings.engine:
        name = settings.origins.get("kv_events_config", "OPTION_KV_EVENTS_CONFIG")
        found.append(f"OPTION_KV_EVENTS=true and {name} both say where events go; keep one")
    first, last = settings.kv_events_port, settings.kv_events_port + 2 * _ranks(settings) - 1
    told = f"OPTION_KV_EVENTS_PORT={first}: events and their logs take the ports to {last}"
    if last > 65535:
        found.append(f"{told}; choose a lower one")
    if first <= settings.port <= last:
        found.append(f"{told}, and requests come in at {settings.port}; choose another")
    return found


def _ranks(settings: Settings) -> int:
    """Copies of the model on all machines."""
    count: int = settings.engine.get("data_parallel_size") or 1
    return count


def _copies(settings: Settings) -> int:
    """Copies of the model on this machine, each with ranks of its own (data parallel)."""
    engine = settings.engine
    copies: int = engine.get("data_parallel_size_local") or engine.get("data_parallel_size") or 1
    return copies


def _elsewhere(settings: Settings) -> bool:
    """Whether devices of other machines take part, which vLLM or Ray counts."""
    engine = settings.engine
    return engine.get("nnodes", 1) > 1 or engine.get("distributed_executor_backend") == "ray"


def ranks(settings: Settings, machine: Machine) -> int:
    """Worker processes: one for each device that a copy of the model is spread over."""
    return tensor_parallel(settings, machine) * settings.pipeline_parallel_degree


def _rendered(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + name.replace("_", "-")]
    if isinstance(value, tuple):
        return [flag, *value]
    if isinstance(value, Mapping):
        value = json.dumps(value, separators=(",", ":"))
    return [f"{flag}={value}"]  # in one word, so that a value may begin with a dash
