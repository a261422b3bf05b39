# SPDX-License-Identifier: Apache-2.0
"""An adapter that vLLM would load and not apply is refused."""

from functools import wraps
from typing import TYPE_CHECKING, Any

from serving.patching.patch import ENGINE, Name, Patch, replace

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest


def _put() -> None:
    from vllm.lora.worker_manager import WorkerLoRAManager

    replace(WorkerLoRAManager, "_load_adapter", checking)


def checking(loading: Any) -> Any:
    """Wraps vLLM's function that loads an adapter. The wrapper raises ValueError for an adapter if
    vLLM would ignore a part of it.
    """
    from vllm.distributed import get_pp_group

    @wraps(loading)
    def load_adapter(self: Any, lora_request: "LoRARequest") -> "LoRAModel":
        adapter: LoRAModel = loading(self, lora_request)
        manager = self._adapter_manager
        whole = self.lora_config.target_modules is None and get_pp_group().world_size == 1
        if whole and (unused := _unused(manager, adapter)):
            raise ValueError(
                f"it changes {unused[0]}{f' and {len(unused) - 1} more' if unused[1:] else ''}, "
                f"which vLLM does not apply to this model{_fix(manager)}"
            )
        return adapter

    return load_adapter


def _unused(manager: "LoRAModelManager", adapter: "LoRAModel") -> list[str]:
    """The modules of an adapter that no module of the model looks up, by vLLM's names."""
    looked_up = {*manager.modules, *(f"{name}.base_layer" for name in manager.modules)}
    for parts in manager.packed_modules.values():
        looked_up.update(parts)
    if manager.is_pooling_model:
        looked_up |= {name.removeprefix("model.") for name in looked_up}
    return sorted(adapter.loras.keys() - looked_up)


def _fix(manager: "LoRAModelManager") -> str:
    if not manager.supports_mm or manager.supports_tower_connector_lora:
        return ": is it of another model?"
    if not manager.lora_config.enable_tower_connector_lora and getattr(
        manager.model, "supports_tower_connector_lora", False
    ):
        return "; set OPTION_ENABLE_TOWER_CONNECTOR_LORA=true if it is of what the model sees with"
    return (
        "; vLLM applies adapters to its language model only: train it without the other modules, "
        "or merge it into the model"
    )


PATCH = Patch(
    name="unapplied_adapters",
    process=ENGINE,
    names=(
        Name("vllm.lora.worker_manager:WorkerLoRAManager._load_adapter", "self, lora_request"),
        Name("vllm.lora.worker_manager:WorkerLoRAManager", has=("_adapter_manager", "lora_config")),
        Name(
            "vllm.lora.model_manager:LoRAModelManager",
            has=(
                *("modules", "packed_modules", "is_pooling_model", "supports_mm"),
                *("supports_tower_connector_lora", "lora_config", "model"),
            ),
        ),
        Name("vllm.lora.lora_model:LoRAModel", has=("loras",)),
    ),
    does="Compares the modules of a loaded adapter with the model's modules, and fails the load "
    "if the model lacks one. It compares nothing with pipeline parallelism, because a worker has "
    "only a part of the model, or with OPTION_LORA_TARGET_MODULES, because the operator excludes "
    "modules.",
    why="vLLM silently skips modules that it does not look up, and the adapter then answers like "
    "the base model. lmi_config/facts/adapter.py compares names by the model's files earlier; "
    "this patch has the modules that the engine has made.",
    without="adapters of a vision tower, and of models with names that only the engine knows, are "
    "loaded without effect",
    closed=False,
    upstream="https://github.com/vllm-project/vllm/issues/48019",
    put=_put,
)
