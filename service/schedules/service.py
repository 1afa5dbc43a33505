"""Use cases of schedules: create, list, show, change, pause, resume, run now and delete."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Final

from sqlalchemy.orm import Session

from dray import views
from dray.input import validation
from dray.input.validation import Fault
from dray.schedule_requests import SCHEDULE_ID, ScheduleChangeRequest, ScheduleRequest
from dray.spec import JobSpec
from dray.views import JobState, MissedRuns, Overlap, RunOutcome
from service.config.settings import Settings
from service.config.tokens_file import TokensFile
from service.db.models import JobRow, ScheduleRow, ScheduleRunRow
from service.db.notifications import SCHEDULES
from service.db.repositories.submission import schedules as repository
from service.db.session import Database, notify, touch
from service.db.types import storable
from service.domain import documents
from service.domain.callers import Caller
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.documents import DocumentRefused
from service.domain.errors import (
    BadCursor,
    DomainError,
    InvalidDocument,
    OwnerUnknown,
    ScheduleExists,
    ScheduleNotFound,
    TooManySchedules,
)
from service.domain.ids import new_job_id, new_schedule_id
from service.domain.schedules.cron import YEARS, BadCron
from service.jobs.idempotency import IdempotencyKey
from service.jobs.service import Jobs, NewJob, PreparedDocument
from service.schedules import runs

logger = logging.getLogger(__name__)

PROJECT: Final = "default"
NUM_NEXT: Final = 3
"""Number of next times that a view contains."""
_SCOPE: Final = "schedules"


LastRun = tuple[ScheduleRunRow, JobState | None]
"""A run and the state of its job."""


class Schedules:
    """The use cases. Each raises ScheduleNotFound for a schedule that the caller may not see.
    Admins can see all schedules. `reference` is the id of a schedule, or the name of one of the
    caller's schedules."""

    def __init__(self, database: Database, jobs: Jobs, settings: Settings) -> None:
        self._database = database
        self._jobs = jobs
        self._settings = settings

    async def create(self, wanted: ScheduleRequest, *, owner: str) -> views.JobSchedule:
        """Create a schedule.

        Raises ScheduleExists, TooManySchedules, InvalidDocument for a cron expression that is
        invalid or has no next time, and the errors of a submission, whose pointers begin with
        `/job`.
        """
        now = await self._database.read(self._database.time)
        times = await asyncio.to_thread(_times, wanted.cron, wanted.time_zone, now)
        spec, prepared = await self._prepared(wanted.job, owner)
        schedule_id = new_schedule_id(now)
        is_tried_again = False

        def work(session: Session) -> views.JobSchedule:
            nonlocal is_tried_again
            touch(session)
            existing = repository.get(session, schedule_id) if is_tried_again else None
            is_tried_again = True
            if existing is not None:  # an earlier commit succeeded, but its result was lost
                return _view(existing, None, times)
            most = self._settings.max_schedules
            if repository.count_of(session, owner) >= most:
                raise TooManySchedules(
                    f"{owner} has {most} schedules, the maximum per user",
                    hint="delete a schedule that is no longer needed, or ask the operator to raise "
                    "DRAY_MAX_SCHEDULES",
                )
            self._check(session, prepared, owner, now)
            is_new = repository.insert(
                session,
                id=schedule_id,
                name=wanted.name,
                owner=owner,
                cron=wanted.cron,
                time_zone=wanted.time_zone,
                overlap=wanted.overlap.value,
                missed=wanted.missed.value,
                deadline_s=wanted.deadline_s,
                document=_stored(spec),
                code=spec.code,
                version=1,
                decided_until=now,
                next_at=None if wanted.paused else times[0],
                paused_reason=None,
                created_at=now,
                changed_at=now,
            )
            if not is_new:
                raise ScheduleExists(
                    f"{owner} already has a schedule {wanted.name!r}",
                    pointer="/name",
                    hint="choose another name, or change the existing schedule: "
                    f"`dray schedule change {wanted.name}`",
                )
            notify(session, SCHEDULES)
            row = repository.get(session, schedule_id)
            assert row is not None
            return _view(row, None, times)

        created = await self._database.write(work)
        logger.info("the schedule %s was created by %s", created.id, owner)
        return created

    async def list(
        self, caller: Caller, *, limit: int = 100, cursor: str | None = None
    ) -> views.SchedulePage:
        """List the caller's schedules, or all users' schedules for an admin, the oldest first. Each
        schedule in the list has only the first of its next times. Raises BadCursor for a cursor
        from another listing."""
        after = None
        if cursor is not None:
            after = decode_cursor(_SCOPE, cursor)
            if not isinstance(after, str) or not re.fullmatch(SCHEDULE_ID, after):
                raise BadCursor("the cursor does not belong to this listing")

        def work(session: Session) -> views.SchedulePage:
            owner = None if caller.is_admin else caller.name
            rows = repository.page(session, owner, after, limit + 1)
            shown = rows[:limit]
            latest = repository.last_runs(session, [row.id for row in shown])
            more = len(rows) > limit
            return views.SchedulePage(
                items=[_view(row, latest.get(row.id)) for row in shown],
                next_cursor=encode_cursor(_SCOPE, shown[-1].id) if more else None,
            )

        return await self._database.read(work)

    async def get(self, reference: str, caller: Caller) -> views.JobSchedule:
        def work(session: Session) -> tuple[ScheduleRow, LastRun | None]:
            row = _found(session, reference, caller)
            return row, _last_run(session, row)

        row, last = await self._database.read(work)
        return await asyncio.to_thread(_with_times, row, last)

    async def runs(self, reference: str, caller: Caller) -> views.ScheduleRunPage:
        """List the latest runs, at most `repository.KEPT_RUNS`, the latest first."""

        def work(session: Session) -> views.ScheduleRunPage:
            row = _found(session, reference, caller)
            found = repository.runs(session, row.id)
            return views.ScheduleRunPage(items=[_run(row, run, state) for run, state in found])

        return await self._database.read(work)

    async def change(
        self, reference: str, wanted: ScheduleChangeRequest, caller: Caller
    ) -> views.JobSchedule:
        """Change a schedule. A new expression or time zone applies to times after the change.
        Raises the errors of `create`."""
        found = await self._database.read(lambda s: _found(s, reference, caller))
        spec = prepared = None
        if wanted.job is not None:
            spec, prepared = await self._prepared(wanted.job, found.owner)

        def work(session: Session) -> tuple[ScheduleRow, LastRun | None] | None:
            touch(session)
            row, now = _found(session, found.id, caller, lock=True), self._database.time(session)
            if (row.version, row.decided_until) != seen:
                return None
            if missed:
                runs.record_missed(session, row, missed, now)
            for name in _CHANGED:
                setattr(row, name, getattr(found, name))
            if spec is not None and prepared is not None:
                self._check(session, prepared, row.owner, now)
                row.document, row.code = _stored(spec), spec.code
            row.version += 1
            row.changed_at = now
            notify(session, SCHEDULES)
            session.flush()
            return row, _last_run(session, row)

        while True:
            seen = found.version, found.decided_until
            now = await self._database.read(self._database.time)
            missed = await asyncio.to_thread(_apply, wanted, found, now)
            changed = await self._database.write(work)
            if changed is not None:
                return await asyncio.to_thread(_with_times, *changed)
            # Another request changed the schedule, or a run was decided, after it was read.
            found = await self._database.read(lambda s: _found(s, reference, caller))

    async def delete(self, reference: str, caller: Caller) -> None:
        """Delete a schedule and the record of its runs. Its jobs remain."""

        def work(session: Session) -> str:
            touch(session)
            row = _found(session, reference, caller, lock=True)
            repository.remove(session, row.id)
            return row.id

        schedule_id = await self._database.write(work)
        logger.info("the schedule %s was deleted by %s", schedule_id, caller.name)

    async def run_now(
        self, reference: str, caller: Caller, *, actor: str, idempotency: str | None = None
    ) -> views.Job:
        """Submit a job of the schedule immediately, as its owner, even if it is paused. Its times
        are not affected. Raises RunUnfinished if its runs must not overlap and the previous run has
        not ended, OwnerUnknown if the owner has no token, and the errors of a submission."""
        found = await self._database.read(lambda s: _found(s, reference, caller))
        tokens_file = self._settings.tokens_file
        if tokens_file is not None and found.owner != caller.name:
            owners = await asyncio.to_thread(TokensFile(tokens_file).tokens)
            if found.owner not in owners:
                raise OwnerUnknown(found.owner)
        spec = await read(found.document)

        def store(session: Session, new: NewJob) -> JobRow:
            row = _found(session, found.id, caller, lock=True)
            at = self._database.time(session)
            # Whole minutes are left to the times of the schedule.
            while at.microsecond == 0 or repository.has_run(session, row.id, at):
                at += timedelta(microseconds=1)
            return runs.submit(session, self._jobs, row, new, at)

        key = None
        if idempotency is not None:
            key = IdempotencyKey(idempotency, f"run {found.id}", caller.name)
        job, _created = await self._jobs.submit(
            spec, owner=found.owner, project=PROJECT, actor=actor, idempotency=key, store=store
        )
        return job

    async def _prepared(
        self, document: Mapping[str, Any], owner: str
    ) -> tuple[JobSpec, PreparedDocument]:
        """Validate a document as a submission does. Raises the errors of a submission."""
        with _of_the_job():
            try:
                spec = await asyncio.to_thread(validation.check, document)
            except Fault as fault:
                raise InvalidDocument(
                    fault.detail, pointer=fault.pointer, hint=fault.hint
                ) from None
            for field, instead in _NOT_RECURRING.items():
                if getattr(spec, field):
                    raise InvalidDocument(
                        f"the document of a schedule can't have {field}, which would be the same "
                        "for all runs",
                        pointer=f"/{field}",
                        hint=instead,
                    )
            return spec, await self._jobs.prepare(spec, owner)

    def _check(
        self, session: Session, prepared: PreparedDocument, owner: str, now: datetime
    ) -> None:
        with _of_the_job():
            job = NewJob(new_job_id(now), prepared, owner, PROJECT, owner, now)
            self._jobs.check(session, job)


_NOT_RECURRING: Final = {
    "after": "remove it; the schedule's `overlap` can let each run wait for the previous run",
    "begin_at": "remove it; the schedule's `cron` sets the times",
    "deadline": (
        "remove it; `max_runtime_s` limits each run, and the schedule's `deadline_s` limits the "
        "delay of its submission"
    ),
}


async def read(document: Mapping[str, Any]) -> JobSpec:
    """Return the document of a schedule, with the defaults of this release. Raises InvalidDocument
    if this release refuses it."""
    try:
        return await asyncio.to_thread(documents.read, document)
    except DocumentRefused as refused:
        raise InvalidDocument(str(refused), hint="change the schedule's document") from None


@contextmanager
def _of_the_job() -> Iterator[None]:
    """Make the pointers of errors relative to the body, in which the document is the field
    `job`."""
    try:
        yield
    except DomainError as error:
        error.pointer = f"/job{error.pointer or ''}"
        raise


def _times(cron: str, time_zone: str, after: datetime) -> list[datetime]:
    """Return the next times. Raises InvalidDocument if there are no next times."""
    try:
        found = list(islice(runs.cron_of(cron, time_zone).times_after(after), NUM_NEXT))
    except BadCron as error:
        raise InvalidDocument(str(error), pointer="/cron", hint=error.hint) from None
    except ValueError as error:
        raise InvalidDocument(
            str(error), pointer="/time_zone", hint="choose another time zone"
        ) from None
    if not found:
        raise InvalidDocument(
            f"no day in the next {YEARS} years matches the expression",
            pointer="/cron",
            hint="check the fields for the day of the month, the month and the day of the week",
        )
    return found


_CHANGED: Final = (
    *("missed", "overlap", "deadline_s", "cron", "time_zone"),
    *("decided_until", "next_at", "paused_reason"),
)
"""The columns that `_apply` sets."""


def _apply(wanted: ScheduleChangeRequest, row: ScheduleRow, now: datetime) -> list[datetime]:
    """Apply a change, except for a change of the job, to a row that belongs to no session. Returns
    the times that are now missed. Raises InvalidDocument."""
    was_paused = row.next_at is None
    if wanted.missed is not None:
        row.missed = wanted.missed.value
    if wanted.overlap is not None:
        row.overlap = wanted.overlap.value
    if "deadline_s" in wanted.model_fields_set:
        row.deadline_s = wanted.deadline_s
    if wanted.cron is not None or wanted.time_zone is not None:
        row.cron = wanted.cron or row.cron
        row.time_zone = wanted.time_zone or row.time_zone
        _times(row.cron, row.time_zone, now)
        row.decided_until = max(row.decided_until, now)
    paused = was_paused if wanted.paused is None else wanted.paused
    missed: list[datetime] = []
    if was_paused and not paused and row.missed == MissedRuns.SKIP:
        missed = runs.missed_times(row, now)
    runs.advance(row, missed[-1] if missed else row.decided_until)
    if paused:
        row.next_at = row.paused_reason = None
    return missed


def _stored(spec: JobSpec) -> dict[str, Any]:
    return {"version": spec.version, **spec.as_given()}


def _found(session: Session, reference: str, caller: Caller, *, lock: bool = False) -> ScheduleRow:
    row = None
    if storable(reference):
        row = repository.get(session, reference, lock=lock)
        if row is None and (own := repository.id_of(session, caller.name, reference)) is not None:
            row = repository.get(session, own, lock=lock)
    if row is None or not (caller.is_admin or row.owner == caller.name):
        raise ScheduleNotFound(
            f"there is no schedule {reference}",
            hint="`dray schedule ls` lists the existing schedules",
        )
    return row


def _last_run(session: Session, row: ScheduleRow) -> LastRun | None:
    return repository.last_runs(session, [row.id]).get(row.id)


def _with_times(row: ScheduleRow, last: LastRun | None) -> views.JobSchedule:
    """Return the view with several next times; finding these times can take milliseconds."""
    try:
        times = runs.cron_of(row.cron, row.time_zone).times_after(row.decided_until)
        return _view(row, last, list(islice(times, NUM_NEXT)))
    except ValueError:  # the installed data no longer has the zone
        return _view(row, last)


def _view(
    row: ScheduleRow, last: LastRun | None, times: Sequence[datetime] = ()
) -> views.JobSchedule:
    """`times` are the next times; by default, only the first."""
    shown = () if row.next_at is None else times or (row.next_at,)
    return views.JobSchedule(
        id=row.id,
        name=row.name,
        owner=row.owner,
        cron=row.cron,
        time_zone=row.time_zone,
        overlap=Overlap(row.overlap),
        missed=MissedRuns(row.missed),
        deadline_s=row.deadline_s,
        job=_without_sources(documents.shown(row.document)),
        paused=row.next_at is None,
        paused_reason=row.paused_reason,
        next_times=[runs.local(row, at) for at in shown],
        last_run=None if last is None else _run(row, *last),
        created_at=row.created_at,
        changed_at=row.changed_at,
    )


def _without_sources(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document without the URLs of silos' data, which only the silos may see."""
    federated = document.get("federated") or {}
    if not federated.get("silos"):
        return document
    silos = [
        {name: value for name, value in silo.items() if name != "source"}
        for silo in federated["silos"]
    ]
    return {**document, "federated": {**federated, "silos": silos}}


def _run(row: ScheduleRow, run: ScheduleRunRow, state: JobState | None) -> views.ScheduleRun:
    return views.ScheduleRun(
        at=runs.local(row, run.at),
        outcome=RunOutcome(run.outcome),
        message=run.message,
        problem=None if run.problem is None else views.RunProblem(**run.problem),
        job_id=run.job_id,
        array_id=run.array_id,
        job_state=state,
        decided_at=run.decided_at,
    )
