"""The report that a node's agent sends to the service."""

from __future__ import annotations

from dataclasses import dataclass

from ray_workers.shared.gpu_faults import GpuFault
from ray_workers.shared.quarantine import Quarantined


@dataclass(frozen=True)
class NodeReport:
    """A node's description of itself, which is sent when the node joins."""

    node_id: str
    hostname: str
    address: str
    version: str
    python: str
    storage_nonce: str | None
    """The contents of the storage's nonce file; None if this node can't read the file."""
    problem: str | None
    """The reason ranks can't start on the node, such as a failed torch import; None if they can."""
    full: str | None
    """The reason why no file can be written to the folder for reports and temporary files; None if
    files can be written."""
    quarantined: tuple[Quarantined, ...]
    """Slots in quarantine, which are not given to any job."""
    idle_workers: int | None
    """Number of Ray worker processes on the node that are starting or waiting for an actor."""
    has_silo_source: bool
    """Whether the node has a silo's data, and therefore runs only ranks of silos."""
    gpu_faults: tuple[GpuFault, ...]
    """Faults of the node's GPUs, found by its agent."""
    memory_bytes: int
    """Memory of the machine, or the limit of the agent's control groups if it is lower."""
