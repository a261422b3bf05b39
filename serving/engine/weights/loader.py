# SPDX-License-Identifier: Apache-2.0
"""A model loader of vLLM's that waits for each file of the weights while the model is fetched.

`load_format=slipway` selects it. The engine core's process and each worker wait by themselves. It
reads the files as vLLM's default loader does.
"""

import dataclasses
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from serving.sources.arriving import wait

FORMAT = "slipway"
"""The load format, in vLLM's words."""
_OPTION = "arriving"
_OWN_FILES = ("allow_patterns_overrides", "secondary_weights", "is_unused_checkpoint_weight")
"""Attributes of vLLM's models that choose other files than the index does."""


def options(files: Mapping[str, int], sign: Path) -> dict[str, Any]:
    """vLLM's options for a start with the loader. files: name → bytes, in vLLM's order. sign: the
    path of the fetch's Sign.
    """
    arriving = {"files": dict(files), "sign": str(sign)}
    return {"load_format": FORMAT, "model_loader_extra_config": {_OPTION: arriving}}


def register() -> None:
    """Give vLLM the loader."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    class WaitingLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not type-checked
        """Waits for a file, reads it, and goes on with the next one."""

        counter_before_loading_weights: float

        def __init__(self, load_config: Any) -> None:
            arriving = load_config.model_loader_extra_config[_OPTION]
            self._files: dict[str, int] = arriving["files"]
            self._sign = Path(arriving["sign"])
            plain: dict[str, Any] = {"load_format": "auto", "model_loader_extra_config": {}}
            super().__init__(dataclasses.replace(load_config, **plain))

        def get_all_weights(
            self, model_config: Any, model: Any
        ) -> Generator[tuple[str, Any], None, None]:
            folder = Path(model_config.model)
            if any(getattr(model, name, None) for name in _OWN_FILES):
                for name, size in self._files.items():
                    wait(folder / name, size, self._sign)
                yield from super().get_all_weights(model_config, model)
                return
            if self.counter_before_loading_weights == 0.0:
                self.counter_before_loading_weights = time.perf_counter()
            for name, size in self._files.items():
                wait(folder / name, size, self._sign)
                yield from safetensors_weights_iterator(
                    [str(folder / name)],
                    False,
                    self.load_config.safetensors_load_strategy,
                    local_expert_ids=self.local_expert_ids,
                )

    register_model_loader(FORMAT)(WaitingLoader)
