"""GPU usage, from NVIDIA's management library (NVML).

A call to NVML might never return, for example after the driver has lost a GPU. Therefore a single
thread makes all calls, and readers wait for it only briefly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from ray_workers.node.gpu_memory import gpu_handle, load_nvml
from ray_workers.node.system_metrics.processes import Values

WAIT_S = 0.3
"""Seconds that a reader waits for NVML."""
MAX_AGE_S = 15.0
"""Maximum age in seconds of values that are returned. Older values would hide an NVML hang."""
GIVEN_UP_S = 60.0
"""Seconds after which the node's log reports that NVML does not respond."""
TEMPERATURE_OF_CHIP = 0
"""NVML_TEMPERATURE_GPU"""


class GpuMeter:
    """Reads GPUs, which are named by index or UUID as in CUDA_VISIBLE_DEVICES."""

    def __init__(
        self,
        load: Callable[[], Any] = load_nvml,
        *,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` is a function like `load_nvml`, which is called in the meter's thread."""
        self._load = load
        self._wait_s = wait_s
        self._clock = clock
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._asked: set[str] = set()
        self._busy_since: float | None = None
        self._is_given_up = False
        self._is_absent = False
        self._values: dict[str, tuple[float, Values]] = {}
        """(time of the reading, values), keyed by GPU name."""

    def read(self, names: Collection[str]) -> dict[str, Values]:
        """Return current or recent values of each GPU that NVML can read: `utilization` (0 to 1),
        `memory_used` (bytes), `power_w` and `temperature_c`. Values that a GPU does not measure are
        omitted."""
        with self._lock:
            if not names or self._is_absent:
                return {}
            # Another attempt's call might be reading the GPUs.
            self._lock.wait_for(self._is_idle, self._wait_s)
            if self._is_idle():
                self._begin(names)
                self._lock.wait_for(self._is_idle, self._wait_s)
            self._note_silence()
            oldest = self._clock() - MAX_AGE_S
            known = {name: self._values[name] for name in names if name in self._values}
            return {name: values for name, (at, values) in known.items() if at >= oldest}

    def _is_idle(self) -> bool:
        return self._busy_since is None

    def _note_silence(self) -> None:
        busy_s = 0.0 if self._busy_since is None else self._clock() - self._busy_since
        if busy_s > GIVEN_UP_S and not self._is_given_up:
            print("NVML does not respond: there are no GPU metrics until it does", flush=True)  # noqa: T201
        self._is_given_up = busy_s > GIVEN_UP_S

    def _begin(self, names: Collection[str]) -> None:
        self._asked = set(names)
        self._busy_since = self._clock()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpu meter", daemon=True)
            self._thread.start()
        self._lock.notify_all()

    def _run(self) -> None:
        nvml = self._load()
        while nvml is not None:
            with self._lock:
                self._lock.wait_for(lambda: not self._is_idle())
                names = self._asked
            read = {name: _values_of(nvml, name) for name in names}
            with self._lock:
                now = self._clock()
                self._values |= {name: (now, values) for name, values in read.items()}
                self._busy_since = None
                self._lock.notify_all()
        with self._lock:
            self._is_absent = True
            self._busy_since = None
            self._lock.notify_all()


def _values_of(nvml: Any, name: str) -> Values:
    asked: dict[str, Callable[[Any], float]] = {
        "utilization": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        "memory_used": lambda gpu: float(nvml.nvmlDeviceGetMemoryInfo(gpu).used),
        "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "temperature_c": lambda gpu: float(nvml.nvmlDeviceGetTemperature(gpu, TEMPERATURE_OF_CHIP)),
    }
    found = {}
    try:
        gpu = gpu_handle(nvml, name)
        for what, ask in asked.items():
            try:
                found[what] = ask(gpu)
            except Exception:  # the GPU does not measure this value, or the driver returns None
                continue
    except Exception:  # the GPU does not exist or is lost; keep the thread running
        return {}
    return found
