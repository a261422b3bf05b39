# SPDX-License-Identifier: Apache-2.0
"""docs/upstream/aot_load.md: load a function that torch's backend has compiled, as vLLM does."""

import tempfile
from pathlib import Path

import torch
from torch._dynamo import config as dynamo
from torch._functorch import config as functorch


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


with functorch.patch(bundled_autograd_cache=True), dynamo.patch(enable_aot_compile=True):
    compiled = torch.compile(double, fullgraph=True, backend="inductor")
    ahead = compiled.aot_compile(((torch.ones(3),), {}))
    with tempfile.TemporaryDirectory() as folder:
        ahead.save_compiled_function(f"{folder}/saved")
        with Path(folder, "saved").open("rb") as file:
            loaded = torch.compiler.load_compiled_function(file)

function = loaded._artifacts.compiled_fn
print(f"loaded: a {type(function).__name__}; it answers {loaded(torch.ones(3)).tolist()}")
if not hasattr(function, "finalize_loading"):  # compilation/decorators.py calls it
    print("WRONG: vLLM takes it for a failure to load, and compiles again")
