"""The nodes of the cluster, its storage and its autoscaler."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import View


class QuarantinedSlots(View):
    """Slots that are not used yet, because processes or files of their last job still exist."""

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
    """Ray labels of the node, by which its slots may be priced."""
    held: dict[str, float]
    """Resources on the node that live attempts of dray hold."""
    accepted: bool
    reason: str | None = None
    """Why the node is refused; or, for an accepted node, why its disk accepts no files, or a note
    that it accepts only ranks of silos."""
    quarantined: list[QuarantinedSlots] = []
    """Slots in quarantine, which are checked every few seconds and returned when clean."""
    jobs: list[str]


class StorageState(View):
    """Use of the storage, by the newest measurement."""

    used_bytes: int | None = None
    """Bytes of checkpoints, artifacts and logs; only with a quota."""
    quota_bytes: int | None = None
    free_bytes: int | None = None
    """Free bytes of the storage's disk; only with `DRAY_MIN_FREE_BYTES`."""
    min_free_bytes: int | None = None
    problem: str | None = None
    """Why no job is accepted or started; unset while there is free space."""


class AutoscalingState(View):
    """The request to Ray's autoscaler. Whether an autoscaler runs is unknown until nodes are
    added."""

    max_nodes: int
    """Most nodes of the types that may be added, including existing nodes of these types."""
    num_nodes: int = 0
    """Number of nodes that were requested and are not in the cluster yet."""
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
    """Unset if no nodes may be added."""
    updated_at: datetime | None = None
