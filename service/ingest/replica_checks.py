"""Stores the results of comparisons of a model's replicas, and withholds the nodes of the ranks at
fault."""

from __future__ import annotations

from collections.abc import Sequence
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
        found += (
            "; there was no majority of equal replicas, so it is not known which replica is wrong"
        )
    last = attempt.checked_step
    found += (
        "; no earlier comparison of this attempt showed equal replicas"
        if last is None
        else f"; they were last equal after step {last}"
    )
    held = [] if report.is_drill else _withhold(session, job, attempt, report.culprits, now)
    data = {
        "step": report.step,
        "checked_step": last,
        "culprits": report.body()["culprits"],
        "withheld": held,
    }
    remark(session, job, type_=DIFFER, code=DIFFER, message=found, now=now, data=data)


def _named(one: Culprit) -> str:
    return f"rank {one.rank} on {one.hostname} ({one.device})"


def _withhold(
    session: Session,
    job: JobRow,
    attempt: AttemptRow,
    culprits: Sequence[Culprit],
    now: datetime,
) -> list[str]:
    """Withhold the nodes of the ranks at fault, and return the names of these hosts, except for
    hosts on which the attempt has no slots."""
    node_ids = [part["node_id"] for part in attempt.slices]
    hosts = set(cluster_repository.hostnames(session, node_ids).values())
    on_host: dict[str, list[Culprit]] = {}
    for one in culprits:
        if one.hostname in hosts:
            on_host.setdefault(one.hostname, []).append(one)
    mark = f"{job.id}:{attempt.attempt}"
    for hostname, found in on_host.items():
        ranks = ", ".join(f"rank {one.rank} ({one.device})" for one in found)
        reason = (
            f"after step {attempt.corrupted_step} of {job.id}, the "
            f"{'replica' if len(found) == 1 else 'replicas'} of {ranks} differed from the majority"
        )
        is_cpu = any(one.device == "cpu" for one in found)
        code = withholding.FAULTY_CPU if is_cpu else DIFFER
        withholding.withhold(session, hostname, reason, code=code, now=now, mark=mark)
    return list(on_host)
