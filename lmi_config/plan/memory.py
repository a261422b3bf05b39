# SPDX-License-Identifier: Apache-2.0
"""Divides the machine's memory: the engine comes first, the rest is for KV caches."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from lmi_config.facts.kv import KvShape
from lmi_config.facts.machine import Machine
from lmi_config.facts.model import ModelFacts
from lmi_config.options.declared import GPU_MEMORY_UTILIZATION, KV_ON_CPU, Settings
from lmi_config.options.settings import SettingsError
from lmi_config.plan.devices.parallelism import Parallelism

MIB = 1024**2
GIB = 1024**3

# Resident sizes of vLLM 0.32's processes without their weights and KV cache, in bytes. Without a
# GPU they were measured: 640 MB, 620 MB and 750 MB. CUDA's addition to a worker is an estimate.
SERVER = 768 * MIB
ENGINE_CORE = 768 * MIB
WORKER = 1 * GIB
CUDA_WORKER = 3 * GIB
ROUTER = 256 * MIB
"""The router and the supervisor of several copies together; measured 80 MB and 70 MB."""
CACHE_SERVER = 768 * MIB
"""LMCache's server without its pool; measured 450 MB."""
SHARED_MEMORY = 256 * MIB
"""Most bytes of /dev/shm for the exchange between two ranks, for each of them."""
CUDA_OVERHEAD = 3 * GIB
"""A GPU's memory for context, activations and CUDA graphs. An estimate."""
MARGIN = 0.1
"""The share of memory for page cache, growth and errors of the figures above."""


KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's older way to size the KV cache without a GPU, in GiB. If it is set, vLLM (0.32) ignores
kv_cache_memory_bytes (vllm/platforms/cpu.py).
"""


def settled(settings: Settings, machine: Machine, environ: Mapping[str, str]) -> Settings:
    """Return the settings with the KV cache's size that vLLM reads from VLLM_CPU_KVCACHE_SPACE.

    Raises SettingsError if it is not a size, or an option has another.
    """
    given = environ.get(KV_SPACE, "")
    if machine.gpus or not given:
        return settings
    if not given.isdecimal() or not int(given):
        raise SettingsError([f"{KV_SPACE}={given!r}: should be a whole number of GiB, like 4"])
    size = int(given) * GIB
    origin = settings.origins.get("kv_cache_memory_bytes")
    if origin and settings.kv_cache_memory_bytes != size:
        raise SettingsError(
            [
                f"{KV_SPACE}={given} and {origin}={settings.kv_cache_memory_bytes} both size the "
                "engine's KV cache; keep one"
            ]
        )
    origins = {"kv_cache_memory_bytes": KV_SPACE, **settings.origins}
    return dataclasses.replace(settings, kv_cache_memory_bytes=size, origins=origins)


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of the memory. size: bytes; reason: the source of the figure."""

    name: str
    size: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of one of several models in a container, in bytes. host: of the container. gpu: of
    each GPU.
    """

    host: int
    gpu: int = 0

    def __add__(self, other: "Footprint") -> "Footprint":
        return Footprint(self.host + other.host, self.gpu + other.gpu)

    def __sub__(self, other: "Footprint") -> "Footprint":
        return Footprint(self.host - other.host, self.gpu - other.gpu)

    def fits(self, room: "Footprint") -> bool:
        return self.host <= room.host and self.gpu <= room.gpu


NO_MEMORY = Footprint(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The container's memory. shares: reserved memory; kv: bytes of the engine's KV cache in each
    rank if it is in this memory, otherwise None; free: bytes left for tiers, at least 0.
    """

    shares: tuple[Share, ...]
    kv: int | None
    free: int

    @property
    def needed(self) -> int:
        return sum(share.size for share in self.shares)

    def with_cache_server(self) -> "Budget":
        """Return the budget with a share for LMCache's server."""
        share = Share("cache server", CACHE_SERVER, "without its pool; measured")
        free = max(self.free - CACHE_SERVER, 0)
        return dataclasses.replace(self, shares=(*self.shares, share), free=free)


def budget(
    settings: Settings,
    machine: Machine,
    parallelism: Parallelism,
    model: ModelFacts,
    draft: ModelFacts | None,
) -> Budget:
    """Divide the free memory, without a share for LMCache's server."""
    servers = parallelism.servers
    count, copies = parallelism.all_workers, parallelism.local_copies * servers
    on_gpu = bool(machine.gpus)
    if servers > 1:
        cores = f"{servers} servers and {copies} engine cores"
    else:
        cores = "server and engine core" if copies == 1 else f"server and {copies} engine cores"
    shares = [
        Share(cores, servers * SERVER + copies * ENGINE_CORE, "measured"),
        Share(
            f"{count} worker{'s' * (count > 1)}",
            count * (CUDA_WORKER if on_gpu else WORKER),
            "estimate, CUDA included" if on_gpu else "measured",
        ),
        *_weights(settings, parallelism, model, draft, on_gpu),
    ]
    if servers > 1:
        shares.append(Share("router and supervisor", ROUTER, "measured"))
    if talk := talking(machine, parallelism, model) * SHARED_MEMORY:
        shares.append(Share("shared memory", min(talk, machine.shm), "/dev/shm counts too"))
    if offloaded := native_offload(settings) * copies:
        shares.append(Share("vLLM's KV offload", offloaded, _offload_reason(settings, copies)))
    shares.append(Share(_MARGIN, _margin(machine), f"{MARGIN:.0%} of the memory"))
    left = machine.memory_free - sum(share.size for share in shares)
    kv = None
    if not on_gpu and "kv_cache_memory_bytes" not in settings.origins:
        kv = _kv_on_cpu(machine, left) // count
        reason = "half of the rest, at most a quarter of the memory and 4 GiB"
    elif settings.kv_cache_memory_bytes and not on_gpu:
        kv = settings.kv_cache_memory_bytes
        reason = settings.origins["kv_cache_memory_bytes"]
    if kv is not None:
        shares.append(Share("engine's KV cache", kv * count, reason))
        left -= kv * count
    return Budget(shares=tuple(shares), kv=kv, free=max(left, 0))


_MARGIN = "margin"


def _margin(machine: Machine) -> int:
    return round(MARGIN * machine.memory)


def room(settings: Settings, machine: Machine) -> Footprint:
    """Return the memory for all models in a container: beside the router, and without the margin.
    The GPU's is that of the smallest one; 1 for a size that is unknown.
    """
    gpu = min((it.memory or 1 for it in machine.gpus), default=0)
    left = max(machine.memory_free - ROUTER - _margin(machine), 0)
    return Footprint(min(settings.models_memory or left, left), gpu)


def talking(machine: Machine, parallelism: Parallelism, model: ModelFacts) -> int:
    """Return the number of ranks on this machine that exchange data through /dev/shm. Copies with
    one GPU each exchange no data, unless they share experts.
    """
    count = parallelism.local_workers
    shared = bool(model.parts and model.parts.experts)
    alone = bool(machine.gpus) and parallelism.workers == 1 and not shared
    return 0 if alone or count == 1 else parallelism.all_workers


def _weights(
    settings: Settings,
    parallelism: Parallelism,
    model: ModelFacts,
    draft: ModelFacts | None,
    on_gpu: bool,
) -> list[Share]:
    count, copies = parallelism.all_workers, parallelism.local_copies * parallelism.servers
    if on_gpu:
        passing = min(model.largest_file * count, model.weight_bytes)
        found = [Share("weights being loaded", passing, "a file in each worker, at most all")]
        if offloaded := settings.cpu_offload_gb_per_gpu:
            size = round(offloaded * GIB) * count
            found.append(Share("offloaded weights", size, "cpu_offload_gb_per_gpu"))
        return found
    dense, experts = loaded(settings, model)
    both = dense * copies + experts * copies // parallelism.copies
    both += sum(loaded(settings, draft)) * copies if draft else 0
    each = f" for each of {copies} copies" if copies > 1 else ""
    passing = min(model.largest_file * copies, model.weight_bytes)
    return [
        Share("weights", both // parallelism.machines, f"the model's files{each}"),
        Share("weights being loaded", passing, f"the largest file once more{each}"),
    ]


_AS_LOADED: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"), (0.5, 0.5)),
    **dict.fromkeys(("experts_int8", "int8_per_channel_weight_only"), (1.0, 0.5)),
    "mxfp8": (0.52, 0.52),
    "mxfp4": (0.27, 0.27),
    "nvfp4_per_token": (1.0, 0.29),
}
"""vLLM's methods that quantise 16-bit weights during loading → the relative size of linear layers
and of experts afterwards, with scales (_ONLINE_SHORTHANDS in vllm/config/quantization.py)."""


def loaded(settings: Settings, model: ModelFacts) -> tuple[int, int]:
    """Return the bytes of one copy's loaded weights: without experts, and of the experts.

    vLLM runs float32 files in 16 bits, unless OPTION_DTYPE says otherwise. It quantises plain
    weights if OPTION_QUANTIZE names such a method. The result is an estimate if the files do not
    distinguish experts.
    """
    whole, parts = model.weight_bytes, model.parts
    experts = min(parts.experts, whole) if parts else 0
    if not parts and settings.engine.get("enable_expert_parallel"):
        experts = whole
    if model.quantization or not whole:
        return whole - experts, experts
    single = parts.single if parts else whole if model.dtype == "float32" else 0
    singles = settings.dtype in ("float32", "float")
    scale = 1 + (whole - single) / whole if singles else 1 - single / whole / 2
    if method := _AS_LOADED.get(settings.quantize or ""):
        table = 2 * (model.vocabulary or 0) * (model.hidden_size or 0)
        outer = parts.outer if parts else min(2 * table, whole // 4)
        plain = max(whole - experts - outer, 0)
        return round(scale * (outer + plain * method[0])), round(scale * experts * method[1])
    return round(scale * (whole - experts)), round(scale * experts)


_OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""vLLM's own connectors that keep KV in this machine's memory."""


def connectors(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a kv_transfer_config, and the nested ones of a MultiConnector."""
    if not isinstance(config, Mapping):
        return
    yield config
    extra = config.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, Mapping) else None
    for it in inner if isinstance(inner, list) else ():
        yield from connectors(it)


def fixed_ports(settings: Settings, tiers: bool) -> str:
    """Return the operator's connector with ports that only one server can have; "" for none.
    tiers: whether Slipway's connector replaces the operator's.
    """
    for it in () if tiers else connectors(settings.kv_transfer_config):
        connector = it.get("kv_connector")
        if connector and connector not in (*_OFFLOADING, "MultiConnector"):
            name = settings.named("kv_transfer_config")
            return f"{name}: {connector} listens on fixed ports, which only one server can have"
    return ""


def native_offload(settings: Settings) -> int:
    """Return the bytes of CPU memory for vLLM's own offload of a copy's KV, of all ranks together:
    from kv_offloading_size, or from a connector of vLLM's.
    """
    size: float = settings.engine.get("kv_offloading_size") or 0
    if size and settings.engine.get("kv_offloading_backend", "native") == "native":
        return round(size * GIB)
    found = 0
    for it in connectors(settings.kv_transfer_config):
        extra = it.get("kv_connector_extra_config")
        if it.get("kv_connector") in _OFFLOADING and isinstance(extra, Mapping):
            asked = extra.get("cpu_bytes_to_use")
            found += round(asked) if isinstance(asked, int | float) else 0
    return found


def _offloader(settings: Settings) -> str:
    """Return the option that makes vLLM offload KV itself."""
    sized = "kv_offloading_size" in settings.engine
    return settings.named("kv_offloading_size" if sized else "kv_transfer_config")


def _offload_reason(settings: Settings, copies: int) -> str:
    return _offloader(settings) + (f" for each of {copies} copies" if copies > 1 else "")


def offload_faults(
    settings: Settings, machine: Machine, parallelism: Parallelism, tiers: bool
) -> list[str]:
    """Return why vLLM's own KV offload is not possible as requested, a sentence each. tiers:
    whether Slipway's tiers are also wanted.
    """
    return [*_offload_faults(settings, machine, parallelism, tiers)]


def _offload_faults(
    settings: Settings, machine: Machine, parallelism: Parallelism, tiers: bool
) -> Iterator[str]:
    engine = settings.engine
    if engine.get("kv_offloading_size") and engine.get("kv_offloading_backend") == "lmcache":
        yield (
            f"{settings.named('kv_offloading_backend')}=lmcache: Slipway starts LMCache's server; "
            "set OPTION_LMCACHE_AUTO_CONFIG=true, with OPTION_KV_L1_SIZE for its size, and leave "
            "OPTION_KV_OFFLOADING_* out"
        )
        return
    size = native_offload(settings)
    if not size:
        return
    name = _offloader(settings)
    whole = size * parallelism.local_copies * parallelism.servers
    if tiers:
        yield (
            f"{name}: vLLM's own KV offload and Slipway's KV cache tiers would need two "
            "connectors; leave one of them out"
        )
    elif "kv_offloading_size" in engine and (settings.kv_transfer_config or {}).get("kv_connector"):
        yield (
            f"{name}: vLLM would replace the connector of "
            f"{settings.named('kv_transfer_config')}'s; leave one of them out"
        )
    if not machine.gpus:
        yield f"{name}: vLLM offloads KV from GPUs only, and there is none; leave it out"
    elif whole > machine.shm:
        yield (
            f"{name}: vLLM keeps {whole / GIB:.1f} GiB in /dev/shm, which has "
            f"{machine.shm / GIB:.1f} GiB; give the container more (docker run --shm-size="
            f"{-(-whole // GIB) + 1}g, or an emptyDir with medium Memory)"
        )
    elif whole > machine.memory_free:
        yield (
            f"{name}: {whole / GIB:.1f} GiB, and {machine.memory_free / GIB:.1f} GiB of memory are "
            "free; set a smaller size"
        )


def _kv_on_cpu(machine: Machine, left: int) -> int:
    """Return the bytes of the engine's KV cache without a GPU, all ranks together; never 0.

    By default vLLM would reserve nearly all memory. A quarter is enough for a CPU's load.
    """
    return min(machine.memory // 4, KV_ON_CPU, max(left // 2, machine.memory // 16))


def kv_per_token(settings: Settings, model: ModelFacts) -> int | None:
    """Return the bytes of one token's KV in one copy, or None if the model's files do not tell."""
    return (model.kv and model.kv.bytes_per_token(*_kv_dtypes(settings, model))) or None


def kv_of_request(
    settings: Settings,
    machine: Machine,
    parallelism: Parallelism,
    model: ModelFacts,
    kv: KvShape,
    tokens: int,
) -> int:
    """Return the most bytes of a copy's KV cache for a request of this many tokens."""
    if settings.engine.get("disable_hybrid_kv_cache_manager"):
        kv = kv.without_windows()
    # One step for each stage, and one that is scheduled ahead (VllmConfig.max_in_flight_tokens).
    in_flight = (parallelism.pipeline + 1) * tokens_of_a_step(settings, machine, parallelism)
    return kv.bytes_per_request(tokens, in_flight, *_kv_dtypes(settings, model))


def _kv_dtypes(settings: Settings, model: ModelFacts) -> tuple[str, str | None]:
    """Return vLLM's kv_cache_dtype, and the model's data type; None for 16 bits."""
    dtype = model.dtype if settings.dtype == "auto" else settings.dtype
    if settings.dtype == "auto" and model.dtype == "float32":
        dtype = None  # vLLM runs it in 16 bits
    return settings.engine.get("kv_cache_dtype", "auto"), dtype


def tokens_of_a_step(settings: Settings, machine: Machine, parallelism: Parallelism) -> int:
    """Return max_num_batched_tokens. vLLM's defaults: get_batch_defaults in
    vllm/engine/arg_utils.py.
    """
    if settings.max_rolling_batch_prefill_tokens:
        return settings.max_rolling_batch_prefill_tokens
    return _step_on_gpu(machine) if machine.gpus else 2048 * parallelism.workers


def sequences_of_a_step(settings: Settings, machine: Machine, parallelism: Parallelism) -> int:
    """Return max_num_seqs. vLLM's defaults are in the same function."""
    if settings.max_rolling_batch_size:
        return settings.max_rolling_batch_size
    if not machine.gpus:
        return 128 * parallelism.workers
    return 1024 if _step_on_gpu(machine) > 2048 else 256


def _step_on_gpu(machine: Machine) -> int:
    # In a container with a slice of a GPU, vLLM cannot read its memory.
    first = machine.gpus[0]
    memory, name = 0 if first.slice else first.memory or 0, first.name.lower()
    if memory >= 160 * GIB:
        return 16384
    return 8192 if memory >= 70 * GIB and "a100" not in name else 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuBudget:
    """One GPU's memory in bytes: vLLM's share, and the weights and the KV cache in that share.

    given: the operator's size of the KV cache, or 0.
    """

    total: int
    usable: int
    weights: int
    overhead: int
    given: int

    @property
    def left(self) -> int:
        return self.usable - self.weights - self.overhead

    @property
    def kv(self) -> int:
        return self.given or self.left


def gpu_budget(
    settings: Settings,
    machine: Machine,
    parallelism: Parallelism,
    model: ModelFacts,
    draft: ModelFacts | None,
) -> GpuBudget | None:
    """Estimate the memory of the smallest used GPU. Returns None without one, or if it is unknown.

    Weights are split evenly over a copy's ranks, and experts over those of all copies
    (flatten_tp_across_dp_and_pcp in vllm's fused_moe). Each tensor-parallel rank's share includes
    the draft's weights.
    """
    used = machine.gpus[: parallelism.local_workers]
    sizes = [found.memory for found in used if found.memory]
    if not used or len(sizes) < len(used):
        return None
    dense, experts = loaded(settings, model)
    weights = (dense + experts // parallelism.copies) // parallelism.workers
    weights -= min(round((settings.cpu_offload_gb_per_gpu or 0) * GIB), weights)
    if draft:
        weights += sum(loaded(settings, draft)) // parallelism.tensor
    share = settings.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
    return GpuBudget(
        total=min(sizes),
        usable=round(min(sizes) * share),
        weights=weights,
        overhead=CUDA_OVERHEAD,
        given=settings.kv_cache_memory_bytes or 0,
    )


def footprint(budget: Budget, gpu: GpuBudget | None, machine: Machine, tiers: int) -> Footprint:
    """Return the memory of a model that runs beside others. tiers: bytes of its L1 tier.

    vLLM takes its whole share of a GPU, unless the operator sizes its KV cache. A GPU of unknown
    size counts as full.
    """
    host = sum(share.size for share in budget.shares if share.name != _MARGIN) + tiers
    if not machine.gpus or gpu is None:
        return Footprint(host, 1 if machine.gpus else 0)
    return Footprint(host, gpu.weights + gpu.overhead + gpu.given if gpu.given else gpu.usable)


def asleep(awake: Footprint, gpu: GpuBudget | None, machine: Machine) -> Footprint | None:
    """Return the memory of a model whose engine sleeps at vLLM's level 1: the GPUs keep contexts
    and graphs, and the host has the weights of all GPUs. None if the size of the weights is
    unknown. awake: its memory while it runs.
    """
    if gpu is None or not gpu.weights:
        return None
    return Footprint(awake.host + gpu.weights * len(machine.gpus), gpu.overhead)
