"""Views of plans: how to parallelize a job across its workers, and how to keep the ranks' copies of
the model in sync."""

from __future__ import annotations

from typing import Any

from dray.views.base import View


class PlannedMemory(View):
    """Peak memory during a step, in bytes, of the rank that uses the most memory."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """All other memory: activations for the backward pass, gathered weights, buffers, and copies of
    the state (`checkpoint.in_memory`) that the document asks for. Gradients that do not exist yet
    at the peak are subtracted."""
    total_bytes: int


class PlannedMesh(View):
    """One way to divide a job."""

    name: str
    parallel: dict[str, Any]
    """The value for `parallel` in a job document."""
    micro_batch_size: int
    num_micro_batches: int
    memory: PlannedMemory
    missing_bytes: int | None = None
    """Number of bytes by which the mesh exceeds a worker's memory, or 0 if the mesh fits; null if
    the workers' memory is unknown."""
    step_time_s: float
    """Expected step time in seconds, which is the sum of the following three fields."""
    compute_s: float
    send_s: float
    idle_s: float
    """Seconds per step in which stages of a pipeline are idle."""
    why: str


class Calibration(View):
    """Speeds that were used to compute step times."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str
    """The source of the speeds."""


class SyncOption(View):
    """One way to keep the ranks' copies of the model in sync. The figures are null if the model is
    unknown, or if there is only one option."""

    name: str
    sync: dict[str, Any]
    """The value for `sync` in a job document."""
    sent_bytes: int | None
    """Expected number of bytes that all ranks together send per step."""
    step_time_s: float | None
    staleness_steps: int | None
    """Maximum number of steps until an update of one rank reaches the weights of every other
    rank."""
    why: str
    """Why this option was or was not chosen."""


class SyncPlan(View):
    """The ways to keep the ranks' copies of the model in sync, and the way that `sync: auto`
    chooses."""

    chosen: str
    """Name of the chosen option."""
    options: list[SyncOption]
    facts: list[str]
    """Known facts about the workers and their network, as sentences."""


class Plan(View):
    """How a job could be parallelized across its workers."""

    chosen: str | None = None
    """Name of the mesh that `parallel: auto` would choose; null if no mesh fits."""
    meshes: list[PlannedMesh]
    """All meshes: first the meshes that fit, sorted by speed, then the meshes that don't fit,
    sorted by missing memory."""
    memory_bytes_per_rank: int | None = None
    """Memory of each worker; null if unknown."""
    memory_source: str
    change: str | None = None
    """If no mesh fits, the smallest change to the document that makes one fit."""
    calibration: Calibration
    assumed: list[str] = []
    """Properties of the data that were assumed because the document does not specify them."""
    sync: SyncPlan
    """Ways to keep the workers in sync if the first mesh is used."""
