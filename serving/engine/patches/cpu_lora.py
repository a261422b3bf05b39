# SPDX-License-Identifier: Apache-2.0
"""In the workers' processes: mends how vLLM 0.32 applies LoRA without a GPU.

- Its CPU kernels look each row's weights up by the row's slot, and a row of the base model has the
  slot -1, which is the last one's in Python: in a batch with adapters, base rows get the last
  adapter's weights. Here the kernels get the rows of adapters alone.
- The log probabilities of a prompt are computed of one row for each of its tokens, while vLLM has
  the slots of one row for each request: it fails, which ends the engine, or takes the first
  request's slot. Here all rows of a prompt have its own request's slot.

unapplied_adapters.py imports it. To be removed when vLLM does both.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_Kernel = Callable[..., None]


def _of_adapters(kernel: _Kernel, *, fills: bool) -> _Kernel:
    """A kernel that leaves rows of the base model out. fills: whether it fills its output, which
    then has zeros for them, rather than add to it.
    """

    def mended(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        slots: torch.Tensor,
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


def _mend_kernels() -> None:
    for name, fills in (
        ("bgmv_shrink", True),
        ("bgmv_expand", False),
        ("bgmv_expand_slice", False),
    ):
        mended = _of_adapters(getattr(lora_ops, name), fills=fills)
        for module in (lora_ops, punica_cpu):  # the kernels for prompts call those of lora_ops
            setattr(module, name, mended)


_prompt_slot: torch.Tensor | None = None
"""While the log probabilities of a prompt are computed: its request's slot."""


def _mend_prompts() -> None:
    wrapper: Any = punica_cpu.PunicaWrapperCPU
    sampled: property = wrapper.sampler_indices
    computed = GPUModelRunner._get_prompt_logprobs_dict

    def sampler_indices(self: Any) -> torch.Tensor:
        if _prompt_slot is not None:
            return _prompt_slot
        slots: torch.Tensor = sampled.__get__(self)
        return slots

    def prompt_logprobs(
        self: Any, hidden_states: torch.Tensor, scheduled: Mapping[str, int]
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

    wrapper.sampler_indices = property(sampler_indices)
    GPUModelRunner._get_prompt_logprobs_dict = prompt_logprobs


def _slot(runner: Any, request: str) -> int:
    """That of a request's adapter; -1 for the base model."""
    batch = runner.input_batch
    number = int(batch.request_lora_mapping[batch.req_id_to_index[request]])
    slots: list[int | None] = runner.lora_manager._adapter_manager.lora_index_to_id
    return slots.index(number) if number > 0 else -1


_mend_kernels()
_mend_prompts()
