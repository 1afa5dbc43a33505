"""Results of a self-test of a node's GPUs, or of its processors if it has no GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

HARDWARE_ERRORS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware stack error",
    "GPU is lost",
)
"""Parts of CUDA's and NVML's messages that report a fault of the GPU, and never an error of the
program."""


def names_hardware(message: str) -> bool:
    """Whether an error message reports a fault of the GPU itself."""
    return any(part in message for part in HARDWARE_ERRORS)


class TestPhase(StrEnum):
    """The state of a self-test."""

    __test__ = False

    WAITING = "waiting"
    """The test can't start yet, because a job is about to use one of the GPUs."""
    RUNNING = "running"
    DONE = "done"


class DeviceOutcome(StrEnum):
    """The result for one GPU or processor."""

    PASSED = "passed"
    FAILED = "failed"
    UNTESTED = "untested"
    """The test could not be run, for example because of a missing package or a lack of memory. This
    is not a fault of the device."""
    HELD = "held"
    """The GPU was not tested, because a job or another program uses it."""


@dataclass(frozen=True)
class TestedDevice:
    """The result for one GPU, or for all processors of a node without GPUs."""

    __test__ = False

    gpu: str
    """The GPU's UUID; empty for processors."""
    index: int
    model: str
    outcome: DeviceOutcome
    reason: str
    """Why the device failed or was not tested; empty if it passed."""
    values: dict[str, float] = field(default_factory=dict)
    """The measurements, by the names in `MEASURES`."""

    @property
    def name(self) -> str:
        return f"GPU {self.index}" if self.gpu else "the processors"


@dataclass(frozen=True)
class NodeTest:
    """A node's answer about its self-test."""

    phase: TestPhase
    devices: tuple[TestedDevice, ...] = ()
    message: str = ""
    """Why the test waits, or a result that doesn't belong to a single device."""
    is_failed: bool = False
    """Whether GPUs failed together, so that the GPU at fault is not known."""


MEASURES: dict[str, tuple[str, bool]] = {
    "product_s": ("matrix product", False),
    "memory_bytes_per_s": ("memory bandwidth", True),
    "to_device_bytes_per_s": ("copies from the host", True),
    "from_device_bytes_per_s": ("copies to the host", True),
    "peer_bytes_per_s": ("copies to the next GPU", True),
    "all_reduce_bytes_per_s": ("all-reduce among the node's GPUs", True),
}
"""The measurements: their names, and whether larger values are better."""
