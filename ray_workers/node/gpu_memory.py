"""The processes that hold memory on a GPU, according to NVIDIA's management library (NVML).

Memory can outlive its process if the driver hangs during cleanup, or if another process still has
the context open. Without NVML, no memory counts as held.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Protocol

from ray_workers.node import compat_ray


class GpuMemory(Protocol):
    """Interface for checking which GPU memory is still held, before a node agent releases a
    slot."""

    def held(self, gpus: str) -> dict[int, int]:
        """Return the bytes held on these GPUs, keyed by pid. GPUs are named by index or UUID, as in
        CUDA_VISIBLE_DEVICES."""


class NvmlMemory:
    """Reads NVML through nvidia-ml-py if it is installed, otherwise through Ray's copy of this
    package."""

    def __init__(self) -> None:
        self._nvml = load_nvml()

    def held(self, gpus: str) -> dict[int, int]:
        found: dict[int, int] = {}
        if self._nvml is None:
            return found
        for gpu in filter(None, gpus.split(",")):
            with contextlib.suppress(self._nvml.NVMLError):
                handle = gpu_handle(self._nvml, gpu)
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    found[process.pid] = found.get(process.pid, 0) + (process.usedGpuMemory or 0)
        return found


def gpu_handle(nvml: Any, gpu: str) -> Any:
    """Return NVML's handle for a GPU, which is named as in CUDA_VISIBLE_DEVICES."""
    if gpu.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(gpu))
    return nvml.nvmlDeviceGetHandleByUUID(gpu)


def load_nvml() -> Any:
    """Return the initialised bindings; None without an NVIDIA driver."""
    for load in (lambda: importlib.import_module("pynvml"), compat_ray.nvml):
        try:
            nvml: Any = load()
            nvml.nvmlInit()
        except Exception:  # the bindings, the library, the driver or the permission is missing
            continue
        return nvml
    return None
