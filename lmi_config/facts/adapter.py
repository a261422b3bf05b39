# SPDX-License-Identifier: Apache-2.0
"""What a LoRA adapter's files tell of it, and why it cannot work with a model.

Only the configuration and the header of the weights are read, so this takes milliseconds however
large the adapter is. What vLLM 0.32 refuses (vllm/lora/peft_helper.py, lora_model.py) is refused
here, before its engine sees it: there a fault costs the request that comes first, or the engine.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lmi_config.facts.model import Checkpoint, ModelError, Tensor, header, json_object

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
LONGEST_CONFIG = 4 * 1024 * 1024  # bytes; it may name each expert of a large model
NESTED_CONFIG = 10_000  # lists and objects in it; PEFT writes a few dozen
LONGEST_HEADER = 32 * 1024 * 1024  # bytes; 90,000 tensors, of all experts in 58 layers, take 15 MB
_BESIDE = 1024 * 1024
"""Bytes of a header that are for no tensor: what a program for training notes of itself."""
_LONGEST_ENTRY = 512
"""Bytes of what a header says of a tensor, besides the name that it has in the base model."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_UNSUPPORTED = (
    *("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication"),
    *("use_bdlora", "use_qalora"),
)
# What only sets the first values of the weights; others change the model's own at PEFT's loading.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica", "lora_ga")
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """rank: the largest of its modules. modules: by their names in the base model, shapes of A,
    (rank, in), and B, (out, rank).
    """

    rank: int
    modules: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def look(checkpoint: Checkpoint, base: Mapping[str, Tensor] | None = None) -> Adapter:
    """Read an adapter as PEFT saves it. Raises ModelError, which names the file and the fault.

    base: the model's tensors by name, where they are known: each can have two in an adapter, and a
    header that is longer than so many need is not read.
    """
    if WEIGHTS not in checkpoint.sizes:
        pickled = sorted(name for name in checkpoint.sizes if name.endswith(PICKLES))
        raise ModelError(
            f"{pickled[0]}: a pickle can run code; save the adapter as safetensors"
            if pickled
            else f"{checkpoint.where} has no {WEIGHTS}; save the adapter with PEFT"
        )
    if CONFIG not in checkpoint.sizes:
        raise ModelError(f"{checkpoint.where} has no {CONFIG}; save the adapter with PEFT")
    config = json_object(checkpoint, CONFIG, LONGEST_CONFIG, NESTED_CONFIG)
    for fault in _config_faults(config):
        raise ModelError(f"{CONFIG}: {fault}")
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    longest, most = LONGEST_HEADER, None
    if base:
        needed = _BESIDE + 2 * sum(_LONGEST_ENTRY + len(name) for name in base)
        longest, most = min(LONGEST_HEADER, needed), 2 * len(base)
    tensors = header(checkpoint, WEIGHTS, checkpoint.sizes[WEIGHTS], longest, most)
    for name, tensor in tensors.items():
        module, part = _part(name, tensor)
        parts.setdefault(module, {})[part] = tensor.shape
    if not parts:
        raise ModelError(f"{WEIGHTS} has no tensors")
    modules = {module: _pair(module, shapes) for module, shapes in parts.items()}
    return Adapter(max(a[0] for a, _ in modules.values()), modules)


def _config_faults(config: Mapping[str, Any]) -> Iterator[str]:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        yield f"peft_type is {kind!r:.100}; only LORA is supported"
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        yield f"r should be a whole number, at least 1, not {rank!r:.100}"
    if not isinstance(config.get("lora_alpha"), int | float):
        yield f"lora_alpha should be a number, not {config.get('lora_alpha')!r:.100}"
    if not isinstance(config.get("target_modules"), list | str):
        yield f"target_modules should name modules, not be {config.get('target_modules')!r:.100}"
    if config.get("bias", "none") != "none":
        yield f"bias is {config['bias']!r:.100}; vLLM supports none: train with bias='none'"
    if config.get("modules_to_save"):
        saved = config["modules_to_save"]
        yield f"modules_to_save is {saved!r:.100}; vLLM supports none: train without"
    for name in _UNSUPPORTED:
        if config.get(name):
            yield f"{name} is {config[name]!r:.100}; vLLM does not support it: train without"
    init = config.get("init_lora_weights")
    if (init.lower() if isinstance(init, str) else init) not in _INITS:
        yield f"init_lora_weights is {init!r:.100}, which changes the base model: convert it"


def _part(name: str, tensor: Tensor) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    if not match:
        raise ModelError(f"{WEIGHTS}: {name} is not a LoRA weight")
    if tensor.dtype not in ("F32", "F16", "BF16"):
        raise ModelError(
            f"{WEIGHTS}: {name} is of type {tensor.dtype}; save it as F32, F16 or BF16"
        )
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ModelError(
            f"{WEIGHTS}: {name} has the shape {tensor.shape}; it should have two sides"
        )
    return match["module"], match["part"]


def _pair(
    module: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if len(shapes) < 2:
        (missing,) = {"A", "B"} - shapes.keys()
        raise ModelError(f"{WEIGHTS}: {module} has no lora_{missing}")
    a, b = shapes["A"], shapes["B"]
    if a[0] != b[1]:
        raise ModelError(f"{WEIGHTS}: {module} has a rank of {a[0]} in lora_A and {b[1]} in lora_B")
    return a, b


def faults(adapter: Adapter, base: Mapping[str, Tensor], max_rank: int) -> list[str]:
    """Why the adapter cannot work with this model.

    base: the model's tensors by name; a module whose weight is not among them under its usual name
    (in a quantised model) is not checked.
    """
    found = []
    if adapter.rank > max_rank:
        found.append(
            f"its rank is {adapter.rank} and OPTION_MAX_LORA_RANK={max_rank}; raise the option"
        )
    usual = all(f"{module}.weight" in base for module in adapter.modules)
    prefixes = adapter.modules.keys() if usual else {name.rpartition(".")[0] for name in base}
    for module, (a, b) in sorted(adapter.modules.items()):
        if base and module not in prefixes:
            found.append(f"it changes {module}, which the model does not have: of another model?")
            break
        weight = base.get(f"{module}.weight")
        if not weight or len(weight.shape) != 2:
            continue
        if (b[0], a[1]) not in (weight.shape, weight.shape[::-1]):
            found.append(
                f"its {module} is made for {b[0]} x {a[1]} and the model's is "
                f"{' x '.join(map(str, weight.shape))}: of another model?"
            )
            break
    return found
