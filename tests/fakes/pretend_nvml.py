"""A pretended NVML, with the functions of nvidia-ml-py that dray calls to find faults of GPUs."""
# ruff: noqa: N802, N803, N815

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, TIMEOUT = 2, 3, 6, 10
GPU_IS_LOST, RESET_REQUIRED, UNKNOWN = 15, 16, 999


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


@dataclass(eq=False)
class PretendGpu:
    uuid: str
    ecc: int = 0
    pending: int = 0
    failed: int = 0
    reasons: int = 0
    links: dict[int, bool] = field(default_factory=dict)
    """Whether each NVLink is active."""
    recoveries: dict[int, int] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    """UUIDs of MIG devices."""
    model: str = "NVIDIA H100"
    pids: list[int] = field(default_factory=list)
    """Processes that use the GPU."""
    errors: dict[str, int] = field(default_factory=dict)
    """The error that each function returns for this GPU; `*` is any function except
    `nvmlDeviceGetUUID`, whose answer the bindings' library caches."""


@dataclass(eq=False)
class PretendMigDevice:
    uuid: str
    gpu: PretendGpu


@dataclass
class EventData:
    device: PretendGpu
    eventData: int
    eventType: int = 8
    gpuInstanceId: int = 0xFFFFFFFF
    computeInstanceId: int = 0xFFFFFFFF


class PretendNvml:
    """Has the names of the module `pynvml`."""

    NVMLError = NVMLError

    def __init__(self, *gpus: PretendGpu) -> None:
        self.gpus = gpus
        self.xids: deque[EventData] = deque()
        self.registered: set[str] = set()

    def fail(self, gpu: PretendGpu, xid: int) -> None:
        """Let an Xid error happen."""
        if gpu.uuid in self.registered:
            self.xids.append(EventData(gpu, xid))

    def _asked(self, gpu: Any, name: str) -> Any:
        error = gpu.errors.get(name, gpu.errors.get("*", 0))
        if error:
            raise NVMLError(error)
        return gpu

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> PretendGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> PretendGpu | PretendMigDevice:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
            if uuid in gpu.parts:
                return PretendMigDevice(uuid, gpu)
        raise NVMLError(NOT_FOUND)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: PretendMigDevice) -> Any:
        return migDevice.gpu

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        if handle.errors.get("nvmlDeviceGetUUID"):
            raise NVMLError(handle.errors["nvmlDeviceGetUUID"])
        return str(handle.uuid)

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(self._asked(handle, "nvmlDeviceGetName").model)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        gpu = self._asked(handle, "nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=0) for pid in gpu.pids]

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        return [int(bool(self._asked(handle, "nvmlDeviceGetMigMode").parts))] * 2

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, errorType: int, counterType: int) -> int:
        assert (errorType, counterType) == (1, 0)
        return int(self._asked(handle, "nvmlDeviceGetTotalEccErrors").ecc)

    def nvmlDeviceGetRemappedRows(self, device: Any) -> tuple[int, int, int, int]:
        gpu = self._asked(device, "nvmlDeviceGetRemappedRows")
        return 0, 0, gpu.pending, gpu.failed

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return int(self._asked(handle, "nvmlDeviceGetCurrentClocksThrottleReasons").reasons)

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int) -> int:
        gpu = self._asked(device, "nvmlDeviceGetNvLinkState")
        if link not in gpu.links:
            raise NVMLError(NOT_SUPPORTED if not gpu.links else INVALID_ARGUMENT)
        return int(gpu.links[link])

    def nvmlDeviceGetNvLinkErrorCounter(self, device: Any, link: int, counter: int) -> int:
        assert counter == 1
        gpu = self._asked(device, "nvmlDeviceGetNvLinkErrorCounter")
        return int(gpu.recoveries.get(link, 0))

    def nvmlEventSetCreate(self) -> set[str]:
        self.registered = set()
        return self.registered

    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: set[str]) -> None:
        assert eventTypes == 8
        eventSet.add(self._asked(handle, "nvmlDeviceRegisterEvents").uuid)

    def nvmlEventSetWait(self, eventSet: set[str], timeoutms: int) -> EventData:
        if not self.xids:
            raise NVMLError(TIMEOUT)
        return self.xids.popleft()
