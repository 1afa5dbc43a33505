"""Stores the results of comparisons of a model's replicas, and quarantines slots of culprits."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Session

from ray_workers.shared.frames import Culprit, ReplicasReport
from service.db.models import AttemptRow, JobRow, WithheldSlotsRow
from service.db.repositories.scheduling import cluster as cluster_repository
from service.lifecycle.transitions import remark

DIFFER = "replicas_differ"
"""Type and code of the event."""


def take(
    session: Session, job: JobRow, attempt: AttemptRow, report: ReplicasReport, now: datetime
) -> None:
    """Store the report. Repeated reports of the same difference change nothing."""
    if not report.num_differing:
        attempt.checked_step = max(attempt.checked_step or 0, report.step)
        return
    if attempt.corrupted_step is not None:
        return
    attempt.corrupted_step = report.step
    found = f"after step {report.step}, the replicas of the model differed"
    if report.culprits:
        named = ", ".join(_named(one) for one in report.culprits)
        found += f"; different from the majority: {named}"
    else:
        found += "; no majority of them was equal, so the wrong replica is not known"
    last = attempt.checked_step
    found += (
        "; no earlier comparison of this attempt showed equal replicas"
        if last is None
        else f"; they were last equal after step {last}"
    )
    held = (
        []
        if report.is_drill
        else [_withhold(session, job, attempt, one, now) for one in report.culprits]
    )
    data = {
        "step": report.step,
        "checked_step": last,
        "culprits": report.body()["culprits"],
        "quarantined": [node_id for node_id in held if node_id is not None],
    }
    remark(session, job, type_=DIFFER, code=DIFFER, message=found, now=now, data=data)


def _named(one: Culprit) -> str:
    return f"rank {one.rank} on {one.hostname} ({one.device})"


def _withhold(
    session: Session, job: JobRow, attempt: AttemptRow, culprit: Culprit, now: datetime
) -> str | None:
    """Quarantine the slots of a culprit, and return the node's id; None if the node is unknown.

    On a node with GPUs, all slots of the job's kind are quarantined, because Ray chooses the GPU of
    a slot, and might choose the faulty GPU.
    """
    held_on = {part["node_id"] for part in attempt.slices}
    on_host = cluster_repository.nodes_of_host(session, culprit.hostname)
    node = next((row for row in on_host if row.node_id in held_on), None)
    if node is None:
        return None
    bundle = {name: float(amount) for name, amount in job.bundle.items()}
    slots, resources = 1, bundle
    if bundle.get("GPU"):
        slots = max(1, int(node.total.get("GPU", 0.0) // bundle["GPU"]))
        resources = {"GPU": float(node.total.get("GPU", 0.0))}
    reason = (
        f"after step {attempt.corrupted_step}, the replica of rank {culprit.rank} "
        f"({culprit.device}) differed from the majority"
    )
    row = WithheldSlotsRow(
        node_id=node.node_id,
        job_id=job.id,
        attempt=attempt.attempt,
        slots=slots,
        resources=resources,
        reason=reason,
        since=now,
    )
    cluster_repository.withhold(session, row)
    return node.node_id
