"""Quarantined slots, which can't be used because a process of an ended job is still alive on
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from ray_workers.shared.frame_fields import clean
from ray_workers.shared.quarantine import Quarantined
from service.cluster.port import ClusterNode
from service.db.repositories import jobs as repository
from service.lifecycle.transitions import remark

QUARANTINED = "slot_quarantined"
RELEASED = "slot_released"

Stored = Mapping[str, Sequence[Mapping[str, Any]]]
"""The quarantined slots of each node, by node id: `Quarantined` as JSON."""


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
        end = f"on {node} have ended" if node else "vanished with their node"
        message = f"the processes that were left on {_slots(old[key]['slots'])} {end}"
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
