"""Stores reports about the open round of a federated job, and lists clients that have not
responded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from ray_workers.shared import round_files
from ray_workers.shared.frames import RoundReport, SiloRoundReport
from service.db.models import AttemptRow, FederatedRoundRow, JobRow
from service.db.notifications import rounds_of
from service.db.repositories import federation as repository
from service.db.session import notify
from service.ingest.decoding import BadFrame
from service.lifecycle.resizing import HOLDING

MAX_MISSING = 100
MAX_NAMED = 10
"""Maximum number of missing clients that `sentence` names."""


def store(
    session: Session, job: JobRow, attempt: AttemptRow, report: RoundReport, at: datetime
) -> None:
    """Store the newest state of a round, reported at `at`.

    Raises BadFrame for a job without clients outside of the cluster.
    """
    federated = job.spec.get("federated") or {}
    if federated.get("http") is None:
        raise BadFrame("the job has no clients outside of the cluster")
    before = repository.newest_round(session, job.id)
    is_same = before is not None and (before.name, before.attempt) == (report.name, attempt.attempt)
    # Each phase of secure aggregation has its own deadline.
    is_new_phase = report.is_open and before is not None and report.awaits != before.awaits
    if report.is_open and not is_same:
        # After a restart, the storage contains only complete updates, so allow clients to resend
        # partial updates.
        repository.forget_sent(session, job.id, report.name, report.received)
    closes_at = at + timedelta(seconds=report.deadline_s)
    if before is not None and is_same and not is_new_phase:
        closes_at = before.closes_at
    body = {k: v for k, v in report.body().items() if k not in ("deadline_s", "received")}
    row = FederatedRoundRow(job_id=job.id, attempt=attempt.attempt, closes_at=closes_at, **body)
    repository.put_round(session, row)
    notify(session, rounds_of(job.id))


def store_of_silos(job: JobRow, attempt: AttemptRow, report: SiloRoundReport, at: datetime) -> None:
    """Store the state of an open round of silos, or the end of the round, as reported at `at`.

    Raises BadFrame for a silo that the job does not have.
    """
    silos = (job.spec.get("federated") or {}).get("silos") or []
    if any(index >= len(silos) for index in report.missing):
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


def sent_name(name: str, awaits: str) -> str:
    """Return the `sent_round` of a client that has responded in the round with this name."""
    return name if awaits == round_files.UPDATE else f"{name}/{awaits}"


def missing(session: Session, job: JobRow, newest: FederatedRoundRow) -> list[int]:
    """Return the numbers of the clients that were asked for an update and have not responded."""
    name = sent_name(newest.name, newest.awaits)
    return sorted(set(_asked(job, newest)) - repository.senders(session, job.id, name))


def _asked(job: JobRow, newest: FederatedRoundRow) -> Sequence[int]:
    return range(job.spec["federated"]["clients"]) if newest.clients is None else newest.clients


def of_job(session: Session, job: JobRow, attempt: AttemptRow | None) -> views.OpenRound | None:
    """Return the open round of the job, or None if no round is known to be open."""
    federated = job.spec.get("federated") or {}
    if attempt is None or job.state not in HOLDING:
        return None
    if federated.get("silos") and attempt.silo_round is not None:
        return _of_silos([silo["name"] for silo in federated["silos"]], attempt.silo_round)
    if federated.get("http") is None:
        return None
    newest = repository.newest_round(session, job.id)
    if newest is None or not newest.is_open or newest.attempt != attempt.attempt:
        return None
    numbers = missing(session, job, newest)
    return views.OpenRound(
        number=newest.number,
        awaits=newest.awaits,
        missing=[str(number) for number in numbers[:MAX_MISSING]],
        num_missing=len(numbers),
        num_answered=len(_asked(job, newest)) - len(numbers),
        quorum=newest.quorum,
        closes_at=newest.closes_at,
    )


def _of_silos(names: Sequence[str], row: Mapping[str, Any]) -> views.OpenRound:
    lacking = [names[index] for index in row["missing"]]
    return views.OpenRound(
        number=row["number"],
        awaits=round_files.UPDATE,
        missing=lacking[:MAX_MISSING],
        num_missing=len(lacking),
        num_answered=len(names) - len(lacking),
        quorum=row["quorum"],
        closes_at=row["closes_at"] and datetime.fromisoformat(row["closes_at"]),
    )


def sentence(job: JobRow, found: views.OpenRound | None, now: datetime) -> str:
    """Return a sentence about the clients that the round is waiting for, and about its deadline.
    The sentence is empty if the round is not waiting for clients."""
    if found is None or not found.num_missing:
        return ""
    one = "silo" if job.spec["federated"].get("silos") else "client"
    names = ", ".join(found.missing[:MAX_NAMED])
    if found.num_missing > MAX_NAMED:
        names += f" and {found.num_missing - MAX_NAMED} more"
    phase = "" if found.awaits == round_files.UPDATE else f" in {found.awaits}"
    num_asked = found.num_answered + found.num_missing
    waits = (
        f"round {found.number} waits{phase} for {one}{'s' if found.num_missing > 1 else ''} "
        f"{names}, and has received responses from {found.num_answered} of {num_asked}"
    )
    if found.closes_at is None:
        return waits
    left_s = (found.closes_at - now).total_seconds()
    enough = f"{found.quorum} {'response is' if found.quorum == 1 else 'responses are'} enough"
    when = (
        f"at the deadline, in {left_s:.0f} s" if left_s > 0 else "now that the deadline has passed"
    )
    return f"{waits}: {enough} {when}"
