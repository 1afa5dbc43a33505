"""The runs of schedules: their times and jobs, overlapping and missed runs, and refused runs."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from dray.reservations import ReservationRequest
from dray.spec import JobSpec
from dray.views import JobState
from service.db.models import CodeRow, JobDependencyRow, ScheduleRow
from service.db.repositories.submission import code as code_repository
from service.db.session import Database
from service.domain.errors import CodeUnfit, OwnerUnknown, RunUnfinished, StorageUnavailable
from service.jobs.service import PreparedDocument
from service.loops import schedule_runner
from service.queues.reservations import Reservations
from service.storage.storage import Storage
from tests.unit.service.helpers import events_of
from tests.unit.service.schedules.scheduled import ADMIN, ANN, MIDNIGHT, SCRIPT, Scheduled
from tests.unit.service.webhooks.hooked import set_tokens

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


@pytest.mark.parametrize("is_deleted", [False, True])
@pytest.mark.parametrize("overlap", ["skip", "queue", "replace"])
async def test_a_run_that_missed_its_reservation_stops_no_later_run(
    scheduled: Scheduled, overlap: str, is_deleted: bool
) -> None:
    reservations = Reservations(scheduled.database)

    async def reserve(begins_at: datetime) -> None:
        wanted = {"name": "class", "duration_s": 5400, "users": ["ann"], "nodes": ["node-a"]}
        wanted["begin_at"] = begins_at.isoformat()
        await reservations.create(ReservationRequest.model_validate(wanted))

    await reserve(MIDNIGHT + MINUTE)
    job = {**SCRIPT, "array": {"size": 2}, "reservation": "class"}
    await scheduled.create(job=job, overlap=overlap)
    await scheduled.until(MIDNIGHT + HOUR)
    first, second = await scheduled.jobs_of()
    await scheduled.change(second.id, document={"reservation": None})
    if is_deleted:
        await reservations.delete("class")
    await scheduled.until(MIDNIGHT + HOUR * 2)
    first, second = (await scheduled.jobs_of())[:2]
    assert second.reason.code != "reservation_missed"
    assert first.reason.code == "reservation_missed"
    await scheduled.until(MIDNIGHT + HOUR * 2 + MINUTE)
    if not second.state.is_terminal:
        await scheduled.jobs.cancel(second.id)
    await reserve(MIDNIGHT + HOUR * 3 - MINUTE)
    await scheduled.until(MIDNIGHT + HOUR * 3)
    first, second, *later = await scheduled.jobs_of()
    assert (first.state, first.reason.code) == (JobState.CANCELLED, "reservation_missed")
    assert first.reason.message == (
        "never started: its reservation 'class' has ended or was deleted, and the next run of the "
        "schedule 'night' is due"
    )
    event = (await events_of(scheduled, first.id))[-1]
    assert (event.code, event.message) == (first.reason.code, first.reason.message)
    assert [job.state for job in later] == [JobState.QUEUED] * 2
    rows = select(JobDependencyRow.waiter)
    assert scheduled.database.read_sync(lambda s: s.scalars(rows).all()) == []
    assert (await scheduled.outcomes())[-1] == ("01 03:00", "submitted")


async def test_an_admin_sees_all_schedules_and_others_only_their_own(scheduled: Scheduled) -> None:
    schedule_id = await scheduled.create()
    assert (await scheduled.schedules.get(schedule_id, ADMIN)).name == "night"
    assert [one.id for one in (await scheduled.schedules.list(ADMIN)).items] == [schedule_id]


@pytest.mark.parametrize(
    ("missed", "deadline_s", "outcomes"),
    [
        ("last", None, ["3 missed", "submitted"]),
        ("last", 1200, ["4 missed"]),
        ("last", 1800, ["3 missed", "submitted"]),
        ("skip", None, ["4 missed"]),
        ("skip", 1800, ["3 missed", "submitted"]),
        ("all", None, ["submitted"] * 4),
        ("all", 5400, ["2 missed", "submitted", "submitted"]),
    ],
)
async def test_runs_that_were_missed(
    scheduled: Scheduled, missed: str, deadline_s: int | None, outcomes: list[str]
) -> None:
    await scheduled.create(missed=missed, deadline_s=deadline_s, overlap="queue")
    await scheduled.until(MIDNIGHT + HOUR * 4.5)
    found = [
        f"{(run.message or '').split()[0]} missed" if run.outcome == "missed" else str(run.outcome)
        for run in await scheduled.runs()
    ]
    assert found == outcomes
    assert len(await scheduled.jobs_of()) == outcomes.count("submitted")


async def test_a_year_of_missed_minutes_is_decided_at_once(scheduled: Scheduled) -> None:
    await scheduled.create(cron="* * * * *", missed="all", overlap="replace")
    scheduled.now += timedelta(days=365)
    await scheduled.until(scheduled.now)
    jobs = await scheduled.jobs_of()
    assert len(jobs) == 100
    assert jobs[-1].scheduled_at == scheduled.now
    times = [job.scheduled_at for job in jobs]
    assert times == [scheduled.now - MINUTE * n for n in reversed(range(100))]


@pytest.mark.parametrize(
    ("missed", "outcomes"), [("last", ["missed", "submitted"]), ("skip", ["missed"])]
)
async def test_a_pause_counts_as_missed(
    scheduled: Scheduled, missed: str, outcomes: list[str]
) -> None:
    await scheduled.create(missed=missed)
    paused = await scheduled.change_schedule("night", paused=True)
    assert (paused.paused, paused.next_times) == (True, [])
    await scheduled.until(MIDNIGHT + HOUR * 3 + MINUTE)
    assert await scheduled.runs() == []
    resumed = await scheduled.change_schedule("night", paused=False)
    assert not resumed.paused
    await scheduled.until(scheduled.now)
    assert [run.outcome for run in await scheduled.runs()] == outcomes


async def test_a_change_applies_to_later_times_and_leaves_jobs_alone(scheduled: Scheduled) -> None:
    await scheduled.create(overlap="queue")
    await scheduled.until(MIDNIGHT + HOUR)
    await scheduled.change_schedule("night", paused=True)
    scheduled.now = MIDNIGHT + HOUR * 5.5
    changed = await scheduled.change_schedule(
        "night", cron="*/20 * * * *", time_zone="Asia/Kathmandu", job={**SCRIPT, "name": "day"}
    )
    assert changed.paused
    resumed = await scheduled.change_schedule("night", paused=False)
    assert resumed.next_times[0].isoformat() == "2027-03-01T11:20:00+05:45"
    await scheduled.until(MIDNIGHT + HOUR * 5.6)
    assert [job.name for job in await scheduled.jobs_of()] == ["night", "day"]


async def test_a_clock_that_is_set_back_repeats_no_run(scheduled: Scheduled) -> None:
    await scheduled.create(overlap="queue")
    for hour in (1, 2, 1, 1.5, 2, 2.5, 3):
        await scheduled.until(MIDNIGHT + HOUR * hour)
    await scheduled.change_schedule("night", cron="0 */1 * * *")
    await scheduled.until(MIDNIGHT + HOUR * 3)
    hours = [job.scheduled_at and job.scheduled_at.hour for job in await scheduled.jobs_of()]
    assert hours == [1, 2, 3]


async def test_a_refused_run_is_recorded_and_the_next_one_is_tried(scheduled: Scheduled) -> None:
    await scheduled.queue("night", max_queued=1)
    await scheduled.create(job={**SCRIPT, "queue": "night"}, overlap="queue")
    other = await scheduled.submit(queue="night")
    await scheduled.until(MIDNIGHT + HOUR)
    (run,) = await scheduled.runs()
    assert run.outcome == "refused"
    assert run.problem is not None
    assert (run.problem.code, run.problem.pointer) == ("queue_full", "/queue")
    assert run.message == run.problem.detail
    await scheduled.finish(other)
    await scheduled.until(MIDNIGHT + HOUR * 2)
    assert [run.outcome for run in await scheduled.runs()] == ["refused", "submitted"]


async def test_a_replaced_job_continues_if_the_new_one_is_refused(scheduled: Scheduled) -> None:
    await scheduled.queue("gone")
    await scheduled.create(job={**SCRIPT, "queue": "gone"}, overlap="replace")
    await scheduled.until(MIDNIGHT + HOUR)
    await scheduled.change((await scheduled.jobs_of())[0].id, queue="default")
    await scheduled.queues.delete("gone")
    await scheduled.until(MIDNIGHT + HOUR * 2)
    assert [run.outcome for run in await scheduled.runs()] == ["submitted", "refused"]
    assert [job.state for job in await scheduled.jobs_of()] == [JobState.QUEUED]


async def test_a_storage_that_does_not_respond_is_tried_again(
    scheduled: Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scheduled.create()

    async def silent(*_: object) -> None:
        raise StorageUnavailable("the storage does not respond")

    with monkeypatch.context() as patch:
        patch.setattr(scheduled.jobs, "prepare", silent)
        await scheduled.until(MIDNIGHT + HOUR)
        assert await scheduled.runner.run_once() == 10.0
    assert await scheduled.runs() == []
    await scheduled.until(MIDNIGHT + HOUR + timedelta(seconds=10))
    (job,) = await scheduled.jobs_of()
    assert job.scheduled_at == MIDNIGHT + HOUR


async def test_a_bug_with_one_schedule_stops_no_other(
    scheduled: Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scheduled.create("bad", job={**SCRIPT, "name": "bad"})
    await scheduled.create("good")
    prepare = scheduled.jobs.prepare

    async def failing(spec: JobSpec, owner: str) -> PreparedDocument:
        if spec.name == "bad":
            raise ZeroDivisionError
        return await prepare(spec, owner)

    monkeypatch.setattr(scheduled.jobs, "prepare", failing)
    await scheduled.until(MIDNIGHT + HOUR)
    (run,) = await scheduled.runs("bad")
    assert run.problem is not None
    assert run.problem.code == "internal_error"
    assert [run.outcome for run in await scheduled.runs("good")] == ["submitted"]


async def test_owners_take_turns_and_each_round_is_bounded(
    on_sqlite: Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_runner, "BATCH", 4)
    for number in range(6):
        await on_sqlite.create(f"ann-{number}")
    for number in range(2):
        await on_sqlite.create(f"bob-{number}", owner="bob")
    on_sqlite.now = MIDNIGHT + HOUR
    assert await on_sqlite.runner.run_once() == 0
    owners = [job.owner for job in (await on_sqlite.jobs.list(limit=500)).items]
    assert sorted(owners) == ["ann", "ann", "bob", "bob"]
    await on_sqlite.until(on_sqlite.now)
    assert len((await on_sqlite.jobs.list(limit=500)).items) == 8


async def test_no_run_without_a_token_of_its_owner(
    sqlite_url: str, storage: Storage, tmp_path: Path
) -> None:
    database = Database(sqlite_url)
    tokens = tmp_path / "tokens"
    set_tokens(tokens, "ann")
    service = Scheduled(database, storage, tmp_path, tokens_file=tokens)
    schedule_id = await service.create()
    set_tokens(tokens, "bob")
    await service.until(MIDNIGHT + HOUR)
    (run,) = await service.runs()
    assert run.problem is not None
    assert run.problem.detail == "ann no longer has a token"
    with pytest.raises(OwnerUnknown, match="ann no longer has a token"):
        await service.schedules.run_now(schedule_id, ADMIN, actor="root")
    tokens.unlink()
    service.now = MIDNIGHT + HOUR * 2
    assert await service.runner.run_once() == 10.0
    set_tokens(tokens, "ann", "bob")
    await service.until(service.now)
    assert [run.outcome for run in await service.runs()] == ["refused", "submitted"]
    database.close()


async def test_code_is_kept_as_long_as_a_schedule_needs_it(scheduled: Scheduled) -> None:
    code = "code-" + "1" * 32
    with pytest.raises(CodeUnfit) as refused:
        await scheduled.create(job={"script": {"entrypoint": "a.py", "code": code}})
    assert refused.value.pointer == "/job/script/code"
    schedule_id = await scheduled.create()

    def stored(session: Session) -> None:
        row = CodeRow(
            owner="ann",
            id=code,
            num_files=1,
            size_bytes=1,
            manifest_key="m",
            manifest_sha256="",
            created_at=MIDNIGHT,
            used_at=MIDNIGHT,
        )
        session.add(row)
        found = session.get(ScheduleRow, schedule_id)
        assert found is not None
        found.code = code

    def swept(session: Session) -> bool:
        code_repository.delete_unused(session, MIDNIGHT + HOUR)
        return code_repository.get(session, "ann", code) is None

    scheduled.database.write_sync(stored)
    assert not scheduled.database.write_sync(swept)
    await scheduled.schedules.delete("night", ANN)
    assert scheduled.database.write_sync(swept)


async def test_a_zone_with_other_rules_changes_the_next_time(scheduled: Scheduled) -> None:
    """As if the data of time zones had been updated while the service was stopped."""
    schedule_id = await scheduled.create(cron="30 2 * * *", time_zone="Europe/Berlin")

    def moved(session: Session, hours: float, zone: str) -> None:
        row = session.get(ScheduleRow, schedule_id)
        assert row is not None
        row.next_at, row.time_zone = MIDNIGHT + HOUR * hours, zone

    later = MIDNIGHT + HOUR * 1.5
    scheduled.database.write_sync(lambda s: moved(s, 9, "Europe/Berlin"))
    await scheduled.new_runner().refresh()
    assert await scheduled.runner.run_once() == 5400
    scheduled.database.write_sync(lambda s: moved(s, 0.5, "Europe/Berlin"))
    await scheduled.until(MIDNIGHT + HOUR * 0.5)
    assert await scheduled.runs() == []
    await scheduled.until(later)
    assert [run.at for run in await scheduled.runs()] == [later]
    scheduled.database.write_sync(lambda s: moved(s, 24, "Europe/Atlantis"))
    await scheduled.new_runner().refresh()
    await scheduled.until(later)
    shown = await scheduled.schedules.get("night", ANN)
    assert shown.paused
    assert "'Europe/Atlantis' is not a known time zone" in str(shown.paused_reason)
    await scheduled.change_schedule("night", time_zone="UTC", paused=False)
    await scheduled.until(MIDNIGHT + HOUR * 3)
    assert len(await scheduled.jobs_of()) == 1


async def test_two_loops_submit_each_run_once(scheduled: Scheduled) -> None:
    for number in range(12):
        await scheduled.create(f"night-{number}", overlap="queue")
    scheduled.now = MIDNIGHT + HOUR
    others = [scheduled.new_runner() for _ in range(3)]
    await asyncio.gather(*(scheduled.until(scheduled.now, runner) for runner in others))
    jobs = (await scheduled.jobs.list(limit=500)).items
    assert len({job.schedule_id for job in jobs}) == len(jobs) == 12


async def test_a_filter_with_an_id_matches_no_name(scheduled: Scheduled) -> None:
    night = await scheduled.create()
    other = await scheduled.create("other", owner="bob")

    def named_like_an_id(session: Session) -> None:  # earlier versions accepted such names
        row = session.get(ScheduleRow, other)
        assert row is not None
        row.name = night

    scheduled.database.write_sync(named_like_an_id)
    await scheduled.until(MIDNIGHT + HOUR)
    assert [job.owner for job in await scheduled.jobs_of(night)] == ["ann"]
    assert [job.owner for job in await scheduled.jobs_of(other)] == ["bob"]
    assert await scheduled.jobs_of("nobody") == []


async def test_run_now_uses_the_keys_of_the_caller(scheduled: Scheduled) -> None:
    ids = [await scheduled.create(name, overlap="queue") for name in ("night", "day")]
    made = [
        await scheduled.schedules.run_now(ids[number], caller, actor="x", idempotency="key")
        for number, caller in ((0, ANN), (1, ADMIN), (0, ANN), (1, ADMIN))
    ]
    assert [job.schedule_id for job in made[:2]] == ids
    assert [job.id for job in made[2:]] == [job.id for job in made[:2]]
