"""Use cases of faults: preempt a job, run a drill on it, and read its hangs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from sqlalchemy.orm import Session

from dray import views
from dray.requests import DrillRequest
from dray.views import DrillState, JobState
from service.checkpoints.catalog import began_at_step
from service.config.settings import Settings
from service.db.models import AttemptRow, DrillRow, JobRow
from service.db.notifications import ATTEMPTS
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import faults as repository
from service.db.session import Database, notify
from service.db.types import storable
from service.domain.attempts import drills
from service.domain.attempts.group_traits import why_never
from service.domain.documents import DocumentRefused, read
from service.domain.errors import DrillImpossible, DrillNotFound, JobNotRunning
from service.domain.events import ACTOR, ANONYMOUS
from service.domain.ids import new_drill_id
from service.ingest import hangs
from service.jobs import serializers
from service.jobs.idempotency import IdempotencyKey, KeysInFlight, reserve
from service.jobs.service import found
from service.lifecycle import preemption
from service.lifecycle.transitions import remark

TRAINING = (JobState.RUNNING, JobState.RECOVERING)


class FaultService:
    """The use cases, each in one transaction. Each raises NotFound if the job does not exist."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock or database.clock
        self._keys_in_flight = KeysInFlight()

    async def preempt(
        self,
        job_id: str,
        grace_s: float | None = None,
        *,
        held: bool = False,
        actor: str = ANONYMOUS,
    ) -> views.Job:
        """Ask the job to save a checkpoint, release its slots and wait in its queue again. If
        `held` is set, the job is then held.

        A repeated call does not change the first grace period, but can add `held`. Raises
        JobNotRunning if the job holds no slots.
        """
        now = self._clock()
        grace = self._settings.preempt_grace_s if grace_s is None else grace_s

        def work(session: Session) -> views.Job:
            row = found(session, job_id, lock=True)
            preempt_row(session, row, grace, held=held, actor=actor, now=now)
            return serializers.job(session, row)

        return await self._database.write(work)

    async def drill(
        self,
        job_id: str,
        request: DrillRequest,
        *,
        owner: str = "default",
        actor: str = ANONYMOUS,
        idempotency: IdempotencyKey | None = None,
    ) -> views.Drill:
        """Inject a fault into the job. The returned drill shows how the job recovers.

        Returns the first drill if the key was used for the same request. Raises JobNotRunning if
        the job is not training, DrillImpossible if the job can't pass the drill, and
        IdempotencyMismatch if the key was used for another request.
        """
        now = self._clock()
        drill_id = new_drill_id(now)

        def work(session: Session) -> views.Drill:
            row = found(session, job_id, lock=True)
            if idempotency is not None:
                earlier = reserve(session, owner, idempotency, job_id, now, drill_id=drill_id)
                if earlier is not None:
                    return serializers.drill(_drill(session, job_id, earlier))
            attempt = _live_attempt(session, row, TRAINING, "a drill needs a job that is training")
            running = _running(row, attempt)
            _refuse_impossible(running, request)
            resumes = drills.ends_attempt(request.kind, running)
            drill = _new_row(row, request, drill_id, now, resumes=resumes)
            repository.add_drill(session, drill)
            remark(
                session,
                row,
                type_="drill",
                code="drill_waiting",
                message=f"drill of {drill.kind}: {drill.message}",
                now=now,
                data={ACTOR: actor, "id": drill_id, **request.model_dump(mode="json")},
            )
            notify(session, ATTEMPTS)
            return serializers.drill(drill)

        with self._keys_in_flight.holding(owner, idempotency):
            return await self._database.write(work)

    async def drills(self, job_id: str) -> views.DrillPage:
        """Return the job's drills, oldest first."""

        def work(session: Session) -> views.DrillPage:
            found(session, job_id)
            rows = repository.drills(session, job_id)
            return views.DrillPage(items=[serializers.drill(row) for row in rows])

        return await self._database.read(work)

    async def get_drill(self, job_id: str, drill_id: str) -> views.Drill:
        """Return the drill. Raises DrillNotFound if the job has no such drill."""

        def work(session: Session) -> views.Drill:
            found(session, job_id)
            return serializers.drill(_drill(session, job_id, drill_id))

        return await self._database.read(work)

    async def hangs(self, job_id: str) -> views.HangPage:
        """Return the newest hangs, oldest first. Older hangs are not kept."""

        def work(session: Session) -> views.HangPage:
            found(session, job_id)
            rows = repository.hangs(session, job_id)
            return views.HangPage(items=[hangs.view(row) for row in rows])

        return await self._database.read(work)

    async def slot_seconds(self) -> dict[str, float]:
        """Return the slot-seconds of all jobs, including deleted jobs, keyed by category."""
        return await self._database.read(repository.slot_seconds)


def preempt_row(
    session: Session, row: JobRow, grace_s: float, *, held: bool, actor: str, now: datetime
) -> bool:
    """Ask a locked job to release its slots and, if `held` is set, to wait on hold. Returns False
    if nothing has changed because the job was already asked. Raises JobNotRunning if it holds no
    slots.
    """
    attempt = _live_attempt(session, row, preemption.HOLDING, "it holds no slots")
    asks = preemption.ask(session, row, attempt, grace_s, now, actor=actor)
    holds = held and preemption.hold(session, row, attempt, actor, now)
    return asks or holds


def _live_attempt(
    session: Session, job: JobRow, states: tuple[JobState, ...], needs: str
) -> AttemptRow:
    """Return the running attempt. Raises JobNotRunning if the job is not in one of `states`."""
    attempt = attempts_repository.get(session, job.id, job.attempt)
    if job.state not in states or attempt is None or attempt.finished_at is not None:
        hint = None
        if not job.state.is_terminal and job.state is not JobState.CANCELLING:
            hint = f"`dray wait {job.id} --state RUNNING` waits until the job is training"
        raise JobNotRunning(f"the job {job.id} is {job.state}: {needs}", hint=hint)
    return attempt


def _drill(session: Session, job_id: str, drill_id: str) -> DrillRow:
    row = repository.drill(session, job_id, drill_id) if storable(drill_id) else None
    if row is None:
        raise DrillNotFound(
            f"the job {job_id} has no drill {drill_id}",
            hint="list the job's drills to find their ids",
        )
    return row


def _running(job: JobRow, attempt: AttemptRow) -> drills.Running:
    try:
        document = read(job.spec)
    except DocumentRefused as refused:  # another release started the job
        raise DrillImpossible(f"no drill can be planned for the job {job.id}: {refused}") from None
    has_gpus = bool(job.bundle.get("GPU"))
    return drills.Running(
        world_size=job.world_size,
        step=attempt.last_metric_step or began_at_step(attempt) or 0,
        total_steps=(job.progress or {}).get("total_steps"),
        has_steps=document.script is None or attempt.last_metric_step is not None,
        compares_replicas=document.check is not None and job.world_size > 1,
        why_not_in_place=why_never(document, num_workers=job.world_size, has_gpus=has_gpus),
    )


def _refuse_impossible(running: drills.Running, request: DrillRequest) -> None:
    """Raise DrillImpossible if the drill could never pass, or would test something different."""
    why = drills.refusal(request.kind, request.rank, request.at_step, running)
    if why is not None:
        raise DrillImpossible(why.message, pointer=why.pointer, hint=why.hint)


def _new_row(
    job: JobRow, request: DrillRequest, drill_id: str, now: datetime, *, resumes: bool
) -> DrillRow:
    when = "at once" if request.at_step is None else f"when {request.at_step} steps are done"
    return DrillRow(
        job_id=job.id,
        id=drill_id,
        attempt=job.attempt,
        kind=request.kind.value,
        rank=request.rank,
        at_step=request.at_step,
        resumes=resumes,
        state=DrillState.WAITING.value,
        message=f"to be injected {when}",
        created_at=now,
    )
