"""Stores the results of comparisons of a model's replicas, and withholds the nodes of culprits."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Session

from ray_workers.shared.frames import Culprit, ReplicasReport
from service.db.models import AttemptRow, JobRow
from service.db.repositories.scheduling import cluster as cluster_repository
from service.lifecycle import withholding
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
        "withheld": list(dict.fromkeys(hostname for hostname in held if hostname is not None)),
    }
    remark(session, job, type_=DIFFER, code=DIFFER, message=found, now=now, data=data)


def _named(one: Culprit) -> str:
    return f"rank {one.rank} on {one.hostname} ({one.device})"


def _withhold(
    session: Session, job: JobRow, attempt: AttemptRow, culprit: Culprit, now: datetime
) -> str | None:
    """Withhold the node of a culprit, and return its host name; None if the attempt has no slots on
    such a node."""
    node_ids = [part["node_id"] for part in attempt.slices]
    if culprit.hostname not in cluster_repository.hostnames(session, node_ids).values():
        return None
    reason = (
        f"after step {attempt.corrupted_step} of {job.id}, the replica of rank {culprit.rank} "
        f"({culprit.device}) differed from the majority"
    )
    mark = f"{job.id}:{attempt.attempt}"
    code = withholding.FAULTY_CPU if culprit.device == "cpu" else DIFFER
    withholding.withhold(session, culprit.hostname, reason, code=code, now=now, mark=mark)
    return culprit.hostname
