# SPDX-License-Identifier: Apache-2.0
"""The cases of the rehearsal: pairs of machines, models and options, and the result of `plan` for
each.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmi_config.facts import draft as drafts
from lmi_config.facts import model as models
from lmi_config.facts.gpus import Gpu
from lmi_config.facts.kv import KvShape
from lmi_config.facts.machine import Disk, Machine
from lmi_config.facts.model import Folder, ModelFacts
from lmi_config.options import settings as options
from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from lmi_config.plan import memory, plan, preflight, vllm
from lmi_config.plan.devices.parallelism import Parallelism
from serving.server.prepare import PARTS
from tools.rehearsal.shapes import MODELS

GIB = 1024**3
DRIVER = "580.65.06"
CUDA = 13000
ROUNDED = 0.005
"""Tolerated difference between `plan` and vLLM in the size of a KV cache, as a share: blocks are
not divided.
"""


@dataclasses.dataclass(frozen=True)
class Gpus:
    """GPUs of a machine. memory: MiB of each; slices: of the first, with MiB of each."""

    count: int
    name: str
    memory: int
    capability: str
    slices: int = 0
    of_a_slice: int = 0
    driver: str = DRIVER
    cuda: int = CUDA

    @property
    def variable(self) -> str:
        """SLIPWAY_REHEARSAL_GPUS, which the stand-in NVML reads."""
        parts = (self.count, self.name, self.memory, self.capability)
        return ",".join(map(str, (*parts, self.driver, self.cuda, self.slices, self.of_a_slice)))

    @property
    def machine(self) -> Machine:
        found = Gpu(
            name=f"a slice of {self.name}" if self.slices else self.name,
            memory=(self.of_a_slice or self.memory) << 20,
            driver=self.driver,
            cuda=self.cuda,
            capability=(int(self.capability[0]), int(self.capability[2])),
            slice=bool(self.slices),
        )
        return Machine(
            cpus=tuple(range(8 * self.count)),
            cpu_quota=None,
            memory=128 * GIB * self.count,
            memory_free=120 * GIB * self.count,
            limited=True,
            shm=8 * GIB,
            disk=Disk(path="/tmp/kv", kind="ext4", free=500 * GIB, total=900 * GIB, direct=True),
            gpus=(found,) * self.count,
            ports=tuple(range(21001, 21004 + self.count)),
        )


MACHINES: Mapping[str, Gpus] = {
    "1xL4": Gpus(1, "NVIDIA L4", 23034, "8.9"),
    "1xA10G": Gpus(1, "NVIDIA A10G", 23028, "8.6"),
    "4xA10G": Gpus(4, "NVIDIA A10G", 23028, "8.6"),
    "8xA100-40": Gpus(8, "NVIDIA A100-SXM4-40GB", 40960, "8.0"),
    "8xH100": Gpus(8, "NVIDIA H100 80GB HBM3", 81559, "9.0"),
    "MIG": Gpus(1, "NVIDIA H100 80GB HBM3", 81559, "9.0", 1, 40448),
}
FEATURES: Mapping[str, Mapping[str, str]] = {
    "plain": {},
    "tiers": {"OPTION_LMCACHE_AUTO_CONFIG": "true"},
    "lora": {"OPTION_ENABLE_LORA": "true", "OPTION_MAX_LORAS": "2"},
    "eagle3": {"OPTION_SPECULATIVE_DRAFT_MODEL": "{models}/{model}_draft"},
    "fp8_kv": {"OPTION_KV_CACHE_DTYPE": "fp8"},
    "two_nodes": {
        "OPTION_TENSOR_PARALLEL_DEGREE": "{gpus}",
        "OPTION_PIPELINE_PARALLEL_DEGREE": "2",
        "OPTION_NNODES": "2",
        "OPTION_NODE_RANK": "0",
        "OPTION_MASTER_ADDR": "127.0.0.1",
        "OPTION_DISTRIBUTED_EXECUTOR_BACKEND": "mp",
    },
}
_DEGREE = "OPTION_TENSOR_PARALLEL_DEGREE"
FURTHER: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("4xA10G", "nine_heads", {_DEGREE: "4"}),
    ("4xA10G", "nine_heads", {_DEGREE: "3"}),
    ("4xA10G", "awq", {_DEGREE: "2"}),
    ("8xA100-40", "awq", {_DEGREE: "7"}),
    ("8xA100-40", "awq", {_DEGREE: "7", "OPTION_QUANTIZE": "awq"}),
    ("8xA100-40", "gemma3", {_DEGREE: "4"}),
    ("8xA100-40", "gemma3", {_DEGREE: "8"}),
    ("8xH100", "qwen3_moe", {"OPTION_ENABLE_EXPERT_PARALLEL": "true"}),
    ("8xH100", "qwen3_moe", {"OPTION_DATA_PARALLEL_SIZE": "2"}),
    ("8xH100", "deepseek", {"OPTION_DATA_PARALLEL_SIZE": "8"}),
    ("8xH100", "deepseek", {_DEGREE: "16"}),
    ("8xH100", "llama_70b", {_DEGREE: "4", "OPTION_PIPELINE_PARALLEL_DEGREE": "2"}),
    ("8xH100", "llama_70b", {"OPTION_MAX_MODEL_LEN": "200000"}),
    ("8xH100", "gpt_oss", {"OPTION_KV_CACHE_DTYPE": "fp8_e5m2"}),
    ("8xH100", "gpt_oss", {"OPTION_LMCACHE_AUTO_CONFIG": "true"}),
    ("1xL4", "fp8", {"OPTION_KV_CACHE_DTYPE": "fp8_e5m2"}),
    ("1xL4", "fp8", {"OPTION_CPU_OFFLOAD_GB_PER_GPU": "4"}),
    ("1xL4", "fp8", {"OPTION_QUANTIZE": "awq"}),
    ("1xA10G", "mistral", {"OPTION_QUANTIZE": "fp8"}),
    ("1xA10G", "mistral", {"OPTION_DTYPE": "fp32"}),
    ("MIG", "mistral", {"OPTION_LMCACHE_AUTO_CONFIG": "true"}),
)


@dataclasses.dataclass(frozen=True)
class Case:
    machine: str
    model: str
    name: str
    options: Mapping[str, str]

    @property
    def gpus(self) -> Gpus:
        return MACHINES[self.machine]


def cases() -> Iterator[Case]:
    """Every model on every machine, the features taking turns, so that each model and each machine
    meets each feature; then what single options do.
    """
    features = list(FEATURES)
    for row, model in enumerate(MODELS):
        for column, machine in enumerate(MACHINES):
            feature = features[(row + column) % len(features)]
            yield Case(machine, model, f"{machine} {model} {feature}", FEATURES[feature])
    for machine, model, given in FURTHER:
        words = " ".join(f"{name.removeprefix('OPTION_')}={it}" for name, it in given.items())
        yield Case(machine, model, f"{machine} {model} {words}", given)


def planned(case: Case, folder: Path) -> dict[str, Any]:
    """The result of `plan` for a case with its models in the folder.

    It has `judge`, vLLM's arguments, with the variables of its environment, and figures to compare.
    If the plan refuses the case, it has `refused`, the reason, and the arguments that vLLM would
    have got.
    """
    names = {"gpus": case.gpus.count, "model": case.model, "models": folder}
    environ = {
        "OPTION_MODEL_ID": str(folder / case.model),
        "OPTION_LOAD_FORMAT": "dummy",
        **{name: text.format(**names) for name, text in case.options.items()},
    }
    here = case.gpus.machine
    facts = models.look(Folder(folder / case.model), weights=False)
    drafted = None
    if "OPTION_SPECULATIVE_DRAFT_MODEL" in environ:
        drafted = drafts.look(Folder(Path(environ["OPTION_SPECULATIVE_DRAFT_MODEL"])))
    settings = options.read(environ)
    try:
        made = plan.make(settings, here, facts, drafted, environ, PARTS)
    except SettingsError as error:
        arguments = vllm.arguments(_unchecked(settings, here, drafted))
        refused = {"refused": list(error.faults), "environment": {}}
        return {**refused, "judge": {"arguments": arguments}}
    spread = made.parallelism
    length = preflight.longest_request(settings, facts)
    cache = preflight.engine_cache(settings, here, spread, facts, made.memory, made.gpu)
    arguments = vllm.arguments(made.engine(settings.model_id, environ.get(_DRAFT)))
    return {
        "judge": {"arguments": arguments, "memory": made.gpu.kv if made.gpu else None},
        "tokens": cache.tokens(length) if cache and length else None,
        "environment": dict(made.environment),
        "tensor": spread.tensor,
        "length": settings.max_model_len or facts.max_length,
        "batched_tokens": memory.tokens_of_a_step(settings, here, spread),
        "kv": _kept(settings, facts, spread),
        "findings": list(made.findings),
    }


_DRAFT = "OPTION_SPECULATIVE_DRAFT_MODEL"


def _kept(settings: Settings, facts: ModelFacts, spread: Parallelism) -> dict[str, int] | None:
    """Bytes of one token's KV in one rank of a stage that has all layers."""
    if not facts.kv:
        return None
    whole = memory.kv_per_token(settings, facts) or 0
    full = dataclasses.replace(facts, kv=KvShape(heads=facts.kv.heads, full=facts.kv.full))
    part = memory.kv_per_token(settings, full) or 0
    copies = facts.kv.copies(spread.tensor)
    sizes = {"full": part, "windowed": whole - part}
    return {name: size * copies // spread.tensor for name, size in sizes.items()}


def _unchecked(settings: Settings, here: Machine, drafted: drafts.Draft | None) -> dict[str, Any]:
    """vLLM's options as they would be if nothing had been refused."""
    degree = settings.tensor_parallel_degree
    spread = Parallelism(tensor=len(here.gpus) if degree == "max" else degree)
    derived: dict[str, Any] = {}
    if drafted:
        derived["speculative_config"] = {
            "method": drafted.method,
            "model": settings.speculative_draft_model,
            "num_speculative_tokens": drafted.tokens or 3,
        }
    return vllm.options(settings, here, spread, derived)


def disagreements(plan: Mapping[str, Any], vllm: Mapping[str, Any]) -> Iterator[str]:
    """Differences between vLLM's result for a case and the plan's."""
    if plan.get("refused") or vllm.get("refused"):
        warned = any("vLLM will refuse" in it for it in plan.get("findings", ()))
        if not plan.get("refused") and not warned:
            yield f"plan accepts what vLLM refuses: {vllm['refused']}"
        if not vllm.get("refused"):
            yield f"vLLM would have run what plan refuses: {plan['refused']}"
        return
    for name in ("tensor", "length", "batched_tokens", "kv"):
        if name in vllm and plan[name] != vllm[name]:
            yield f"{name}: plan {plan[name]}, vLLM {vllm[name]}"
    said, counted = plan.get("tokens"), vllm.get("tokens")
    if said and counted and abs(said - counted) > ROUNDED * counted:
        yield f"tokens: plan {said}, vLLM {counted}"
