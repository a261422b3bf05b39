# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA build as a judge of command lines, on the machine of the stand-in NVML.

Run by the environment with requirements/gpu.txt. Reads cases from standard input, a JSON object in
each line, with `judge` (the arguments of judge below) and `environment`. Answers each with a line:
`refused` with the reason, or vLLM's configuration. No model is loaded and no engine is started.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is no answer
    _do_without_a_driver()
    for line in sys.stdin:
        case = json.loads(line)
        with _environment(case.get("environment", {})):
            verdict = imports(case["imports"]) if "imports" in case else judge(**case["judge"])
        print(json.dumps(verdict), file=answers, flush=True)


def _do_without_a_driver() -> None:
    """Replace what asks the driver more than NVML and the stand-in for libcuda can answer."""
    import torch
    from vllm.model_executor.models import registry
    from vllm.platforms.cuda import NvmlCudaPlatform

    # A model's class is looked at in a process of its own, which imports everything once more, so
    # that CUDA stays uninitialised. Here it cannot be initialised.
    registry._run_in_subprocess = lambda look: look()
    # These say how kernels are launched.
    NvmlCudaPlatform.num_compute_units = classmethod(lambda cls, device_id=0: 108)
    torch.cuda.Stream = type("Stream", (), {})


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def imports(names: list[str]) -> dict[str, Any]:
    """Import modules, and say which platform vLLM runs on."""
    import importlib

    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = _reason(error)
    from vllm.platforms import current_platform

    return {"platform": type(current_platform).__name__, "failed": failed}


def judge(arguments: list[str], memory: int | None = None) -> dict[str, Any]:
    """vLLM's result for a command line. memory: bytes that each rank has for its KV cache."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from serving.engine import vllm

    try:
        parsed = vllm.parse(arguments)
        usage = UsageContext.OPENAI_API_SERVER
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config(usage_context=usage)
    except Exception as error:
        return {"refused": _reason(error)}
    model, parallel, scheduler = (
        config.model_config,
        config.parallel_config,
        config.scheduler_config,
    )
    return {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "executor": str(parallel.distributed_executor_backend),
        "length": model.max_model_len,
        "batched_tokens": scheduler.max_num_batched_tokens,
        "quantization": model.quantization,
        **_kept(config, memory),
    }


def _kept(config: Any, memory: int | None) -> dict[str, Any]:
    """Bytes of KV of one token in all layers of one rank, by the specifications of the model's own
    layers, and the tokens that the memory holds. The model is built for rank 0 without weights. Its
    layers may also refuse the case.
    """
    try:
        specs = _specifications(config)
    except Exception as error:
        traceback.print_exc()
        return {"not_built" if _needs_more(error) else "refused": _reason(error)}
    found = {"full": 0, "windowed": 0}
    for spec in specs.values():
        kind = "windowed" if getattr(spec, "sliding_window", None) else "full"
        found[kind] += spec.page_size_bytes // spec.block_size
    # With several stages each has a part of the layers only.
    if not memory or not specs or config.parallel_config.pipeline_parallel_size > 1:
        return {"kv": found}
    return {"kv": found, "tokens": _tokens(config, specs, memory)}


def _tokens(config: Any, specs: dict[str, Any], memory: int) -> int | None:
    """As vLLM counts them at a start; None where the longest request does not fit."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils as kv

    try:
        with set_current_vllm_config(config):
            resolve_kv_cache_layout(config, [["LBNHC"]])  # the order of its parts, not their size
            (cache,) = kv.get_kv_cache_configs(config, [specs], [memory])
            return int(kv.get_kv_cache_capacity(config, cache)[0])
    except ValueError as error:
        if "larger than the available KV cache memory" in str(error):
            return None
        raise


def _needs_more(error: Exception) -> bool:
    """Whether it failed for want of a GPU, or of memory for the numbers."""
    told = ("no NVIDIA driver", "CUDA error", "register_meta")
    return any(it in str(error) for it in told)


def _specifications(config: Any) -> dict[str, Any]:
    import copy

    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    config = copy.copy(config)
    parallel = config.parallel_config = copy.copy(config.parallel_config)
    ranks = parallel.tensor_parallel_size
    parallel.pipeline_parallel_size = parallel.data_parallel_size = parallel.world_size = 1
    parallel.nnodes = parallel.tensor_parallel_size = 1
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(
                1, 0, "tcp://127.0.0.1:0", local_rank=0, backend="gloo"
            )
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(backend="gloo")
        # One process that takes itself for rank 0 of several: layers only ask how many there are.
        parallel.tensor_parallel_size = parallel_state.get_tp_group().world_size = ranks
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
        return dict(get_kv_cache_spec(config))


def _reason(error: Exception) -> str:
    """The error in one line; for pydantic's errors, their messages."""
    words = " ".join(str(error).split()).partition(" [type=")[0]
    return f"{type(error).__name__}: {words}"[:300]


if __name__ == "__main__":
    main()
