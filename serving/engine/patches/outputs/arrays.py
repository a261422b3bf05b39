# SPDX-License-Identifier: Apache-2.0
"""In the server's process: the arrays in the engine's outputs.

What: vLLM's decoder of the engine's messages. A subclass replaces it at the start.
Why: a token's log probabilities are three arrays of one number. vLLM makes each array in two steps,
after it has compared the array's class with others.
Upstream: vllm/v1/serial_utils.py.
Without it: a token with log probabilities takes more of the CPU.
"""

from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder

from serving.engine.patches.outputs import accounting


def install(client: Any) -> None:
    """Give a client of vLLM, which has not had an output yet, this decoder."""
    if accounting.ARRAYS.applies() is None:
        client.engine_core.decoder = Decoder(EngineCoreOutputs)


class Decoder(MsgpackDecoder):  # type: ignore[misc]  # vLLM is not type-checked
    """vLLM's, which decodes an array in one step."""

    def dec_hook(self, t: type, obj: Any) -> Any:
        if t is not np.ndarray:
            return super().dec_hook(t, obj)
        dtype, shape, data = obj
        return np.ndarray(shape, dtype, self.aux_buffers[data] if isinstance(data, int) else data)
