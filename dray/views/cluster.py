"""The nodes of the cluster, its storage and its autoscaler."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import View


class QuarantinedSlots(View):
    """Slots that are withheld, because parts of their last job are not gone yet."""

    slots: int
    reason: str
    since: datetime
    job_id: str


class NodeSlots(View):
    node_id: str
    hostname: str
    alive: bool
    resources: dict[str, float]
    labels: dict[str, str] = {}
    """Ray's labels of the node, by which its slots may be priced."""
    held: dict[str, float]
    """Resources that live attempts of dray hold on the node."""
    accepted: bool
    reason: str | None = None
    """Why the node is refused, or, of an accepted node, why its disk takes no files, or that it
    takes ranks of silos alone."""
    quarantined: list[QuarantinedSlots] = []
    """Slots in quarantine, which are checked every few seconds and returned when clean."""
    jobs: list[str]


class StorageState(View):
    """Use of the storage, as last measured."""

    used_bytes: int | None = None
    """Bytes of checkpoints, artifacts and logs; only with a quota."""
    quota_bytes: int | None = None
    free_bytes: int | None = None
    """Free bytes of the storage's disk; only with `DRAY_MIN_FREE_BYTES`."""
    min_free_bytes: int | None = None
    problem: str | None = None
    """Why no job is accepted or started; unset while there is room."""


class AutoscalingState(View):
    """The request to Ray's autoscaler. Whether one runs is not known before nodes come."""

    max_nodes: int
    """The most nodes of the types that may be added, with those of them that are there."""
    num_nodes: int = 0
    """Number of nodes that are to come."""
    asked_at: datetime | None = None
    """Since when nodes are to come."""


class Cluster(View):
    connected: bool
    reason: str | None = None
    ray_address: str | None = None
    ray_dashboard: str | None = None
    nodes: list[NodeSlots]
    storage: StorageState = StorageState()
    autoscaling: AutoscalingState | None = None
    """None where no nodes may be added."""
    updated_at: datetime | None = None
