"""The runs of schedules: their times and jobs, overlapping and missed runs, and refused runs."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from sqlalchemy import select

from dray.views import JobState
from service.db.models import JobDependencyRow
from service.domain.errors import RunUnfinished
from tests.unit.service.helpers import events_of
from tests.unit.service.schedules.scheduled import ADMIN, ANN, MIDNIGHT, SCRIPT, Scheduled

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


async def test_a_job_is_submitted_at_each_time_and_knows_it(scheduled: Scheduled) -> None:
    schedule_id = await scheduled.create(cron="30 2 * * *", time_zone="Europe/Berlin")
    at = datetime.fromisoformat("2027-03-01T02:30:00+01:00")
    assert await scheduled.runner.run_once() == (at - MIDNIGHT).total_seconds()
    await scheduled.until(at - timedelta(milliseconds=1))
    assert await scheduled.jobs_of() == []
    await scheduled.until(at)
    (job,) = await scheduled.jobs_of(schedule_id)
    assert (job.owner, job.name, job.schedule_id) == ("ann", "night", schedule_id)
    assert job.scheduled_at == at
    assert job.scheduled_at.isoformat() == "2027-03-01T02:30:00+01:00"
    (event,) = await events_of(scheduled, job.id)
    assert event.message == (
        "submitted to the queue 'default' by the schedule 'night' for 2027-03-01T02:30:00+01:00"
    )
    spec = scheduled.claim(job.id)
    assert spec is not None
    assert spec.scheduled_at == "2027-03-01T02:30:00+01:00"
    (run,) = await scheduled.runs()
    assert (run.at, run.outcome, run.job_id) == (at, "submitted", job.id)
    assert (await scheduled.schedules.get("night", ANN)).last_run == run


@pytest.mark.parametrize("overlap", ["skip", "queue", "replace"])
async def test_runs_that_would_overlap(scheduled: Scheduled, overlap: str) -> None:
    await scheduled.create(overlap=overlap, job={**SCRIPT, "array": {"size": 2}})
    for hour in (1, 2, 3):
        await scheduled.until(MIDNIGHT + HOUR * hour)
    jobs = await scheduled.jobs_of()
    arrays = list(dict.fromkeys(job.array_id for job in jobs))
    runs = await scheduled.runs()
    if overlap == "skip":
        assert [run.outcome for run in runs] == ["submitted", "skipped", "skipped"]
        assert runs[1].message == f"{arrays[0]}, the previous run, had not ended"
        with pytest.raises(RunUnfinished, match="has not ended"):
            await scheduled.schedules.run_now("night", ANN, actor="ann")
        return
    assert [run.outcome for run in runs] == ["submitted"] * 3
    assert [run.array_id for run in runs] == arrays
    states = [{job.state for job in jobs if job.array_id == array} for array in arrays]
    if overlap == "replace":
        assert states == [{JobState.CANCELLED}, {JobState.CANCELLED}, {JobState.QUEUED}]
        assert jobs[0].reason.message == "cancelled by the schedule night before the job started"
    else:
        assert states == [{JobState.QUEUED}] * 3
        rows = select(JobDependencyRow.waiter, JobDependencyRow.after_id)
        waits = {
            tuple(row) for row in scheduled.database.read_sync(lambda s: s.execute(rows).all())
        }
        first, second, third = arrays
        assert waits == {(second, first), (third, first), (third, second)}
    for array in arrays[:2]:
        await scheduled.jobs.arrays.cancel(str(array))
    assert [job.state for job in await scheduled.jobs_of()][4:] == [JobState.QUEUED] * 2
    await scheduled.until(MIDNIGHT + HOUR * 4 - MINUTE)
    assert len(await scheduled.runs()) == 3


async def test_an_admin_sees_all_schedules_and_others_only_their_own(scheduled: Scheduled) -> None:
    schedule_id = await scheduled.create()
    assert (await scheduled.schedules.get(schedule_id, ADMIN)).name == "night"
    assert [one.id for one in (await scheduled.schedules.list(ADMIN)).items] == [schedule_id]
