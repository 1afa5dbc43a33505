"""Views of the cluster's nodes, storage and autoscaler."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from dray.views.base import View
from dray.views.reservations import NodeReservation


class QuarantinedSlots(View):
    """Slots that can't be used yet, because processes or files of the job that last used them still
    exist."""

    slots: int
    reason: str
    since: datetime
    job_id: str


class WithheldSlots(View):
    """A fault that keeps a node's GPUs, or its CPUs, from getting new work until an admin releases
    the node."""

    gpu: str | None = None
    """UUID of the GPU with the fault; unset if the fault is not known to be that of one GPU."""
    code: str
    """The kind of fault, such as `xid_79`, `ecc` or `replicas_differ`. With
    `replicas_differ_on_cpu`, the node's CPUs get no new work; with other codes, its GPUs, or its
    CPUs if it has no GPU."""
    reason: str
    since: datetime


class ReleasedNode(View):
    """A node that gets work again."""

    hostname: str
    released: list[WithheldSlots]
    """The faults that withheld the node's slots."""


class SlowMeasurement(View):
    """A measurement in which a GPU is much slower than other GPUs of the same model."""

    measure: str
    """The name in `CheckedDevice.values`."""
    factor: float
    """How many times slower the GPU is than the median of the others."""
    num_twins: int
    """Number of other GPUs of the same model that were measured."""


class CheckedDevice(View):
    """The result of a self-test for one GPU, or for all processors of a node without GPUs."""

    gpu: str | None = None
    """The GPU's UUID; unset for processors."""
    index: int
    model: str
    outcome: Literal["passed", "failed", "untested", "held"]
    """`untested` if the test could not be run, which is not a fault of the GPU; `held` if a job or
    another program used the GPU."""
    reason: str
    """Why the device failed or was not tested; empty if it passed."""
    values: dict[str, float]
    """Measurements: `product_s` is the time of a matrix product in seconds, and the others are
    rates in bytes per second."""
    slow: list[SlowMeasurement] = []
    """The measurements in which the GPU is much slower than other GPUs of the same model. Slow GPUs
    get work as before."""


class NodeCheck(View):
    """The newest self-test of a node."""

    hostname: str
    id: str
    """Differs for each test."""
    state: Literal["waiting", "running", "done"]
    """The node gets no new work while a test is running or about to begin."""
    cause: Literal["asked", "lost_rank"]
    why: str
    """The user who asked for the test, or what happened on the node."""
    job_id: str | None = None
    """The job that lost a rank on the node."""
    asked_at: datetime
    began_at: datetime | None = None
    ended_at: datetime | None = None
    """When the last test of the node ended. While another test is waiting or running, `outcome`,
    `message` and `devices` are still the result of the last test."""
    outcome: Literal["passed", "failed", "untested"] | None = None
    message: str
    devices: list[CheckedDevice]


class NodeCheckList(View):
    items: list[NodeCheck]


class NodeSlots(View):
    node_id: str
    hostname: str
    alive: bool
    resources: dict[str, float]
    labels: dict[str, str] = {}
    """The node's Ray labels, which can determine the price of its slots."""
    held: dict[str, float]
    """Resources of the node that are held by dray's live attempts."""
    accepted: bool
    reason: str | None = None
    """Why the node is refused. For an accepted node, the reason why files can't be written to its
    disk, or a note that only ranks of silos can run on the node."""
    quarantined: list[QuarantinedSlots] = []
    """Quarantined slots, which are checked every few seconds, and released once no processes or
    files of the previous job exist."""
    withheld: list[WithheldSlots] = []
    """Faults because of which the node's GPUs (or its CPUs, if it has no GPU) get no new work.
    Running jobs continue."""
    check: NodeCheck | None = None
    """The node's newest self-test; unset if it was never tested."""
    reservations: list[NodeReservation] = []
    """The reservations and maintenance windows that include the node and are active or begin within
    a week, in the order in which they begin. Callers see the reservations that `GET
    /v1/reservations` lists for them."""
    jobs: list[str]


class StorageState(View):
    """Usage of the storage according to the latest measurement."""

    used_bytes: int | None = None
    """Bytes used by checkpoints, artifacts and logs; measured only if there is a quota."""
    quota_bytes: int | None = None
    free_bytes: int | None = None
    """Free bytes on the disk of the storage; measured only if `DRAY_MIN_FREE_BYTES` is set."""
    min_free_bytes: int | None = None
    problem: str | None = None
    """Why jobs are neither accepted nor started; unset while there is enough space."""


class AutoscalingState(View):
    """The current request to Ray's autoscaler. dray can't detect whether an autoscaler is running
    until nodes are added."""

    max_nodes: int
    """Maximum number of nodes of the configured types, including existing nodes."""
    num_nodes: int = 0
    """Number of requested nodes that have not joined the cluster yet."""
    asked_at: datetime | None = None
    """When the nodes were requested."""


class Cluster(View):
    connected: bool
    reason: str | None = None
    ray_address: str | None = None
    ray_dashboard: str | None = None
    nodes: list[NodeSlots]
    storage: StorageState = StorageState()
    autoscaling: AutoscalingState | None = None
    """Unset if autoscaling is not configured."""
    updated_at: datetime | None = None


class CallerInfo(View):
    """The user who makes a request."""

    name: str
    is_admin: bool
