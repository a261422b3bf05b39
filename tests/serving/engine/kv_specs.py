# SPDX-License-Identifier: Apache-2.0
"""The KV cache specs and groups that vLLM's own classes make from models' configurations.

`python -m tests.serving.engine.kv_specs < CONFIGURATIONS > FOUND` reads a JSON list of
configurations, and writes a list with the findings for each. Each model's class is built on the
device `meta`, so it has all its layers and no weights. vLLM's distributed state needs a separate
process.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import vllm.model_executor.models.registry as registry
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_open_port
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import customize_attention_spec

MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_hidden_layers": 1,
}
"""A mixture of experts comes first, because vLLM makes their process group for the first model."""


def named(spec: Any) -> tuple[Any, ...]:
    """Class, KV heads, head size, window or chunk: the properties that tell layers apart."""
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    heads, size = getattr(spec, "num_kv_heads", None), getattr(spec, "head_size", None)
    return type(spec).__name__, heads, size, window


def found(config: dict[str, Any], whole: bool) -> dict[str, Any]:
    """The layers by their specs, and the number of kinds of layers in each group.

    whole: with disable_hybrid_kv_cache_manager.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        made = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            kv_cache_memory_bytes=1 << 28,
            disable_hybrid_kv_cache_manager=whole or None,
        ).create_engine_config()
        with set_current_vllm_config(made):
            if not torch.distributed.is_initialized():
                url = f"tcp://127.0.0.1:{get_open_port()}"
                init_distributed_environment(1, 0, url, 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            torch.set_default_dtype(torch.bfloat16)
            try:
                with torch.device("meta"):
                    initialize_model(made)
            finally:
                torch.set_default_dtype(torch.float32)
            current_platform.update_block_size_for_backend(made)
            return _groups(made)


def _groups(made: Any) -> dict[str, Any]:
    specs = {}
    for name, layer in get_layers_from_vllm_config(made, AttentionLayerBase).items():
        # As GPUModelRunner.get_kv_cache_spec.
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        if spec := layer.get_kv_cache_spec(made):
            if isinstance(spec, AttentionSpec):
                spec = customize_attention_spec(layer.get_attn_backend(), spec)
            specs[name] = spec
    made.cache_config.kv_cache_layout = "LBHNC"  # the engine's core chooses one later
    layers = [
        [*kind, count]
        for kind, count in sorted(Counter(map(named, specs.values())).items(), key=str)
    ]
    groups = []
    for group in get_kv_cache_groups(made, dict(specs)) if specs else []:
        spec = group.kv_cache_spec
        many = isinstance(spec, UniformTypeKVCacheSpecs)
        inner = spec.kv_cache_specs.values() if many else [spec]
        groups.append(len({named(it) for it in inner}))
    return {"layers": layers, "groups": groups, "runner": made.model_config.runner_type}


def main() -> None:
    # Otherwise vLLM inspects each class in a separate process, which takes seconds.
    registry._run_in_subprocess = lambda function: function()
    answers = []
    found(MIXTURE, whole=False)
    for config in json.load(sys.stdin):
        answer: dict[str, Any] = {}
        for name, whole in (("as it is", False), ("whole", True)):
            try:
                answer[name] = found(config, whole)
            except Exception as error:  # whatever keeps this model from being built here
                answer[name] = f"{type(error).__name__}: {error}"[:200]
        answers.append(answer)
    sys.stdout.write("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
