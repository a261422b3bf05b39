# SPDX-License-Identifier: Apache-2.0
"""The model's parallelism over the devices, decided once."""

import dataclasses

from lmi_config.facts.draft import Draft
from lmi_config.facts.machine import Machine
from lmi_config.facts.model import ModelFacts
from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError

WORKER_SHM = 256 * 1024**2
"""Bytes of /dev/shm for one worker process: 240 MB for its queues, as measured."""
FEW_CPUS = 4
"""Up to this number of CPUs, a single rank has no worker process. The engine core would wait for a
worker by spinning. Without the worker, on two CPUs: 0.76 of the memory, 0.71 of a start's CPU time,
and 0.5 of a token's CPU time. With many CPUs a worker is pinned to one NUMA node, but the core is
not.
"""

_VOCABULARY = 64  # vLLM pads the vocabulary to a multiple of this


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallelism:
    """tensor: devices of each stage of a copy. pipeline: stages of a copy.

    copies: copies of the model on all machines (data parallel). local_copies: those that this
    process starts on this machine. machines: machines of each copy.
    servers: the servers on this machine, each with one copy of the model (OPTION_COPIES).
    workerless: whether the engine's core does the only worker's work. Without a GPU, vLLM starts a
    worker process even for one rank. That process costs more than it gains on few CPUs, and would
    not start with the 64 MiB of shared memory that containers get.
    """

    tensor: int
    pipeline: int = 1
    copies: int = 1
    local_copies: int = 1
    machines: int = 1
    servers: int = 1
    workerless: bool = False

    @property
    def workers(self) -> int:
        """Worker processes of one copy, one for each rank."""
        return self.tensor * self.pipeline

    @property
    def local_workers(self) -> int:
        """Worker processes of one server on this machine, for all copies in it."""
        return -(-self.workers // self.machines) * self.local_copies

    @property
    def all_workers(self) -> int:
        """Worker processes of all servers on this machine."""
        return self.local_workers * self.servers


def decide(
    settings: Settings, machine: Machine, model: ModelFacts, draft: Draft | None = None
) -> Parallelism:
    """Decide the parallelism.

    Raises SettingsError if the machine has fewer devices than the settings need, or the model's
    attention heads cannot be divided among them.
    """
    tensor = _tensor(settings, machine, model, draft)
    pipeline = settings.pipeline_parallel_degree
    return Parallelism(
        tensor=tensor,
        pipeline=pipeline,
        copies=copies(settings),
        local_copies=_local_copies(settings, tensor * pipeline),
        machines=_machines(settings, machine, tensor * pipeline),
        workerless=(
            not machine.gpus
            and (machine.shm < WORKER_SHM or len(machine.cpus) <= FEW_CPUS)
            and tensor * pipeline == 1
            and "distributed_executor_backend" not in settings.engine
        ),
    )


def copies(settings: Settings) -> int:
    """Return the copies of the model on all machines."""
    count: int = settings.engine.get("data_parallel_size") or 1
    return count


def _local_copies(settings: Settings, workers: int) -> int:
    """Return the copies that vLLM starts on this machine (create_engine_config in
    vllm/engine/arg_utils.py). workers: of a copy.
    """
    engine, count = settings.engine, copies(settings)
    if engine.get("data_parallel_external_lb") or "data_parallel_rank" in engine:
        return 1  # each copy has a separate process
    if local := engine.get("data_parallel_size_local"):
        return int(local)
    nodes: int = engine.get("nnodes", 1)
    return max(count * workers // nodes // workers, 1)


def _undivided(degree: int, model: ModelFacts) -> str | None:
    """Return the part of the model that this number of ranks cannot share evenly, or None.

    vLLM's verify_with_parallel_config checks attention heads. Its models check KV heads: each rank
    gets some, or several ranks share one. vllm/model_executor/layers/vocab_parallel_embedding.py
    checks the vocabulary, padded to a multiple of 64.
    """
    if (model.attention_heads or 0) % degree:
        return f"{model.attention_heads} attention heads cannot be divided by {degree}"
    heads = model.kv.heads if model.kv else degree
    if heads % degree and degree % heads:
        return f"{heads} KV heads cannot be divided by {degree}, nor {degree} by them"
    if -(-(model.vocabulary or 0) // _VOCABULARY) * _VOCABULARY % degree:
        return f"vocabulary of {model.vocabulary} cannot be divided by {degree}"
    return None


def _hinders(degree: int, settings: Settings, model: ModelFacts, draft: Draft | None) -> str | None:
    """Return why these ranks cannot share the model or its draft, which vLLM splits in the same
    way, or None.
    """
    if why := _undivided(degree, model):
        return f"the model's {why}"
    if draft and "draft_tensor_parallel_size" not in (settings.speculative_config or {}):
        why = _undivided(degree, draft.facts)
        return why and f"the draft's {why}"
    return None


def _tensor(settings: Settings, machine: Machine, model: ModelFacts, draft: Draft | None) -> int:
    asked = settings.tensor_parallel_degree
    here = settings.engine.get("data_parallel_size_local") or copies(settings)
    stages = settings.pipeline_parallel_degree * here
    devices, kind = (len(machine.gpus), "GPU") if machine.gpus else (len(machine.cpus), "CPU")
    everywhere = len(machine.gpus) * settings.engine.get("nnodes", 1)
    if asked == "max":
        most = max(everywhere // stages, 1)
        degree = next(it for it in range(most, 0, -1) if not _hinders(it, settings, model, draft))
    else:
        degree = asked
        if why := _hinders(degree, settings, model, draft):
            name = settings.named("tensor_parallel_degree")
            raise SettingsError([f"{name}={degree}: {why}; use a degree that divides them, or max"])
    if degree * stages <= devices or _on_other_machines(settings):
        return degree
    if asked == "max":
        field, value, fix = "pipeline_parallel_degree", settings.pipeline_parallel_degree, ""
        if here > 1:
            field, value = "data_parallel_size", here
    else:
        field, value = "tensor_parallel_degree", degree
        fix = f"; use at most {max(devices // stages, 1)}, or max"
    name = settings.named(field)
    raise SettingsError(
        [f"{name}={value}: needs {degree * stages} {kind}s, but this machine shows {devices}{fix}"]
    )


def _machines(settings: Settings, machine: Machine, workers: int) -> int:
    """Return the machines of a copy, whose workers are spread evenly, like vLLM's nnodes_within_dp.

    Ray places the workers itself. At best it fills machines like this one, one after another.
    """
    engine = settings.engine
    nodes: int = engine.get("nnodes", 1)
    if nodes > 1:
        groups = copies(settings) // (engine.get("data_parallel_size_local") or copies(settings))
        return max(nodes // max(groups, 1), 1)
    if engine.get("distributed_executor_backend") == "ray":
        return -(-workers // max(len(machine.gpus or machine.cpus), 1))
    return 1


def _on_other_machines(settings: Settings) -> bool:
    """Whether other machines' devices take part. vLLM or Ray counts those."""
    engine = settings.engine
    return engine.get("nnodes", 1) > 1 or engine.get("distributed_executor_backend") == "ray"
