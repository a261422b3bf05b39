# SPDX-License-Identifier: Apache-2.0
"""In the workers' processes: an adapter that vLLM would load and not apply is refused.

What it does: once an adapter is loaded, its modules are compared with those of the model that
vLLM (0.32) looks up; a module that none of them is makes the load fail.

Why: vLLM says nothing of what it has not looked up (activate_adapter in its model_manager.py), and
the adapter answers as the base model does, or as a part of it would. Before an adapter is loaded
lmi_config/facts/adapter.py compares names by the model's files; here the modules are those that the
engine has made, whichever model it is. With pipeline parallelism a worker has a part of them, and
with OPTION_LORA_TARGET_MODULES the operator leaves some out: no comparison.

Upstream: https://github.com/vllm-project/vllm/issues/48019

Without it: adapters of a vision tower, and of models whose names only the engine knows, are loaded
and change nothing. vLLM imports the class by its path, as the extension of its worker
(`worker_extension_cls`).
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed import get_pp_group
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest

_load_adapter = WorkerLoRAManager._load_adapter


class Extension:
    """An extension that adds nothing: that its module is imported is what counts."""


def load_adapter(self: Any, lora_request: "LoRARequest") -> "LoRAModel":
    """As vLLM's; raises ValueError for an adapter of which it would leave out a part."""
    adapter = _load_adapter(self, lora_request)
    manager = self._adapter_manager
    whole = self.lora_config.target_modules is None and get_pp_group().world_size == 1
    if whole and (unused := _unused(manager, adapter)):
        raise ValueError(
            f"it changes {unused[0]}{f' and {len(unused) - 1} more' if unused[1:] else ''}, "
            f"which vLLM does not apply to this model{_fix(manager)}"
        )
    return adapter


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


WorkerLoRAManager._load_adapter = load_adapter
if current_platform.is_cpu():
    from serving.engine.patches import cpu_lora  # noqa: F401
