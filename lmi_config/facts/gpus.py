# SPDX-License-Identifier: Apache-2.0
"""The GPUs that CUDA would show this process, as NVIDIA's driver describes them.

Asked through NVML, as vLLM asks (vllm/platforms/cuda.py), and not through nvidia-smi, which need
not be on the path where the driver is. Names and numbers are those of nvml.h of CUDA 13.
"""

import ctypes
import dataclasses
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"
DRIVER = 580
"""The oldest driver for CUDA 13.0, which vLLM 0.32 is built with (CUDA's release notes)."""
CUDA = 13000
VISIBLE = "CUDA_VISIBLE_DEVICES"

_TEXT = 96  # bytes, as many as any of NVML's texts take


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """memory: bytes, or None where the driver does not say. driver: its version. cuda: the newest
    CUDA that it runs, forward compatibility included, as 13000 for 13.0; None where it does not
    say. capability: its compute capability, as (9, 0). slice: whether it is a part of a GPU (MIG).
    """

    name: str
    memory: int | None
    driver: str
    cuda: int | None = None
    capability: tuple[int, int] | None = None
    slice: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """shown: the GPUs. missing: why there are none, in a sentence; empty where there are."""

    shown: tuple[Gpu, ...] = ()
    missing: str = ""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Failed(Exception):
    """NVML has refused a call."""


class _Nvml:
    """NVML, initialised. Raises OSError where it is not installed, _Failed without a driver."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: object) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError:
            code = None
        if code != 0:
            raise _Failed(f"{name} returned {code}")

    def text(self, name: str, *arguments: object) -> str:
        into = ctypes.create_string_buffer(_TEXT)
        self.call(name, *arguments, into, _TEXT)
        return into.value.decode(errors="replace")

    def number(self, name: str, *arguments: object) -> int | None:
        into = ctypes.c_uint()
        try:
            self.call(name, *arguments, ctypes.byref(into))
        except _Failed:
            return None
        return into.value

    def handle(self, name: str, *arguments: object) -> ctypes.c_void_p:
        into = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(into))
        return into

    def memory(self, device: ctypes.c_void_p) -> int | None:
        """A container that has a slice of a GPU may not read the GPU's own."""
        into = _Memory()
        try:
            self.call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(into))
        except _Failed:
            return None
        return int(into.total)

    def capability(self, device: ctypes.c_void_p) -> tuple[int, int] | None:
        major, minor = ctypes.c_int(), ctypes.c_int()
        into = (ctypes.byref(major), ctypes.byref(minor))
        try:
            self.call("nvmlDeviceGetCudaComputeCapability", device, *into)
        except _Failed:
            return None
        return major.value, minor.value


def vllm_wants_them() -> bool:
    """Whether the vLLM that is installed is built for CUDA; vllm/platforms asks its version."""
    try:
        return "cpu" not in version("vllm")
    except PackageNotFoundError:
        return False


def look(environ: Mapping[str, str], root: Path = Path("/")) -> Found:
    """Look at the GPUs. root stands before /dev, which tests bring along."""
    device = next((it for it in ("nvidia0", "nvidiactl") if (root / "dev" / it).exists()), None)
    try:
        nvml = _Nvml()
    except OSError:
        if device:
            return Found(
                missing=f"/dev/{device} is there, but not the driver's {LIBRARY}; set "
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            )
        return Found(missing="there is no NVIDIA driver here")
    except _Failed:
        return Found(missing="the NVIDIA driver does not answer")
    try:
        present = dict(_present(nvml))
    except _Failed as error:
        return Found(missing=f"the NVIDIA driver does not list its GPUs ({error})")
    if not present:
        return Found(missing="the NVIDIA driver shows no GPU")
    visible = environ.get(VISIBLE)
    shown = tuple(_shown(present, visible))
    if not shown:
        most = f"GPUs 0 to {len(present) - 1}" if len(present) > 1 else "GPU 0"
        missing = f"{VISIBLE}={visible!r} shows none of this machine's ({most})"
        return Found(missing=missing)
    return Found(shown=shown)


def _present(nvml: _Nvml) -> Iterator[tuple[str, Gpu]]:
    """All GPUs in NVML's order, each slice after its own: identifier and what it is."""
    driver = nvml.text("nvmlSystemGetDriverVersion")
    cuda = nvml.number("nvmlSystemGetCudaDriverVersion_v2")
    for index in range(nvml.number("nvmlDeviceGetCount_v2") or 0):
        device = nvml.handle("nvmlDeviceGetHandleByIndex_v2", index)
        name = nvml.text("nvmlDeviceGetName", device)
        gpu = Gpu(
            name=name,
            memory=nvml.memory(device),
            driver=driver,
            cuda=cuda,
            capability=nvml.capability(device),
        )
        yield nvml.text("nvmlDeviceGetUUID", device), gpu
        for part in _slices(nvml, device):
            size = nvml.memory(part)
            found = dataclasses.replace(gpu, name=f"a slice of {name}", memory=size, slice=True)
            yield nvml.text("nvmlDeviceGetUUID", part), found


def _slices(nvml: _Nvml, device: ctypes.c_void_p) -> Iterator[ctypes.c_void_p]:
    for index in range(nvml.number("nvmlDeviceGetMaxMigDeviceCount", device) or 0):
        try:
            yield nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
        except _Failed:  # places may be empty
            continue


def _shown(present: Mapping[str, Gpu], visible: str | None) -> Iterator[Gpu]:
    """The GPUs that CUDA shows, by the rules of CUDA_VISIBLE_DEVICES (CUDA's programming guide).

    It lists indices or the beginnings of identifiers; the first that does not exist ends the list.
    Of slices a process gets one, and where there are any, no whole GPUs beside it.
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
