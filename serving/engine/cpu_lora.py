# SPDX-License-Identifier: Apache-2.0
"""In the workers' processes: mends how vLLM 0.32 applies LoRA without a GPU.

Its CPU kernels look each row's weights up by the row's slot, and a row of the base model has the
slot -1, which is the last one's in Python: in a batch with adapters, base rows get the last
adapter's weights. Here those rows get zeros. vLLM imports the class by its path, as the extension
of its worker (`worker_extension_cls`). To be removed when vLLM masks them.
"""

from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

_bgmv_shrink = lora_ops.bgmv_shrink


def bgmv_shrink(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    _bgmv_shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
    output_tensor[lora_indices_tensor < 0] = 0


class Extension:
    """An extension that adds nothing: that its module is imported is what counts."""


def _mend(module: Any) -> None:
    module.bgmv_shrink = bgmv_shrink


_mend(lora_ops)  # sgmv_shrink, for prompts, calls it
_mend(punica_cpu)
