"""Settings and Machine → the arguments and environment that vLLM is started with."""

from collections.abc import Mapping
from typing import Any

from lmi_config.machine import Machine
from lmi_config.options import OPTIONS, Settings
from lmi_config.settings import SettingsError

GIB = 1024**3


def arguments(settings: Settings, machine: Machine) -> list[str]:
    """vLLM's command line for these settings on this machine, without the program's name.

    Raises SettingsError where the machine has fewer devices than the settings ask for.
    """
    options = {
        option.vllm: getattr(settings, field)
        for field, option in OPTIONS.items()
        if option.vllm and getattr(settings, field) is not None
    }
    options |= settings.engine
    options["served_model_name"] = settings.model_names
    options["tensor_parallel_size"] = _tensor_parallel(settings, machine)
    if not machine.gpus:
        options = _without_gpu(options, machine)
    return [part for name, value in options.items() for part in _rendered(name, value)]


def environment(settings: Settings, machine: Machine, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before vLLM is imported. What the operator has set stays as it is."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if not machine.gpus and settings.enforce_eager is not False:
        # vLLM compiles some helpers of its sampler even so: 20 s at the first request, a compiler
        # needed on the machine, and no faster on a CPU.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    ranks = _ranks(settings, machine)
    if not machine.gpus and ranks > 1:
        # Left alone, vLLM wants a NUMA node for each rank. Each gets its share of the CPUs instead.
        share = len(machine.cpus) // ranks
        shares = [machine.cpus[rank * share : (rank + 1) * share] for rank in range(ranks)]
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(str(cpu) for cpu in cpus) for cpus in shares
        )
    return {name: value for name, value in wanted.items() if name not in environ}


def _tensor_parallel(settings: Settings, machine: Machine) -> int:
    pipeline: int = settings.engine.get("pipeline_parallel_size", 1)
    if settings.tensor_parallel_degree == "max":
        return max(machine.gpus // pipeline, 1)
    degree = settings.tensor_parallel_degree
    devices, kind = (machine.gpus, "GPU") if machine.gpus else (len(machine.cpus), "CPU")
    # With several nodes the other devices are elsewhere, and vLLM counts them itself.
    if settings.engine.get("nnodes", 1) == 1 and degree * pipeline > devices:
        raise SettingsError(
            [
                f"OPTION_TENSOR_PARALLEL_DEGREE={degree}: needs {degree * pipeline} {kind}s, but "
                f"this machine shows {devices}; use at most {max(devices // pipeline, 1)}, or max"
            ]
        )
    return degree


def _ranks(settings: Settings, machine: Machine) -> int:
    pipeline: int = settings.engine.get("pipeline_parallel_size", 1)
    return _tensor_parallel(settings, machine) * pipeline


def _without_gpu(options: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Fill in what vLLM's CPU engine is better told than left to find out."""
    options = {"enforce_eager": True} | options
    if not options.keys() & {"gpu_memory_utilization", "kv_cache_memory_bytes"}:
        # vLLM would reserve nearly all memory. A quarter, at most 4 GiB, serves what a CPU is good
        # for and leaves room for the weights, which are still being loaded when it is reserved.
        ranks = options["tensor_parallel_size"] * options.get("pipeline_parallel_size", 1)
        options["kv_cache_memory_bytes"] = min(machine.memory // 4, 4 * GIB) // ranks
    return options


def _rendered(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + name.replace("_", "-")]
    if isinstance(value, tuple):
        return [flag, *value]
    return [f"{flag}={value}"]  # in one word, so that a value may begin with a dash
