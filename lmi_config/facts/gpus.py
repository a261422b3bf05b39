# SPDX-License-Identifier: Apache-2.0
"""The GPUs that CUDA would show this process, as NVIDIA's driver describes them.

Asked through NVML, as vLLM asks (vllm/platforms/cuda.py), and not through nvidia-smi, which need
not be on the path where the driver is.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pynvml

LIBRARY = "libnvidia-ml.so.1"
DRIVER = 580
"""The oldest driver for CUDA 13.0, which vLLM 0.32 is built with (CUDA's release notes)."""
CUDA = 13000
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """memory: bytes, or None where the driver does not say. driver: its version. cuda: the newest
    CUDA that it runs, forward compatibility included, as 13000 for 13.0; None if unknown.
    capability: its compute capability, as (9, 0). slice: whether it is a part of a GPU (MIG).
    """

    name: str
    memory: int | None
    driver: str
    cuda: int | None = None
    capability: tuple[int, int] | None = None
    slice: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """shown: the GPUs. missing: the reason why there are none, in a sentence; otherwise empty."""

    shown: tuple[Gpu, ...] = ()
    missing: str = ""


def vllm_wants_them() -> bool:
    """Whether the vLLM that is installed is built for CUDA; vllm/platforms asks its version."""
    try:
        return "cpu" not in version("vllm")
    except PackageNotFoundError:
        return False


def look(environ: Mapping[str, str], root: Path = Path("/")) -> Found:
    """Look at the GPUs. root: a prefix of /dev, for tests."""
    device = next((it for it in ("nvidia0", "nvidiactl") if (root / "dev" / it).exists()), None)
    try:
        pynvml.nvmlInit()
        present = dict(_present())
    except pynvml.NVMLError_LibraryNotFound:
        if device:
            return Found(
                missing=f"/dev/{device} is there, but not the driver's {LIBRARY}; set "
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            )
        return Found(missing="there is no NVIDIA driver here")
    except pynvml.NVMLError as error:
        return Found(missing=f"the NVIDIA driver does not answer: {error}")
    if not present:
        return Found(missing="the NVIDIA driver shows no GPU")
    visible = environ.get(VISIBLE)
    shown = tuple(_shown(present, visible))
    if not shown:
        most = f"GPUs 0 to {len(present) - 1}" if len(present) > 1 else "GPU 0"
        missing = f"{VISIBLE}={visible!r} shows none of this machine's ({most})"
        return Found(missing=missing)
    return Found(shown=shown)


def _present() -> Iterator[tuple[str, Gpu]]:
    """All GPUs in NVML's order, each followed by its slices: identifier and description."""
    driver = pynvml.nvmlSystemGetDriverVersion()
    cuda = _told(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(device)
        gpu = Gpu(
            name=name,
            memory=_memory(device),
            driver=driver,
            cuda=cuda,
            capability=_told(pynvml.nvmlDeviceGetCudaComputeCapability, device),
        )
        yield pynvml.nvmlDeviceGetUUID(device), gpu
        for place in range(_told(pynvml.nvmlDeviceGetMaxMigDeviceCount, device) or 0):
            part = _told(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device, place)
            if part:  # places may be empty
                found = dataclasses.replace(
                    gpu, name=f"a slice of {name}", memory=_memory(part), slice=True
                )
                yield pynvml.nvmlDeviceGetUUID(part), found


def _memory(device: Any) -> int | None:
    """A container that has a slice of a GPU may not read the GPU's own."""
    found = _told(pynvml.nvmlDeviceGetMemoryInfo, device)
    return found and int(found.total)


def _told(call: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer, or None if it refuses."""
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


def _shown(present: Mapping[str, Gpu], visible: str | None) -> Iterator[Gpu]:
    """The GPUs that CUDA shows, by the rules of CUDA_VISIBLE_DEVICES (CUDA's programming guide).

    It lists indices or the beginnings of identifiers; the first that does not exist ends the list.
    A process gets one slice, and no whole GPUs beside a slice.
    """
    whole = [gpu for gpu in present.values() if not gpu.slice]
    slices = [gpu for gpu in present.values() if gpu.slice]
    if visible is None:
        yield from slices[:1] or whole
        return
    for word in visible.split(","):
        wanted = word.strip()
        if wanted.isdigit():
            found = (slices[:1] if slices else whole)[int(wanted) : int(wanted) + 1]
        else:
            found = [gpu for uuid, gpu in present.items() if wanted and uuid.startswith(wanted)]
        if not found:
            return
        yield found[0]
        if found[0].slice:
            return
