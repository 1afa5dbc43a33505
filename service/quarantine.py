"""What the jobs are told of slots that are kept from use because something of them is not gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from ray_workers.quarantine import Quarantined
from service.cluster.port import ClusterNode
from service.db.models import NodeRow
from service.db.repositories import jobs as repository
from service.domain.text import clean
from service.transitions import remark

QUARANTINED = "slot_quarantined"
RELEASED = "slot_released"

Known = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""By node, job and attempt: what is stored of a quarantine."""


def as_stored(entries: Sequence[Quarantined]) -> list[dict[str, Any]]:
    return [asdict(entry) | {"reason": clean(entry.reason)} for entry in entries]


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


def known(rows: Sequence[NodeRow]) -> Known:
    return {
        (row.node_id, entry["job_id"], entry["attempt"]): entry
        for row in rows
        for entry in row.quarantined
    }


def tell(session: Session, before: Known, nodes: Sequence[ClusterNode], now: datetime) -> None:
    """Events for what came into quarantine and what left it since `before`.

    With a node that is lost its quarantines end, too: there is nothing left to keep.
    """
    hosts = {node.node_id: node.hostname for node in nodes}
    after = {
        (node.node_id, entry.job_id, entry.attempt): asdict(entry)
        for node in nodes
        for entry in node.quarantined
    }
    for key in after.keys() - before.keys():
        entry = after[key]
        message = (
            f"{_slots(entry['slots'])} on {hosts[key[0]]} can't be given to others yet: "
            f"{clean(entry['reason'])}"
        )
        _say(session, key, QUARANTINED, message, entry, now)
    for key in before.keys() - after.keys():
        where = f"on {hosts[key[0]]} is clean" if key[0] in hosts else "went with its node"
        message = f"what was left of {_slots(before[key]['slots'])} {where}"
        _say(session, key, RELEASED, message, before[key], now)


def _say(
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
        return  # deleted meanwhile
    data = {"node_id": node_id, "attempt": attempt, "slots": entry["slots"]}
    remark(session, job, type_=code, code=code, message=message, now=now, data=data)


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"
