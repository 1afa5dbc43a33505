"""Storing the rounds that the rank reports that aggregates for clients with data of their own."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from ray_workers.shared.frames import RoundReport, SiloRoundReport
from service.db.models import AttemptRow, FederatedRoundRow, JobRow
from service.db.notifications import rounds_of
from service.db.repositories import federation as repository
from service.db.session import notify
from service.ingest.frame_checks import BadFrame


def store(
    session: Session, job: JobRow, attempt: AttemptRow, report: RoundReport, at: datetime
) -> None:
    """Store the newest state of a round. BadFrame of a job without such clients.

    at: when it was reported.
    """
    federated = job.spec.get("federated") or {}
    if federated.get("http") is None:
        raise BadFrame("the job has no clients outside of the cluster")
    before = repository.newest_round(session, job.id)
    is_same = before is not None and (before.name, before.attempt) == (report.name, attempt.attempt)
    # Each phase of secure aggregation has a deadline of its own.
    is_new_phase = report.is_open and before is not None and report.awaits != before.awaits
    if report.is_open and not is_same:
        # After a restart the storage tells what has come in, and not what was begun.
        repository.forget_sent(session, job.id, report.name, report.received)
    closes_at = at + timedelta(seconds=report.deadline_s)
    if before is not None and is_same and not is_new_phase:
        closes_at = before.closes_at
    told = {k: v for k, v in report.body().items() if k not in ("deadline_s", "received")}
    row = FederatedRoundRow(job_id=job.id, attempt=attempt.attempt, closes_at=closes_at, **told)
    repository.put_round(session, row)
    notify(session, rounds_of(job.id))


def store_of_silos(job: JobRow, attempt: AttemptRow, report: SiloRoundReport, at: datetime) -> None:
    """Note the open round of silos, or its end. BadFrame for a silo that the job has not.

    at: when it was reported.
    """
    silos = (job.spec.get("federated") or {}).get("silos") or []
    if any(place >= len(silos) for place in report.missing):
        raise BadFrame("the job has no such silo")
    if not report.missing:
        attempt.silo_round = None
        return
    left = report.ends_in_s
    attempt.silo_round = {
        "number": report.number,
        "missing": list(report.missing),
        "quorum": report.quorum,
        "closes_at": None if left is None else (at + timedelta(seconds=left)).isoformat(),
    }
