# SPDX-License-Identifier: Apache-2.0
"""Likely problems, found before the start: a sentence each, with the fix."""

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from lmi_config.facts.gpus import CUDA, DRIVER
from lmi_config.facts.machine import Machine
from lmi_config.facts.model import ModelFacts
from lmi_config.options.declared import Settings
from lmi_config.options.parsers import AUTO
from lmi_config.plan import lmcache, vllm
from lmi_config.plan.attention.verdict import HYBRID, Verdict, whole
from lmi_config.plan.devices.parallelism import FEW_CPUS, Parallelism, decide
from lmi_config.plan.kv_tiers import NoTiers, Tiers, block_size, format_size, wanted
from lmi_config.plan.memory import (
    GIB,
    SHARED_MEMORY,
    Budget,
    GpuBudget,
    kv_of_request,
    kv_per_token,
    loaded,
    talking,
)


def findings(
    settings: Settings,
    machine: Machine,
    parallelism: Parallelism,
    model: ModelFacts,
    budget: Budget,
    gpu: GpuBudget | None,
    tiers: Tiers | NoTiers,
) -> Iterator[str]:
    """Yield notes for the operator."""
    yield from settings.notes
    if wrong := hindrance(machine):
        yield wrong
    yield from _gpus(settings, machine, parallelism, model)
    yield from _memory(machine, parallelism, budget)
    quantised = model.quantization or settings.quantize
    experts = loaded(settings, model)[1] if parallelism.copies > 1 else 0
    if gpu and gpu.left <= 0:
        yield (
            f"each GPU's share of the weights is {format_size(gpu.weights)} and vLLM may use "
            f"{format_size(gpu.usable)} of its memory; "
            f"{_enough(gpu, machine, parallelism, experts)}"
            f"{'' if quantised else ' or a quantised model'}"
        )
    cache = engine_cache(settings, machine, parallelism, model, budget, gpu)
    length = longest_request(settings, model)
    if cache and length and 0 < (fits := cache.fits(length)) < length:
        yield (
            f"the KV cache will hold about {fits:,} tokens, less than the longest request of "
            f"{length:,}; set OPTION_MAX_MODEL_LEN={fits // 1024 * 1024 or fits}"
        )
    count = talking(machine, parallelism, model)
    talk = count * SHARED_MEMORY
    if machine.shm < talk:
        yield (
            f"/dev/shm has {format_size(machine.shm)} and {count} ranks talk through it, which "
            f"takes up to {format_size(talk)}; give the container more (docker run --shm-size="
            f"{-(-talk // GIB)}g, or an emptyDir with medium Memory)"
        )
    if parallelism.workerless and len(machine.cpus) > FEW_CPUS:
        yield (
            f"/dev/shm has {format_size(machine.shm)}, too little for a worker process: the "
            "engine's core does its work (docker run --shm-size=2g gives more)"
        )
    length = settings.max_model_len
    if length and model.max_length and length > model.max_length:
        yield (
            f"max_model_len={length} is more than the model's {model.max_length}; vLLM will refuse "
            "it unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set"
        )
    yield from lmcache.misspelt(sorted(settings.lmcache))
    if settings.lmcache and not wanted(settings):
        names = ", ".join(sorted(settings.lmcache)[:3])
        yield f"{names}: KV cache tiers are off; set OPTION_LMCACHE_AUTO_CONFIG=true"
    if vllm.reuse(settings, machine, model):
        yield (
            "prefix caching is off: without a GPU, vLLM ends at a prompt with it where layers "
            "keep a state"
        )
    if settings.kv_events and settings.engine.get("enable_prefix_caching") is False:
        yield (
            "OPTION_KV_EVENTS=true, but there will be no events: prefix caching is off; leave "
            "OPTION_ENABLE_PREFIX_CACHING out"
        )
    if isinstance(tiers, Tiers):
        yield from tiers.notes
    elif wanted(settings):
        yield f"no KV cache tiers: {tiers.reason}"


def hindrance(machine: Machine) -> str | None:
    """Return why vLLM cannot start here with any options, a sentence with the fix, or None."""
    if not machine.gpus:
        if not machine.built_for_cuda:
            return None
        return (
            f"no GPU is visible: {machine.no_gpu}; this vLLM is built for CUDA: run it with "
            f"--gpus all (Kubernetes: a limit of nvidia.com/gpu) and driver {DRIVER} or newer"
        )
    gpu = machine.gpus[0]
    major = gpu.driver.partition(".")[0]
    old = gpu.cuda < CUDA if gpu.cuda else major.isdigit() and int(major) < DRIVER
    if not old:
        return None
    runs = f" (CUDA {gpu.cuda // 1000}.{gpu.cuda % 1000 // 10})" if gpu.cuda else ""
    return (
        f"driver {gpu.driver}{runs} is older than CUDA 13.0 wants ({DRIVER}); on SageMaker choose "
        "an InferenceAmiVersion of al2023 with gpu-4-1, elsewhere update the driver"
    )


def _enough(gpu: GpuBudget, machine: Machine, parallelism: Parallelism, experts: int) -> str:
    """Return the fix that leaves room for a KV cache beside the weights on such GPUs.

    experts: bytes that all copies share, so that each of more copies needs fewer.
    """
    room = gpu.usable - gpu.overhead
    if room <= 0:
        return "use larger GPUs"
    left = room - (gpu.weights - experts // parallelism.copies // parallelism.workers)
    if experts and left > 0:
        copies = -(-experts // (left * parallelism.workers))
        count = copies * parallelism.workers
        return f"use at least {count} such GPUs (OPTION_DATA_PARALLEL_SIZE={copies})"
    stage = gpu.weights * parallelism.tensor // room + 1
    degree = 1 << (stage - 1).bit_length()  # most models' heads are divisible by powers of two
    count = degree * parallelism.pipeline
    if count > len(machine.gpus):
        return f"use at least {count} such GPUs (OPTION_TENSOR_PARALLEL_DEGREE={degree})"
    copies = len(machine.gpus) // count
    fewer = f" with OPTION_DATA_PARALLEL_SIZE={copies}" if parallelism.local_copies > 1 else ""
    return f"use OPTION_TENSOR_PARALLEL_DEGREE={degree}{fewer}"


def downloads(to_fetch: int, room: int) -> Iterator[str]:
    """Yield a note if the remaining download does not fit the disk. Both are in bytes."""
    if to_fetch > room:
        yield (
            f"{format_size(to_fetch)} have yet to be downloaded, and {format_size(room)} are free "
            "where they go; set SERVING_DOWNLOAD_DIR (S3) or HF_HOME (hub) to a larger disk"
        )


_OTHERS_USE = ("data_parallel_rank", "data_parallel_external_lb", "device_ids")
"""vLLM's options that let other processes use the other GPUs."""


def _gpus(
    settings: Settings, machine: Machine, parallelism: Parallelism, model: ModelFacts
) -> Iterator[str]:
    if not machine.gpus:
        return
    total = len(machine.gpus) + len(machine.slices)
    idle = total - parallelism.all_workers
    if idle > 0 and not settings.engine.keys() & _OTHERS_USE:
        most = decide(dataclasses.replace(settings, tensor_parallel_degree="max"), machine, model)
        copies = total // parallelism.workers
        if parallelism.servers > 1 or settings.copies == 1:
            if parallelism.servers < copies:
                fix = f"OPTION_COPIES={copies} uses {copies * parallelism.workers}"
            else:
                fix = f"they are too few for another copy on {parallelism.workers}"
        elif most.tensor > parallelism.tensor:
            fix = "set OPTION_TENSOR_PARALLEL_DEGREE=max to use them"
        elif 1 < parallelism.local_copies < copies:
            fix = f"OPTION_DATA_PARALLEL_SIZE={copies} uses {copies * parallelism.workers}"
        elif parallelism.local_copies > 1:
            fix = f"they are too few for another copy on {parallelism.workers}"
        else:
            fix = (
                f"{parallelism.workers} are the most that attention heads, KV heads and the "
                "vocabulary can be divided among"
            )
        yield f"{idle} of {total} GPUs will be idle; {fix}"


def _memory(machine: Machine, parallelism: Parallelism, budget: Budget) -> Iterator[str]:
    if budget.needed > machine.memory_free:
        several = parallelism.servers > 1
        who = f"{parallelism.servers} copies want" if several else "the engine wants"
        fix = f", OPTION_COPIES={parallelism.servers - 1}" if several else ""
        yield (
            f"{who} about {format_size(budget.needed)} of memory, and "
            f"{format_size(machine.memory_free)} are free; give the container more{fix}, or a "
            "smaller model"
        )


def too_small(
    settings: Settings,
    machine: Machine,
    parallelism: Parallelism,
    model: ModelFacts,
    budget: Budget,
    gpu: GpuBudget | None,
) -> Iterator[str]:
    """Yield a sentence if the operator's size of the KV cache is too small for the longest request,
    which vLLM refuses (_check_enough_kv_cache_memory in vllm/v1/core/kv_cache_utils.py). It only
    checks models whose layers all keep all tokens, because only then the figures are exact.
    """
    cache = engine_cache(settings, machine, parallelism, model, budget, gpu)
    length = longest_request(settings, model)
    size, kv = settings.kv_cache_memory_bytes, model.kv
    if not size or settings.max_model_len == AUTO or settings.engine.keys() & _OTHER_SIZES:
        return
    if not cache or not length or not kv or kv.windowed or kv.latent:
        return
    block = block_size(settings, machine)
    fits = cache.fits(length + block) // block * block
    if fits < length:
        shorter = f"set OPTION_MAX_MODEL_LEN={fits}, or " if fits else ""
        least = -(-size * cache.need(-(-length // block) * block) // cache.size)
        yield (
            f"{settings.named('kv_cache_memory_bytes')}: {size} bytes hold {fits:,} tokens, and "
            f"the longest request has {length:,}; {shorter}make it {least} bytes"
        )


def priced(
    verdict: Verdict,
    settings: Settings,
    machine: Machine,
    parallelism: Parallelism,
    model: ModelFacts,
    budget: Budget,
    gpu: GpuBudget | None,
) -> Verdict:
    """Return the verdict with the cost of layers with a window that keep all tokens. It is against
    tiers if the longest request would no longer fit, because vLLM then does not start.
    """
    length, kv = longest_request(settings, model), model.kv
    if not kv or not length or settings.engine.get(HYBRID):
        return verdict
    kept = whole(settings)
    least, most = (
        kv_of_request(each, machine, parallelism, model, kv, length) for each in (settings, kept)
    )
    price = (
        f"a request of {length:,} tokens takes {format_size(most)} of the engine's KV cache, and "
        f"{format_size(least)} without KV cache tiers"
    )
    about = (machine, parallelism, model, budget, gpu)
    before, after = engine_cache(settings, *about), engine_cache(kept, *about)
    if settings.max_model_len != AUTO and before and after:
        block = block_size(settings, machine)  # vLLM reserves one block
        fits = max(after.fits(length + block) - block, 0)
        if before.fits(length) == length > fits:
            return dataclasses.replace(
                verdict,
                whole=False,
                against="for them, layers with a window would have to keep all tokens, and the "
                f"engine's KV cache would hold {fits:,} tokens of the longest request of "
                f"{length:,}; set OPTION_MAX_MODEL_LEN={fits // 1024 * 1024 or fits} to have them",
            )
    told = f"for KV cache tiers, layers with a window keep all tokens ({HYBRID}=true): {price}"
    return dataclasses.replace(verdict, tell=(*verdict.tell, told))


_OTHER_SIZES = {"decode_context_parallel_size", "kv_cache_dtype", "num_gpu_blocks_override"}
"""vLLM's options that change the number of tokens in its KV cache."""


def longest_request(settings: Settings, model: ModelFacts) -> int | None:
    """Return the tokens of the longest request, before vLLM reduces them to fit."""
    length = settings.max_model_len
    return model.max_length if length in (None, AUTO) else length


class EngineCache(NamedTuple):
    """The KV cache in the engine, all ranks of a copy together; on GPUs an estimate.

    size: bytes. need: the bytes for a request of this many tokens.
    """

    size: int
    need: Callable[[int], int]

    def fits(self, length: int) -> int:
        """Return the tokens, up to this length, of the longest request that fits."""
        return bisect_right(range(1, length + 1), self.size, key=self.need)

    def tokens(self, length: int) -> int:
        """Return the tokens that it holds in requests of this length, as in vLLM's log."""
        return self.size * length // self.need(length)


def engine_cache(
    settings: Settings,
    machine: Machine,
    parallelism: Parallelism,
    model: ModelFacts,
    budget: Budget,
    gpu: GpuBudget | None,
) -> EngineCache | None:
    """Return the engine's KV cache, or None if the model or the machine has too few facts."""
    size = gpu.kv if gpu else budget.kv
    if not model.kv or not kv_per_token(settings, model) or size is None:
        return None
    kv = model.kv
    if settings.kv_transfer_config and not wanted(settings):
        kv = kv.without_windows()  # connectors other than LMCache's may need whole sequences
    need = partial(kv_of_request, settings, machine, parallelism, model, kv)
    return EngineCache(max(size, 0) * parallelism.workers // kv.copies(parallelism.tensor), need)
