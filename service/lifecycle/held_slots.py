"""The slot-seconds that an attempt held on each node, with the labels that the node had.

The slot-seconds are counted up to `held_until`. `settle` adds the time since then, and is called
before each change of the attempt's slices. Labels are stored, because the labels of a lost node
can't be read any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ray_workers.shared.slices import Slice
from service.db.models import AttemptRow
from service.domain.costs.prices import HeldOnNode


def on_nodes(slices: Sequence[Slice], labels: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return `AttemptRow.held` for an attempt that gets these slices. `labels` maps node ids to
    labels."""
    return {
        part.node_id: {"labels": labels.get(part.node_id, {}), "slot_seconds": 0.0}
        for part in slices
    }


def settle(attempt: AttemptRow, at: datetime) -> None:
    """Count the slots that the attempt has held up to this time. Does nothing before the attempt
    has its slots, or if this time is already counted."""
    since = attempt.held_until or attempt.started_at
    if since is None or at <= since:
        return
    held, sizes = dict(attempt.held or {}), attempt.sizes or []
    num_slots = sum(part["num_workers"] for part in attempt.slices)
    if not sizes or sizes[-1][1] != num_slots:
        attempt.sizes = [*sizes, [since.timestamp(), num_slots]]
    for part in attempt.slices:
        node_id, num_workers = part["node_id"], part["num_workers"]
        before = held.get(node_id, {"labels": {}, "slot_seconds": 0.0})
        seconds = before["slot_seconds"] + num_workers * (at - since).total_seconds()
        held[node_id] = {**before, "slot_seconds": seconds}
    attempt.held, attempt.held_until = held, at


def of(attempt: AttemptRow) -> list[HeldOnNode]:
    """Return the slot-seconds counted so far."""
    held = (attempt.held or {}).values()
    return [HeldOnNode(each["labels"], each["slot_seconds"]) for each in held]
