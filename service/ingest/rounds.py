"""Storing the rounds that the rank reports that aggregates for clients outside of the cluster."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from ray_workers.shared.frames import RoundReport
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
    row = FederatedRoundRow(
        job_id=job.id,
        attempt=attempt.attempt,
        number=report.number,
        name=report.name,
        is_open=report.is_open,
        clients=None if report.clients is None else list(report.clients),
        quorum=report.quorum,
        closes_at=closes_at if before is None or not is_same or is_new_phase else before.closes_at,
        num_elements=report.num_elements,
        awaits=report.awaits,
        update_bytes=report.update_bytes,
        model_sha256=report.model_sha256,
        model_size_bytes=report.model_size_bytes,
        form_sha256=report.form_sha256,
        form_size_bytes=report.form_size_bytes,
    )
    repository.put_round(session, row)
    notify(session, rounds_of(job.id))
