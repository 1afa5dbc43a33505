"""How a job could be divided among its workers, and how the workers could keep in sync."""

from __future__ import annotations

from typing import Any

from dray.views.base import View


class PlannedMemory(View):
    """Bytes on the rank that uses the most memory, at the peak of a step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """All other memory: activations for the backward pass, gathered weights, buffers; minus the
    gradients that do not exist yet at the peak."""
    total_bytes: int


class PlannedMesh(View):
    """One way to divide a job."""

    name: str
    parallel: dict[str, Any]
    """The field `parallel` of a job document."""
    micro_batch_size: int
    num_micro_batches: int
    memory: PlannedMemory
    missing_bytes: int | None = None
    """Bytes missing on a worker, 0 if the mesh fits; null if the workers' memory is unknown."""
    step_time_s: float
    """Expected step time in seconds, which is the sum of the next three fields."""
    compute_s: float
    send_s: float
    idle_s: float
    """Idle time of a pipeline."""
    why: str


class Calibration(View):
    """Speeds from which step times are computed."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str
    """Origin of the numbers."""


class SyncOption(View):
    """One way to keep the ranks' copies in sync. Figures are null if the model is unknown, or if
    there is no choice."""

    name: str
    sync: dict[str, Any]
    """The field `sync` of a job document."""
    sent_bytes: int | None
    """Expected bytes that all ranks together send in a step."""
    step_time_s: float | None
    staleness_steps: int | None
    """Most steps until an update of one rank reaches the weights of every other rank."""
    why: str
    """The reason for or against this option."""


class SyncPlan(View):
    """The ways to keep the ranks' copies in sync, and the choice of `sync: auto`."""

    chosen: str
    """Name of the chosen option."""
    options: list[SyncOption]
    facts: list[str]
    """Sentences with the known facts about the workers and their network."""


class Plan(View):
    """How a job could be divided among its workers."""

    chosen: str | None = None
    """Name of the mesh that `parallel: auto` would choose; null if none fits."""
    meshes: list[PlannedMesh]
    """Meshes that fit, fastest first; then the others, in the order of the missing memory."""
    memory_bytes_per_rank: int | None = None
    """Memory of each worker; null if unknown."""
    memory_source: str
    change: str | None = None
    """If no mesh fits, the smallest change of the document that makes one fit."""
    calibration: Calibration
    assumed: list[str] = []
    """Assumed properties of the data, which the document does not state."""
    sync: SyncPlan
    """Ways to keep the ranks of the first mesh in sync."""
