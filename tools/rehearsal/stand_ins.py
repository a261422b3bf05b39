# SPDX-License-Identifier: Apache-2.0
"""The libraries of NVIDIA's driver that vLLM's CUDA build loads, as stand-ins."""

import subprocess
from pathlib import Path

GPUS = "SLIPWAY_REHEARSAL_GPUS"
"""The variable that describes the machine of the stand-in NVML; nvml.c has its format."""
_LIBRARIES = {"nvml.c": "libnvidia-ml.so.1", "cuda.c": "libcuda.so.1"}


def build(folder: Path) -> None:
    """Compile the stand-ins into a folder for LD_LIBRARY_PATH.

    Raises OSError or CalledProcessError if there is no C compiler, or if it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for source, library in _LIBRARIES.items():
        flags = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
        made = ("-o", str(folder / library), str(Path(__file__).parent / source))
        subprocess.run(["cc", *flags, *made], check=True)
