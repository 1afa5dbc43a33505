"""State transitions that are too late, or for jobs that have no time left."""

from __future__ import annotations

from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import JobRow
from service.db.repositories import jobs as repository
from service.domain.states import Trigger
from service.lifecycle import transitions
from tests.unit.service.helpers import Service


def store(service: Service, job_id: str, changed: dict[str, Any]) -> None:
    """Change the document as if it had been stored by another release."""

    def change(session: Session) -> None:
        row = repository.lock(session, job_id)
        assert row is not None
        row.spec = row.spec | changed

    service.database.write_sync(change)


async def test_a_move_from_a_state_that_is_no_more_changes_nothing(service: Service) -> None:
    job_id = await service.submit()

    def races(session: Session) -> bool:
        row = repository.get(session, job_id)
        assert row is not None
        session.execute(
            update(JobRow)
            .where(JobRow.id == job_id)
            .values(attempt=1)
            .execution_options(synchronize_session=False)
        )
        return transitions.move(
            session,
            row,
            Trigger.CANCEL,
            code="cancelled_by_user",
            message="too late",
            now=service.now,
        )

    assert not service.database.write_sync(races)
    assert (await service.jobs.get(job_id)).state is JobState.QUEUED
    assert [e.code for e in (await service.queries.events(job_id)).items] == ["submitted"]


async def test_a_job_without_running_time_left_is_not_claimed_but_fails(service: Service) -> None:
    job_id = await service.submit(max_runtime_s=5)

    def spend(session: Session) -> None:
        row = repository.lock(session, job_id)
        assert row is not None
        row.runtime_used_s = 5.0

    service.database.write_sync(spend)
    assert service.claim(job_id) is None
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == (JobState.FAILED, "runtime_exceeded")


async def test_a_job_that_this_release_refuses_is_not_claimed_but_fails(service: Service) -> None:
    """The document was stored by another release with different rules."""
    job_id = await service.submit()
    store(service, job_id, {"schedule": "lottery"})
    assert service.claim(job_id) is None
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code, job.attempt) == (JobState.FAILED, "document_refused", 0)
    assert "rejects the job document: /schedule there is no field 'schedule'" in job.reason.message


async def test_a_job_of_a_newer_release_is_not_claimed_but_fails(service: Service) -> None:
    job_id = await service.submit()
    store(service, job_id, {"version": 99})
    assert service.claim(job_id) is None
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == (JobState.FAILED, "document_refused")
    assert "use a newer release" in job.reason.message
    assert job.spec["version"] == 99


async def test_a_claim_of_a_job_that_moved_on_is_lost(service: Service) -> None:
    job_id = await service.submit()
    assert service.claim(job_id, attempt_seen=7) is None
    assert service.claim("job-that-is-not-there") is None
    assert service.claim(job_id) is not None
    assert service.claim(job_id) is None
