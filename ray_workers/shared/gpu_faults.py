"""Faults of a node's GPUs, as the node's agent reports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuFault:
    """A fault of a GPU. A node reports at most one fault of a GPU with the same code."""

    gpu: str
    """The GPU's UUID, or `index N` if NVML can't read its UUID."""
    code: str
    """The kind of fault, such as `xid_79` or `ecc`."""
    message: str
    mark: str
    """Identifies the occurrence: the same fault has the same mark in later reports, also after a
    restart of the agent."""
    since: float
    """Unix time in seconds by the node's clock."""
    is_sick: bool
    """Whether the GPU should get no more work. False for errors of the program that ran on it."""
    jobs: tuple[tuple[str, int], ...] = ()
    """The attempts (job id, attempt) that had processes on the GPU."""
    count: int = 1
    """How many times the fault has happened, including occurrences that were never reported
    because another one followed soon."""
