"""How a job could be divided among its workers, and how these could keep in step."""

from __future__ import annotations

from typing import Any

from dray.views.base import View


class PlannedMemory(View):
    """Bytes on the rank with the most, at the peak of a step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """All other memory: activations for the backward pass, gathered weights, buffers; less the
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
    """Expected step time, which is the sum of the next three fields."""
    compute_s: float
    send_s: float
    idle_s: float
    """Idle time of a pipeline."""
    why: str


class Calibration(View):
    """Speeds from which the times are computed."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str
    """Origin of the numbers."""


class SyncOption(View):
    """One way to keep the ranks' copies in step. Figures are null where the model is not known, or
    nothing can be chosen."""

    name: str
    sync: dict[str, Any]
    """The field `sync` of a job document."""
    sent_bytes: int | None
    """Expected bytes that all ranks together send in a step."""
    step_time_s: float | None
    staleness_steps: int | None
    """Steps that may pass until an update of one rank is in the weights of every other."""
    why: str
    """The reason for it, or against it."""


class SyncPlan(View):
    """The ways to keep the ranks' copies in step, and the one that `sync: auto` chooses."""

    chosen: str
    """Name of the chosen option."""
    options: list[SyncOption]
    facts: list[str]
    """Sentences about what is known of the workers and their network."""


class Plan(View):
    """How a job could be divided among its workers."""

    chosen: str | None = None
    """Name of the mesh that `parallel: auto` would choose; null if none fits."""
    meshes: list[PlannedMesh]
    """Meshes that fit, the fastest first; then the others, by the memory that is missing."""
    memory_bytes_per_rank: int | None = None
    """Memory of each worker; null if unknown."""
    memory_source: str
    change: str | None = None
    """If no mesh fits, the smallest change of the document that makes one fit."""
    calibration: Calibration
    assumed: list[str] = []
    """Properties of the data that are not in the document and were assumed."""
    sync: SyncPlan
    """Of the first mesh."""
