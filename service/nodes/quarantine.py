"""Quarantined slots, which can't be used because a process of an ended job is still alive on them,
or because their node is faulty. Slots of faulty nodes are quarantined until an administrator
releases them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from ray_workers.shared.frame_fields import clean
from ray_workers.shared.quarantine import Quarantined
from service.cluster.port import ClusterNode, ClusterSnapshot
from service.db.repositories import jobs as repository
from service.db.repositories.scheduling import cluster as cluster_repository
from service.lifecycle.transitions import remark

QUARANTINED = "slot_quarantined"
RELEASED = "slot_released"

Stored = Mapping[str, Sequence[Mapping[str, Any]]]
"""The quarantined slots of each node, by node id: `Quarantined` as JSON."""


def with_withheld(session: Session, cluster: ClusterSnapshot) -> ClusterSnapshot:
    """Return the snapshot with the withheld slots of each node among its quarantined slots; the
    same object if no slots are withheld."""
    rows = cluster_repository.withheld_slots(session)
    if not rows:
        return cluster
    by_node: dict[str, list[Quarantined]] = {}
    for row in rows:
        entry = Quarantined(
            *(row.job_id, row.attempt, row.slots, row.resources, row.reason),
            row.since.timestamp(),
        )
        by_node.setdefault(row.node_id, []).append(entry)
    nodes = [_with_entries(node, by_node.get(node.node_id, ())) for node in cluster.nodes]
    return replace(cluster, nodes=tuple(nodes))


def _with_entries(node: ClusterNode, entries: Sequence[Quarantined]) -> ClusterNode:
    if not entries:
        return node
    keys = {(entry.job_id, entry.attempt) for entry in entries}
    others = [one for one in node.quarantined or () if (one.job_id, one.attempt) not in keys]
    return replace(node, quarantined=(*others, *entries))


def as_stored(nodes: Sequence[ClusterNode], before: Stored) -> dict[str, list[dict[str, Any]]]:
    """Return the quarantined slots of each node; unchanged for a node that did not report."""
    return {
        node.node_id: [dict(entry) for entry in before.get(node.node_id, ())]
        if node.quarantined is None
        else [asdict(entry) | {"reason": clean(entry.reason)} for entry in node.quarantined]
        for node in nodes
    }


def as_viewed(stored: Sequence[Mapping[str, Any]]) -> list[views.QuarantinedSlots]:
    return [
        views.QuarantinedSlots(
            slots=entry["slots"],
            reason=entry["reason"],
            since=datetime.fromtimestamp(entry["since"], UTC),
            job_id=entry["job_id"],
        )
        for entry in stored
    ]


def with_kept(held: Mapping[str, float], entries: Sequence[Quarantined]) -> dict[str, float]:
    """Return the resources held on a node, including quarantined resources."""
    amounts = dict(held)
    for entry in entries:
        for name, amount in entry.resources.items():
            amounts[name] = amounts.get(name, 0.0) + amount
    return amounts


def add_events(
    session: Session, before: Stored, after: Stored, hostnames: Mapping[str, str], now: datetime
) -> None:
    """Add events for slots that entered or left quarantine.

    If a node is lost, the quarantine of its slots also ends.
    """
    old, new = _by_key(before), _by_key(after)
    for key in new.keys() - old.keys():
        slots, reason = _slots(new[key]["slots"]), new[key]["reason"]
        message = f"{slots} on {hostnames[key[0]]} can't be given to other jobs yet: {reason}"
        _add_event(session, key, QUARANTINED, message, new[key], now)
    for key in old.keys() - new.keys():
        node = hostnames.get(key[0])
        end = f"on {node} can be used again" if node else "vanished with their node"
        message = f"the quarantined slots ({_slots(old[key]['slots'])}) {end}"
        _add_event(session, key, RELEASED, message, old[key], now)


def _by_key(stored: Stored) -> dict[tuple[str, str, int], Mapping[str, Any]]:
    return {
        (node_id, entry["job_id"], entry["attempt"]): entry
        for node_id, entries in stored.items()
        for entry in entries
    }


def _add_event(
    session: Session,
    key: tuple[str, str, int],
    code: str,
    message: str,
    entry: Mapping[str, Any],
    now: datetime,
) -> None:
    node_id, job_id, attempt = key
    job = repository.lock(session, job_id)
    if job is None:
        return  # deleted in the meantime
    data = {"node_id": node_id, "attempt": attempt, "slots": entry["slots"]}
    remark(session, job, type_=code, code=code, message=message, now=now, data=data)


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"
