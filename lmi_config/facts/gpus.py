# SPDX-License-Identifier: Apache-2.0
"""The GPUs that CUDA would show this process, as NVIDIA's driver describes them.

This uses NVML, like vLLM (vllm/platforms/cuda.py), and not nvidia-smi, which may be missing on the
path although there is a driver.
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
    uuid: its identifier, for CUDA_VISIBLE_DEVICES. node: its NUMA node, or None if unknown. uuid
    and node identify the GPU but not its kind, so comparisons ignore them.
    """

    name: str
    memory: int | None
    driver: str
    cuda: int | None = None
    capability: tuple[int, int] | None = None
    slice: bool = False
    uuid: str = dataclasses.field(default="", compare=False)
    node: int | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundGpus:
    """shown: the GPUs. slices: further slices of GPUs (MIG); CUDA gives each process only one.
    missing: the reason why there are none, in a sentence; otherwise empty.
    """

    shown: tuple[Gpu, ...] = ()
    slices: tuple[Gpu, ...] = ()
    missing: str = ""


def vllm_wants_them() -> bool:
    """Whether the installed vLLM is built for CUDA, by its version, as in vllm/platforms."""
    try:
        return "cpu" not in version("vllm")
    except PackageNotFoundError:
        return False


def look(environ: Mapping[str, str], root: Path = Path("/")) -> FoundGpus:
    """Find the GPUs. root: a prefix of /dev, for tests."""
    device = next((it for it in ("nvidia0", "nvidiactl") if (root / "dev" / it).exists()), None)
    try:
        pynvml.nvmlInit()
        present = dict(_present(root))
    except pynvml.NVMLError_LibraryNotFound:
        if device:
            return FoundGpus(
                missing=f"/dev/{device} is there, but not the driver's {LIBRARY}; set "
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            )
        return FoundGpus(missing="there is no NVIDIA driver here")
    except pynvml.NVMLError as error:
        return FoundGpus(missing=f"the NVIDIA driver does not answer: {error}")
    if not present:
        return FoundGpus(missing="the NVIDIA driver shows no GPU")
    visible = environ.get(VISIBLE)
    allowed = [*_allowed(present, visible)]
    if not allowed:
        most = f"GPUs 0 to {len(present) - 1}" if len(present) > 1 else "GPU 0"
        missing = f"{VISIBLE}={visible!r} shows none of this machine's ({most})"
        return FoundGpus(missing=missing)
    # A process only gets one slice, which ends its list.
    count = next((place for place, it in enumerate(allowed, 1) if it.slice), len(allowed))
    return FoundGpus(
        shown=tuple(allowed[:count]), slices=tuple(it for it in allowed[count:] if it.slice)
    )


def _present(root: Path) -> Iterator[tuple[str, Gpu]]:
    """All GPUs in NVML's order, each followed by its slices: identifier and description."""
    driver = pynvml.nvmlSystemGetDriverVersion()
    cuda = _told(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(device)
        uuid = pynvml.nvmlDeviceGetUUID(device)
        gpu = Gpu(
            name=name,
            memory=_memory(device),
            driver=driver,
            cuda=cuda,
            capability=_told(pynvml.nvmlDeviceGetCudaComputeCapability, device),
            uuid=uuid,
            node=_node(device, root),
        )
        yield uuid, gpu
        for place in range(_told(pynvml.nvmlDeviceGetMaxMigDeviceCount, device) or 0):
            part = _told(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device, place)
            if part:  # places may be empty
                own = pynvml.nvmlDeviceGetUUID(part)
                found = dataclasses.replace(
                    gpu, name=f"a slice of {name}", memory=_memory(part), slice=True, uuid=own
                )
                yield own, found


def _node(device: Any, root: Path) -> int | None:
    """The NUMA node by the device's folder in sysfs, which has -1 where the machine has only one.
    NVML writes the domain of an address with eight digits, and Linux with four.
    """
    found = _told(pynvml.nvmlDeviceGetPciInfo, device)
    address = getattr(found, "busId", "")
    address = address.decode() if isinstance(address, bytes) else address
    file = root / "sys/bus/pci/devices" / address.lower()[-12:] / "numa_node"
    try:
        node = int(file.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _memory(device: Any) -> int | None:
    """Return the memory, or None: a container with a slice may not read the whole GPU's memory."""
    found = _told(pynvml.nvmlDeviceGetMemoryInfo, device)
    return found and int(found.total)


def _told(call: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer, or None if it refuses."""
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


def _allowed(present: Mapping[str, Gpu], visible: str | None) -> Iterator[Gpu]:
    """The GPUs that CUDA shows, by the rules of CUDA_VISIBLE_DEVICES (CUDA's programming guide),
    and all slices that it would show one process each.

    It lists indices or the beginnings of identifiers; the first that does not exist ends the list.
    If there are slices, whole GPUs are not shown.
    """
    whole = [gpu for gpu in present.values() if not gpu.slice]
    slices = [gpu for gpu in present.values() if gpu.slice]
    if visible is None:
        yield from slices or whole
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
