# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels for an H100 on a machine without one, by the compilers that an H100 would use:
Triton and FlashInfer, the latter with the nvcc, headers and libraries of CUDA's wheels.

Run by the environment with requirements/gpu.txt. Writes the sizes of the compiled kernels, as JSON,
and whether vLLM finds all that FlashInfer needs and would use it.
"""

import json
import os
from pathlib import Path

os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"

import triton
from flashinfer.jit.norm import gen_norm_module
from triton import language
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm.utils.flashinfer import has_flashinfer


@triton.jit  # type: ignore[untyped-decorator]
def add(first, second, out, size: language.constexpr):  # type: ignore[no-untyped-def]
    at = language.arange(0, size)
    language.store(out + at, language.load(first + at) + language.load(second + at))


def main() -> None:
    pointers = dict.fromkeys(("first", "second", "out"), "*fp32")
    source = ASTSource(add, {**pointers, "size": "constexpr"}, {"size": 128})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    module = gen_norm_module()
    module.build(verbose=False)
    library = Path(module.jit_library_path)
    sizes = {"triton": len(made.asm["cubin"]), "flashinfer": library.stat().st_size}
    print(json.dumps({**sizes, "found": has_flashinfer()}))


if __name__ == "__main__":
    main()
