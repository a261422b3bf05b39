# SPDX-License-Identifier: Apache-2.0
"""By which names vLLM knows a model's modules, as far as adapters are concerned.

Checkpoints, PEFT and vLLM name the same module differently: transformers has called a language
model's layers `model.language_model.layers` since 4.52, published files call them `model.layers` or
`language_model.model.layers`. vLLM renames both, by rules of each architecture. An adapter whose
renamed modules are not the model's would be loaded and change nothing.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

_Renames = tuple[tuple[str, str], ...]


class Experts(StrEnum):
    """How vLLM takes adapters of experts: as one tensor for all of a layer (PEFT's
    target_parameters), as tensors of each, or both ways.
    """

    FUSED = "fused"
    SEPARATE = "separate"
    EITHER = "either"


@dataclasses.dataclass(frozen=True)
class Names:
    """An architecture's rules, in vLLM's order (WeightsMapper in model_executor/models/utils.py).

    told: whether they are known; where they are not, only the engine can say what a name means.
    pooling: the model does not generate; vLLM then finds modules without a leading `model.`, too.
    """

    regex: _Renames = ()
    substr: _Renames = ()
    prefix: _Renames = ()
    suffix: _Renames = ()
    told: bool = True
    pooling: bool = False
    experts: Experts = Experts.EITHER

    def of(self, tensor: str) -> str:
        """vLLM's name for a tensor of the model or an adapter."""
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
        """A model's tensors by vLLM's names."""
        return {self.of(name): tensor for name, tensor in tensors.items()}


LITERAL = Names()
"""Nothing is renamed."""


@cache
def _vllms() -> Mapping[str, Any]:
    """What scripts/generate/vllm_adapters.py writes, and which architectures there are."""
    folder = Path(__file__).parent
    models = json.loads((folder / "vllm_models.json").read_text())
    adapters = json.loads((folder / "vllm_adapters.json").read_text())
    return adapters | {"known": frozenset(models["known"])}


_SUFFIXES = (
    *("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding"),
    *("EmbeddingModel", "ForSequenceClassification", "ForTokenClassification"),
    *("ForAudioClassification", "ForImageClassification", "ForVideoClassification"),
    *("ClassificationModel", "ForRewardModeling", "RewardModel", "Model"),
)
"""By which vLLM finds the model that it makes another one of (vllm/config/model.py)."""


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
    renames = {
        kind: tuple(it.items()) for kind, it in found["renames"].get(architecture, {}).items()
    }
    return dataclasses.replace(rules, **renames)
