"""Creates the port's nodes from the data that Ray and the node agents report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from service.cluster.port import DRAINED, ClusterNode
from service.cluster.ray.node_agents import RELEASED, STARTS, JoinedNode
from service.config.node_types import SILO_LABEL

CONTROL_RESOURCE = "dray_control"
HEAD_RESOURCE = "node:__internal_head__"
NODE_ID_LABEL = "ray.io/node-id"


def described(
    node: Mapping[str, Any],
    available: Mapping[str, float],
    drained_by: float | None,
    joined: JoinedNode | None,
) -> ClusterNode:
    """Return the node as a `ClusterNode`.

    `node` is the node's entry in `ray.nodes()`. `available` contains the resources that no job
    holds, according to Ray. `joined` is None if no agent of dray runs on the node.
    """
    node_id = node["NodeID"]
    refused = RELEASED if joined is None else joined.refused
    problem = refused if drained_by is None else _leaving(drained_by)
    return ClusterNode(
        node_id=node_id,
        hostname=node["NodeManagerHostname"],
        alive=True,
        resources=_schedulable(node["Resources"]),
        available=_schedulable(available),
        accepted=problem is None,
        problem=problem,
        full=None if joined is None else joined.full,
        quarantined=None if joined is None else joined.quarantined,
        drained_by=drained_by,
        labels=_labels(node, has_silo_source=joined is not None and joined.has_silo_source),
        is_starting=problem == STARTS,
        is_released=joined is None,
        is_never_released=is_head_or_control(node),
        gpu_faults=None if joined is None else joined.gpu_faults,
        memory_bytes=None if joined is None else joined.memory_bytes,
    )


def is_head_or_control(node: Mapping[str, Any]) -> bool:
    return bool({HEAD_RESOURCE, CONTROL_RESOURCE} & node["Resources"].keys())


def _schedulable(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources except for Ray's internal resources, such as the object store."""
    return {
        name: amount
        for name, amount in resources.items()
        if name in ("CPU", "GPU", "memory") or name.startswith("accelerator_type:")
    }


def _labels(node: Mapping[str, Any], *, has_silo_source: bool) -> dict[str, str]:
    """Return a node's Ray labels except for the label with its id. `SILO_LABEL` is added if the
    node has a silo's source."""
    labels = {SILO_LABEL: "true"} if has_silo_source else {}
    labels |= node.get("Labels") or {}
    return {key: value for key, value in labels.items() if key != NODE_ID_LABEL}


def _leaving(drained_by: float) -> str:
    reason = f"{DRAINED}: Ray was asked to remove it"
    try:
        return f"{reason} at {datetime.fromtimestamp(drained_by, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError):  # such as `math.inf`
        return reason
