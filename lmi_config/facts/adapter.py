# SPDX-License-Identifier: Apache-2.0
"""Facts from a LoRA adapter's files, and the reasons why it cannot work with a model.

Only the configuration and the weights' header are read, so this takes milliseconds for an adapter
of any size. It refuses the adapters that vLLM 0.32 refuses (vllm/lora/peft_helper.py,
lora_model.py). In the engine such a fault would fail the first request, or crash the engine.

Checkpoints, PEFT and vLLM name the same module differently: transformers has called a language
model's layers `model.language_model.layers` since 4.52, published files call them `model.layers` or
`language_model.model.layers`. vLLM renames both, by rules of each architecture. An adapter whose
renamed modules are not the model's would be loaded and change nothing.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from lmi_config.facts.layers import vllm_models
from lmi_config.facts.model import Checkpoint, ModelError, Tensor, header, json_object

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
LONGEST_CONFIG = 4 * 1024 * 1024  # bytes; it may name each expert of a large model
NESTED_CONFIG = 10_000  # lists and objects in it; PEFT writes a few dozen
LONGEST_HEADER = 32 * 1024 * 1024  # bytes; 90,000 tensors, of all experts in 58 layers, take 15 MB
_BESIDE = 1024 * 1024
"""Most bytes of a header beside its tensors: a training program's own metadata."""
_LONGEST_ENTRY = 512
"""Most bytes of a tensor's entry in a header, without its name in the base model."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_UNSUPPORTED = (
    *("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication"),
    *("use_bdlora", "use_qalora"),
)
# Methods that only initialise the adapter's weights. Other methods change the model's own weights
# when PEFT loads the adapter.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica", "lora_ga")
_PREFIX = "base_model.model."
"""PEFT's prefix of module names, which some training programs leave out."""
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<part>[AB])")
_COPY = re.compile(r"(.+\.)?(embed_tokens|lm_head)\.base_layer\.weight")
"""The model's own weights, which PEFT saves with the adapter's. vLLM does not read them."""
_HEADS = ("classifier", "score")
"""Modules that an adapter may replace as a whole: the last layer of a classification model."""
_HEAD = re.compile(rf"(.+\.)?(?P<module>{'|'.join(_HEADS)})\.(?P<part>weight|bias)")
_FUSED = ".experts.base_layer"
"""The suffix of PEFT's module names for gate_up_proj in one tensor for all experts of a layer. The
suffix for down_proj is `.experts`."""

_FLOATS = ("F32", "F16", "BF16")

Shapes = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter's facts.

    rank: the largest rank of its modules. modules: name in PEFT's model → shapes of A, (rank, in),
    and B, (out, rank). For all experts of a layer in one tensor, rank is the sum of their ranks.
    copies: copies of the model's own weights, by names of tensors. heads: modules that it replaces
    as a whole, with the shape of the weight, (labels, in).
    """

    rank: int
    modules: Mapping[str, Shapes]
    copies: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    heads: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def fused(self) -> frozenset[str]:
        """Modules with one tensor for all experts of a layer."""
        down = {it.removesuffix(".base_layer") for it in self.modules if it.endswith(_FUSED)}
        down |= {it for it in self.modules if it.endswith(".experts")}
        return frozenset(self.modules.keys() & (down | {f"{it}.base_layer" for it in down}))


_T = TypeVar("_T")

_Renames = tuple[tuple[str, str], ...]


class Experts(StrEnum):
    """The form of experts' adapters that vLLM accepts: one tensor for all experts of a layer
    (PEFT's target_parameters), tensors for each expert, or both.
    """

    FUSED = "fused"
    SEPARATE = "separate"
    EITHER = "either"


@dataclasses.dataclass(frozen=True)
class Names:
    """An architecture's rules, in vLLM's order (WeightsMapper in model_executor/models/utils.py).

    told: whether the names are known; otherwise only the engine can interpret them.
    pooling: the model does not generate; vLLM then also finds modules without a leading `model.`.
    """

    regex: _Renames = ()
    substr: _Renames = ()
    prefix: _Renames = ()
    suffix: _Renames = ()
    told: bool = True
    pooling: bool = False
    experts: Experts = Experts.EITHER

    def of(self, tensor: str) -> str:
        """Return vLLM's name for a tensor of the model or an adapter."""
        for old, new in self.regex:
            tensor = re.sub(old, new, tensor)
        for old, new in self.substr:
            tensor = tensor.replace(old, new, 1)
        for old, new in self.prefix:
            if tensor.startswith(old):
                tensor = new + tensor[len(old) :]
        for old, new in self.suffix:
            if tensor.endswith(old):
                tensor = tensor[: -len(old)] + new
        return tensor.removeprefix("model.") if self.pooling else tensor

    def renamed(self, tensors: Mapping[str, _T]) -> dict[str, _T]:
        """Return a model's tensors by vLLM's names."""
        return {self.of(name): tensor for name, tensor in tensors.items()}


LITERAL = Names()
"""The rules that rename no tensor."""


@cache
def _vllms() -> Mapping[str, Any]:
    """Return the data that tools/generate/vllm_adapters.py writes, with vLLM's architectures."""
    adapters = json.loads(Path(__file__).with_name("vllm_adapters.json").read_text())
    return {**adapters, "known": vllm_models()["known"]}


_SUFFIXES = (
    *("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding"),
    *("EmbeddingModel", "ForSequenceClassification", "ForTokenClassification"),
    *("ForAudioClassification", "ForImageClassification", "ForVideoClassification"),
    *("ClassificationModel", "ForRewardModeling", "RewardModel", "Model"),
)
"""Suffixes of architectures that vLLM derives from another model (vllm/config/model.py)."""


def _served_by(architectures: Iterable[str]) -> str | None:
    known = _vllms()["known"]
    for architecture in architectures:
        if architecture in known:
            return architecture
        suffix = next((it for it in _SUFFIXES if architecture.endswith(it)), None)
        for other in _SUFFIXES if suffix else ():
            assert suffix
            if (base := architecture.replace(suffix, other)) in known:
                return base
    return None


def names(architectures: Iterable[str], engine: Mapping[str, Any], pooling: bool) -> Names:
    """The rules for a model. engine: vLLM's options, by its names."""
    architecture = _served_by(architectures)
    found = _vllms()
    if engine.get("enable_mixed_moe_lora_format"):
        experts = Experts.EITHER
    else:
        experts = Experts.FUSED if architecture in found["fused_experts"] else Experts.SEPARATE
    rules = Names(pooling=pooling, experts=experts)
    if (
        architecture is None
        or architecture in found["untold"]
        or engine.get("model_impl", "auto") not in ("auto", "vllm")
        or engine.get("model_class_overrides")
    ):
        return dataclasses.replace(rules, told=False, experts=Experts.EITHER)
    renames: Mapping[str, Mapping[str, str]] = found["renames"].get(architecture, {})
    regex, substr, prefix, suffix = (
        tuple(renames.get(kind, {}).items()) for kind in ("regex", "substr", "prefix", "suffix")
    )
    return dataclasses.replace(rules, regex=regex, substr=substr, prefix=prefix, suffix=suffix)


def look(checkpoint: Checkpoint, base: Mapping[str, Tensor] | None = None) -> Adapter:
    """Read an adapter in PEFT's format. Raises ModelError, which names the file and the fault.

    base: the model's tensors by name, if known. Each can have two tensors in an adapter. A header
    that is longer than these need is not read.
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
        many = {name: _tensors_of(name, tensor) for name, tensor in base.items()}
        needed = _BESIDE + sum(it * (_LONGEST_ENTRY + len(name)) for name, it in many.items())
        longest, most = min(LONGEST_HEADER, needed), sum(many.values())
    tensors = header(checkpoint, WEIGHTS, checkpoint.sizes[WEIGHTS], longest, most)
    copies: dict[str, tuple[int, ...]] = {}
    heads: dict[str, dict[str, tuple[int, ...]]] = {}
    saved = config.get("modules_to_save") or ()
    for full, tensor in tensors.items():
        name = full.removeprefix(_PREFIX)
        head = _HEAD.fullmatch(name)
        if _COPY.fullmatch(name):
            copies[name.replace(".base_layer", "")] = tensor.shape
        elif head and head["module"] in saved:
            heads.setdefault(head["module"], {})[head["part"]] = tensor.shape
        else:
            module, part = _part(name, full, tensor)
            parts.setdefault(module, {})[part] = tensor.shape
    if not parts:
        raise ModelError(f"{WEIGHTS} has no tensors of LoRA")
    modules = {module: _pair(module, shapes) for module, shapes in parts.items()}
    found = Adapter(0, modules, copies, _whole(heads, saved))
    told = (config["r"], *(config.get("rank_pattern") or {}).values())
    ranks = (a[0] for module, (a, _) in modules.items() if module not in found.fused)
    return dataclasses.replace(found, rank=max([*told, *ranks]))


def _tensors_of(name: str, tensor: Tensor) -> int:
    """The number of tensors that an adapter can have for one of the model's; more if that contains
    all experts.
    """
    return 6 * tensor.shape[0] if ".experts." in name and len(tensor.shape) > 2 else 2


def _whole(
    heads: Mapping[str, Mapping[str, tuple[int, ...]]], saved: Any
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the heads' weights. Raises ModelError if vLLM refuses the adapter."""
    if saved and not heads:
        raise ModelError(f"{WEIGHTS} has no weight of modules_to_save={saved!r}")
    if len(heads) > 1:
        raise ModelError(
            f"{WEIGHTS} has {' and '.join(sorted(heads))}; vLLM accepts only one of them"
        )
    for name, parts in heads.items():
        weight, bias = parts.get("weight", ()), parts.get("bias")
        if len(weight) != 2 or 0 in weight or bias not in (None, weight[:1]):
            raise ModelError(
                f"{WEIGHTS}: {name} should have a weight of two sides, and a bias as long as its "
                f"first one or none, not shapes {weight} and {bias}"
            )
    return {name: parts["weight"] for name, parts in heads.items()}


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
    saved = config.get("modules_to_save")
    if saved is not None and (not isinstance(saved, list) or any(it not in _HEADS for it in saved)):
        yield (
            f"modules_to_save is {saved!r:.100}; vLLM supports {' and '.join(_HEADS)}, of models "
            "that classify; save the adapter without others, or merge it into the model"
        )
    ranks = config.get("rank_pattern")
    if ranks is not None and not (
        isinstance(ranks, dict) and all(type(it) is int and it > 0 for it in ranks.values())
    ):
        yield (
            f"rank_pattern is {ranks!r:.100}, and should have a whole number, at least 1, for each "
            "name"
        )
    for name in _UNSUPPORTED:
        if config.get(name):
            yield f"{name} is {config[name]!r:.100}; vLLM does not support it: train without it"
    init = config.get("init_lora_weights")
    if (init.lower() if isinstance(init, str) else init) not in _INITS:
        yield f"init_lora_weights is {init!r:.100}, which changes the base model: convert it"


def _part(module: str, name: str, tensor: Tensor) -> tuple[str, str]:
    match = _LORA.fullmatch(module) or _EMBEDDING.fullmatch(module)
    if not match:
        raise ModelError(f"{WEIGHTS}: {name} is not a LoRA weight")
    if tensor.dtype not in _FLOATS:
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


def faults(
    adapter: Adapter, base: Mapping[str, Tensor], max_rank: int, names: Names = LITERAL
) -> list[str]:
    """Return the reasons why the adapter cannot work with this model.

    base: the model's tensors, renamed by `names`. The shape of a module is not checked if its
    weight has no usual name among them, as in a quantised model.
    """
    found = []
    if adapter.rank > max_rank:
        found.append(
            f"its rank is {adapter.rank} and OPTION_MAX_LORA_RANK={max_rank}; raise the option"
        )
    modules = {_module(it, names): it for it in adapter.modules}
    if len(modules) < len(adapter.modules):
        twice = min(adapter.modules.keys() - {*modules.values()})
        return [*found, f"it also has {twice} under another name"]
    usual = all(f"{module}.weight" in base for module in modules)
    prefixes = modules.keys() if usual or not base else _prefixes(base)
    for module, name in sorted(modules.items()):
        fault = _experts_fault(adapter, name, names)
        here = module.removesuffix(".base_layer") in prefixes or _tied(module, base)
        if not fault and names.told and not here:
            fault = f"it changes {name}, which the model does not have: of another model?"
        check = _fused_fault if name in adapter.fused else _shape_fault
        fault = fault or check(module, name, adapter.modules[name], base, max_rank)
        if fault:
            return [*found, fault]
    heads = {f"{name}.weight": shape for name, shape in adapter.heads.items()}
    whole = {**adapter.copies, **heads}
    for name, shape in sorted(whole.items()):
        weight = base.get(names.of(name))
        same = slice(1 if name in heads else 0, None)
        if weight and weight.shape[same] != shape[same]:
            found.append(
                f"its {name} has the shape {_sides(shape)} and the model's has "
                f"{_sides(weight.shape)}: of another model?"
            )
    return found


def _module(name: str, names: Names) -> str:
    """Return vLLM's name of a module, by the name of its tensor."""
    end = ".lora_A.weight"
    return names.of(f"{name}{end}").removesuffix(end)


def _prefixes(base: Mapping[str, Tensor]) -> set[str]:
    """The modules of a model, by the names of its tensors."""
    found = {name.rpartition(".")[0] for name in base}
    experts = {name.partition(".experts.")[0] for name in base if ".experts." in name}
    return found | {f"{name}.experts" for name in experts}


def _tied(module: str, base: Mapping[str, Tensor]) -> Tensor | None:
    """The embeddings, if they are also the model's lm_head."""
    if module.rpartition(".")[2] != "lm_head" or f"{module}.weight" in base:
        return None
    found = [it for name, it in base.items() if name.endswith("embed_tokens.weight")]
    return found[0] if len(found) == 1 else None


def _experts_fault(adapter: Adapter, name: str, names: Names) -> str | None:
    """Return why vLLM refuses the form of an experts' adapter, or None."""
    if name in adapter.fused:
        other = name.removesuffix(".base_layer") if name.endswith(_FUSED) else f"{name}.base_layer"
        if other not in adapter.modules:
            return (
                f"it changes {name} and not {other}; vLLM needs both gate_up_proj and down_proj "
                "of experts among the target_parameters"
            )
        form, unlike = "one tensor for all experts", Experts.SEPARATE
    elif ".experts." in name:
        form, unlike = "a tensor for each expert", Experts.FUSED
    else:
        return None
    if names.experts is not unlike:
        return None
    return (
        f"its {name} is of {form}, which vLLM takes for this model with "
        "OPTION_ENABLE_MIXED_MOE_LORA_FORMAT=true"
    )


def _shape_fault(
    module: str, name: str, shapes: Shapes, base: Mapping[str, Tensor], _max_rank: int
) -> str | None:
    a, b = shapes
    weight = base.get(f"{module}.weight") or _tied(module, base)
    if not weight or len(weight.shape) != 2:
        return None
    if (b[0], a[1]) in (weight.shape, weight.shape[::-1]):
        return None
    return (
        f"its {name} is made for {b[0]} x {a[1]} and the model's is {_sides(weight.shape)}: "
        "of another model?"
    )


def _fused_fault(
    module: str, name: str, shapes: Shapes, base: Mapping[str, Tensor], max_rank: int
) -> str | None:
    start = f"{module.removesuffix('.base_layer')}."
    of_experts = [(it[len(start) :], tensor) for it, tensor in base.items() if it.startswith(start)]
    stacked = [tensor for _, tensor in of_experts if len(tensor.shape) > 2]
    single = {it.partition(".")[0] for it, _ in of_experts} if not stacked else set()
    experts = stacked[0].shape[0] if stacked else sum(it.isdigit() for it in single)
    a, b = shapes
    if not experts:
        return None
    if a[0] % experts:
        return f"its {name} has {a[0]} rows, not a rank for each of {experts} experts"
    if a[0] // experts > max_rank:
        return (
            f"the rank of its {name} is {a[0] // experts} and OPTION_MAX_LORA_RANK={max_rank}; "
            "raise the option"
        )
    plain = [it.shape[1:] for it in stacked if len(it.shape) == 3 and it.dtype in _FLOATS]
    if plain and not any((b[0], a[1]) in (it, it[::-1]) for it in plain):
        return (
            f"its {name} is made for {b[0]} x {a[1]} and the model's are "
            f"{' and '.join(map(_sides, plain))}: of another model?"
        )
    return None


def _sides(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
