# SPDX-License-Identifier: Apache-2.0
"""Without a GPU: LoRA is applied to the rows of adapters, and to all rows of a prompt."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from serving.patching.patch import ENGINE, Name, Patch, replace

if TYPE_CHECKING:
    import torch

_Kernel = Callable[..., None]


def of_adapters(kernel: _Kernel, *, fills: bool) -> _Kernel:
    """A kernel that leaves rows of the base model out. fills: whether it fills its output, which
    then has zeros for them, rather than add to it.
    """

    def mended(
        inputs: "torch.Tensor",
        weights: "torch.Tensor",
        output: "torch.Tensor",
        slots: "torch.Tensor",
        *rest: Any,
        **more: Any,
    ) -> None:
        """inputs, output: a row for each token. slots: one for each row, or one for all."""
        used = slots >= 0
        if bool(used.all()):
            kernel(inputs, weights, output, slots, *rest, **more)
            return
        if fills:
            output.zero_()
        if bool(used.any()):
            rows = output[used]
            kernel(inputs[used], weights, rows, slots[used], *rest, **more)
            output[used] = rows

    return mended


_KERNELS = {"bgmv_shrink": True, "bgmv_expand": False, "bgmv_expand_slice": False}
"""Name → whether the kernel fills its output."""


def _put_kernels() -> None:
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name, fills in _KERNELS.items():
        for module in (lora_ops, punica_cpu):  # the kernels for prompts call those of lora_ops
            replace(module, name, functools.partial(of_adapters, fills=fills))


_prompt_slot: "torch.Tensor | None" = None
"""While the log probabilities of a prompt are computed: its request's slot."""


def _put_prompts() -> None:
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def make_indices(sampled: property) -> property:
        def sampler_indices(self: Any) -> "torch.Tensor":
            if _prompt_slot is not None:
                return _prompt_slot
            slots: torch.Tensor = sampled.__get__(self)
            return slots

        return property(sampler_indices)

    def make_logprobs(computed: Any) -> Any:
        @functools.wraps(computed)
        def prompt_logprobs(
            self: Any, hidden_states: "torch.Tensor", scheduled: Mapping[str, int]
        ) -> dict[str, Any]:
            global _prompt_slot
            asked = self.num_prompt_logprobs
            if not self.lora_config or not asked:
                found: dict[str, Any] = computed(self, hidden_states, scheduled)
                return found
            found = {}
            try:
                for request in [*asked.keys() & scheduled.keys()]:
                    self.num_prompt_logprobs = {request: asked[request]}
                    _prompt_slot = torch.tensor([_slot(self, request)])
                    found |= computed(self, hidden_states, scheduled)
                    if not self.num_prompt_logprobs:
                        del asked[request]
            finally:
                self.num_prompt_logprobs, _prompt_slot = asked, None
            return found

        return prompt_logprobs

    replace(PunicaWrapperCPU, "sampler_indices", make_indices)
    replace(GPUModelRunner, "_get_prompt_logprobs_dict", make_logprobs)


def _slot(runner: Any, request: str) -> int:
    """That of a request's adapter; -1 for the base model."""
    batch = runner.input_batch
    number = int(batch.request_lora_mapping[batch.req_id_to_index[request]])
    slots: list[int | None] = runner.lora_manager._adapter_manager.lora_index_to_id
    return slots.index(number) if number > 0 else -1


def _without_gpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


_OPS = "vllm.lora.ops.torch_ops.lora_ops"
_PUNICA = "vllm.lora.punica_wrapper"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_FIRST = "inputs, lora_{}_weights, output_tensor, lora_indices_tensor, ..."
KERNELS = Patch(
    name="cpu_lora_kernels",
    process=ENGINE,
    names=(
        *(Name(f"{_OPS}:{it}", _FIRST.format("b")) for it in _KERNELS),
        *(Name(f"{_PUNICA}.punica_cpu:{it}") for it in _KERNELS),
    ),
    does="Gives the LoRA kernels for CPUs only the rows of adapters.",
    why="They look up each row's weights by the row's slot. A row of the base model has the slot "
    "-1, which in Python means the last slot.",
    without="in a batch with adapters, rows of the base model would get the last adapter's weights",
    closed=True,
    needed=_without_gpu,
    put=_put_kernels,
)
PROMPTS = Patch(
    name="cpu_lora_prompts",
    process=ENGINE,
    names=(
        Name(f"{_PUNICA}.punica_base:PunicaWrapperBase", has=("sampler_indices",)),
        Name(f"{_PUNICA}.punica_cpu:PunicaWrapperCPU"),
        Name(f"{_RUNNER}._get_prompt_logprobs_dict", "self, hidden_states, num_scheduled_tokens"),
        Name(_RUNNER, has=("num_prompt_logprobs", "lora_config", "input_batch")),
        Name(
            "vllm.v1.worker.gpu_input_batch:InputBatch",
            has=("request_lora_mapping", "req_id_to_index"),
        ),
        Name("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin", has=("lora_manager",)),
        Name("vllm.lora.model_manager:LoRAModelManager", has=("lora_index_to_id",)),
    ),
    does="Makes all rows of a prompt use the request's adapter when the prompt's log probabilities "
    "are computed.",
    why="vLLM computes them with one row for each token, but it has slots for one row for each "
    "request.",
    without="a request for prompt log probabilities would end the engine, or get another "
    "request's adapter",
    closed=True,
    needed=_without_gpu,
    put=_put_prompts,
)
