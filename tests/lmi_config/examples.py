# SPDX-License-Identifier: Apache-2.0
"""Machines and models that several tests use."""

from typing import Any

from lmi_config.facts.gpus import Gpu
from lmi_config.facts.kv import KvShape
from lmi_config.facts.layers import KvLayers
from lmi_config.facts.machine import Disk, Machine
from lmi_config.facts.model import Checks, ModelFacts
from lmi_config.plan.plan import EngineParts

GIB = 1024**3
DISK = Disk(path="/tmp/lmcache", kind="ext4", free=500 * GIB, total=1000 * GIB, direct=True)
PARTS = EngineParts(
    connector="our.parts.Connector",
    transferring="our.nixl.NixlConnector",
    disk_store="our.Files",
)
H100 = Gpu(name="NVIDIA H100", memory=80 * GIB, driver="580.65.06")


def machine(gpus: int = 0, **more: Any) -> Machine:
    """A machine with 24 GiB, nearly all free, and 4 CPUs; with GPUs 256 GiB and 16 CPUs."""
    memory = more.pop("memory", (256 if gpus else 24) * GIB)
    found = {
        "cpus": tuple(range(16)) if gpus else (0, 1, 4, 5),
        "cpu_quota": None,
        "memory": memory,
        "memory_free": memory,
        "limited": True,
        "shm": 8 * GIB,
        "disk": DISK,
        "gpus": (H100,) * gpus,
        "ports": tuple(range(5001, 5004 + max(gpus, 4))),
    }
    return Machine(**{**found, **more})


def model(gib: float = 16, **more: Any) -> ModelFacts:
    """A model like Llama-3.1-8B: 128 KiB of KV for each token in bfloat16."""
    found = {
        "architectures": ("LlamaForCausalLM",),
        "model_type": "llama",
        "weight_bytes": round(gib * GIB),
        "largest_file": round(gib * GIB / 4),
        "dtype": "bfloat16",
        "quantization": None,
        "max_length": 131072,
        "vocabulary": 128256,
        "hidden_size": 4096,
        "layers": 32,
        "kv": KvShape(heads=8, full=2 * 8 * 128 * 32),
        "kept": KvLayers(full=32, shapes=frozenset({(8, 128)})),
    }
    return ModelFacts(**{**found, **more})


GGUF = ModelFacts(
    architectures=(),
    model_type=None,
    weight_bytes=4,
    largest_file=4,
    dtype=None,
    quantization=None,
    max_length=None,
    vocabulary=None,
    hidden_size=None,
    layers=None,
    kv=None,
    checks=Checks(quantised=frozenset()),
)
"""A model that shows only its size."""
