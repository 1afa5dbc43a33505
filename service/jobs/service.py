"""Use cases of jobs: submit, get, wait, list, cancel, delete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TypeVar

from sqlalchemy.orm import Session

from dray import views
from dray.filters import JobFilter
from dray.requests import PlanRequest
from dray.spec import JobSpec, Pretrained
from dray.spec.ordering import After
from dray.views import JobState
from service.checkpoints import base_jobs, init_from, registered
from service.code import entrypoints, models
from service.code.uploads import CodeUploads
from service.config import node_policies
from service.config.models_file import ModelsFile
from service.config.settings import Settings
from service.db.models import JobRow
from service.db.notifications import LOOK_AGAIN_S, QUEUE, Signals, events_of
from service.db.repositories import jobs as repository
from service.db.session import Database, notify
from service.db.types import storable
from service.domain.errors import (
    CodeUnfit,
    DomainError,
    JobFinished,
)
from service.domain.events import ACTOR, ANONYMOUS
from service.domain.ids import new_job_id
from service.domain.scheduling.rules.dependencies import Prerequisite
from service.domain.states import BEING_STOPPED, Trigger, cancelled_by, cancelled_while_queued
from service.jobs import (
    arrays,
    base_models,
    catalogue,
    data_policy,
    listing,
    new_jobs,
    serializers,
    sweeps,
    trial_models,
)
from service.jobs.deletions import Deletions, not_found
from service.jobs.idempotency import IdempotencyKey, KeysInFlight, reserve
from service.lifecycle import dependencies
from service.lifecycle.transitions import Ends, move
from service.outlook.answers import Answers
from service.planning.service import Plans, Resolved
from service.queues import reservations
from service.storage import data_files
from service.storage.quota import StorageWatch, refuse_if_full
from service.storage.storage import Storage
from service.sweeps import submitting
from service.sweeps.submitting import Trials

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=JobSpec)


@dataclass(frozen=True)
class PreparedDocument:
    """A document that has passed the checks that need no transaction."""

    resolved: Resolved
    unfit: CodeUnfit | None
    """The error to raise if the document's code can't run. Errors of the job itself are raised
    first."""
    trials: Trials | None
    """The trials of a sweep."""
    silo_sources: list[str | None] | None
    """The value of `JobRow.silo_sources`."""

    def after(self, job_ids: Sequence[str]) -> PreparedDocument:
        """Return the document of a job that starts once these jobs and arrays have ended."""
        after = [After(job=job_id, on="end") for job_id in job_ids]
        spec = self.resolved.spec.model_copy(update={"after": after})
        return replace(self, resolved=replace(self.resolved, spec=spec))


@dataclass(frozen=True)
class NewJob:
    """A job, or the first job of an array or a sweep, that is about to be stored."""

    id: str
    prepared: PreparedDocument
    owner: str
    project: str
    actor: str
    now: datetime
    run: new_jobs.ScheduledRun | None = None
    """The run of a schedule for which the job is submitted."""


class _NothingStored(Exception):
    """Rolls back the transaction of a dry run."""

    def __init__(self, row: JobRow, after: list[Prerequisite]) -> None:
        super().__init__("a dry run stores nothing")
        self.row, self.after = row, after


class Jobs:
    """The use cases, each in one transaction unless noted otherwise."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        signals: Signals,
        settings: Settings,
        *,
        models_file: ModelsFile | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._database = database
        self._storage = storage
        self.models = models_file or ModelsFile(None)
        self._signals = signals
        self._settings = settings
        self._clock = clock or database.clock
        self._keys_in_flight = KeysInFlight()
        self._plans = Plans(database, partial(node_policies.data_policy, settings))
        self._answers = Answers()
        self.storage_watch = StorageWatch(database, storage, settings)
        self.code = CodeUploads(database, storage, settings, clock=clock)
        self.files = data_files.DataFiles(database, storage, clock=clock)
        self.deletions = Deletions(database, storage)
        self.arrays = arrays.Arrays(database, self.deletions, self._clock)
        self.sweeps = sweeps.Sweeps(database)

    async def submit(
        self,
        spec: JobSpec,
        *,
        owner: str = "default",
        project: str = "default",
        actor: str = ANONYMOUS,
        idempotency: IdempotencyKey | None = None,
        store: Callable[[Session, NewJob], JobRow] | None = None,
    ) -> tuple[views.Job, bool]:
        """Submit a job, and return (job, created). `created` is False if the key was used before
        for the same request; `job` is then the job of that request. For an array or a sweep, `job`
        is the job with index 0. `store` replaces the method of this name.

        Raises:
            DataSourceForbidden: The job names data that jobs may not read.
            UnknownQueue, QueueFull, PriorityTooHigh, RuntimeTooLong: The queue does not exist, has
                too many waiting jobs, or does not allow the priority or the running time.
            Unsatisfiable: The queue's limits or the known cluster could never let the job run, or
                the job can't end before its deadline.
            OutOfMemory: The job needs more memory than its workers have.
            InitFromNotFound, InitFromDiffers: The checkpoint from which the job starts does not
                exist, or is from a different model or, if it is restored completely, from a
                different kind of training.
            QuotaExceeded: The storage is full.
            InvalidDocument: The base of a fine-tuning job does not fit, or an uploaded file is
                missing.
            LicenceNotAccepted: The base's licence must be accepted.
            CodeUnfit: The job's code was not uploaded, or lacks the program.
            ArrayTooLarge, InvalidTrial, SamplerUnavailable: The array or sweep can't be created.
            DependencyNotFound, DependencyNeverSatisfied: The job must wait for a job that does not
                exist, or did not end as required.
            IdempotencyMismatch: The key was used for another request.
        """
        prepared = await self.prepare(spec, owner)
        now = self._clock()
        job_id = new_job_id(now)  # here, so that a retried transaction has the same id
        is_tried_again = False

        def work(session: Session) -> tuple[views.Job, bool]:
            nonlocal is_tried_again
            existing = repository.get(session, job_id) if is_tried_again else None
            is_tried_again = True
            if existing is not None:
                return serializers.job(session, existing), True
            if idempotency is not None:
                earlier = reserve(session, owner, idempotency, job_id, now)
                if earlier is not None:
                    return serializers.job(session, found(session, earlier)), False
            new = NewJob(job_id, prepared, owner, project, actor, now)
            row = (store or self.store)(session, new)
            return serializers.new_job(session, row, prepared.resolved.spec.labels), True

        with self._keys_in_flight.holding(owner, idempotency):
            return await self._database.write(work)

    async def dry_run(
        self, spec: JobSpec, *, owner: str = "default", project: str = "default"
    ) -> views.Explanation:
        """Return whether and when the job (for an array, its first job) would start if it were
        submitted now, without storing anything. Raises the same errors as `submit`."""
        prepared = await self.prepare(spec, owner)
        now = self._clock()
        new = NewJob(new_job_id(now), prepared, owner, project, ANONYMOUS, now)

        def check(session: Session) -> None:
            raise _NothingStored(*self._accepted(session, new))

        # The checks of a submission acquire locks and update usage counts, so run the checks in a
        # write transaction that is rolled back. Computing the explanation takes longer, but doesn't
        # need the locks.
        try:
            await self._database.write(check)
        except _NothingStored as accepted:
            row, after = accepted.row, accepted.after
        explanation = await self._database.read(
            lambda s: self._answers.of_unsubmitted(s, row, after, self._database.time(s))
        )
        return explanation.model_copy(update={"sync": prepared.resolved.sync})

    async def plan(self, request: PlanRequest) -> views.Plan:
        """Return the plan of a job, without submitting the job. Raises InvalidDocument, and
        NotPlannable if the document lacks information that a plan needs."""
        known = self.models.current() or {}
        request = await self._with_registered(request)
        return await self._plans.plan(catalogue.resolve(request, known, needs_licence=False))

    async def _with_registered(self, spec: S) -> S:
        """Return the document with jobs instead of versions of registered models."""
        if not registered.names_models(spec):
            return spec
        return await self._database.read(lambda session: registered.resolve(session, spec))

    async def prepare(self, spec: JobSpec, owner: str) -> PreparedDocument:
        """Do the checks of a submission that need no transaction."""
        new_jobs.refuse_functions(spec, self._settings)
        spec = await self._with_registered(spec)
        ancestors: list[Pretrained] = []
        if job_ids := base_jobs.ancestor_ids(spec):
            ancestors = await self._database.read(lambda s: base_jobs.models_of(s, job_ids))
        spec = catalogue.resolve(spec, self.models.current() or {}, ancestors)
        policy = node_policies.data_policy(self._settings, spec)
        await data_policy.refuse_forbidden(spec, policy)
        await base_models.refuse_unfit(spec, policy)
        spec, silo_sources = new_jobs.without_sources(spec)
        resolved = await self._plans.resolve(spec)
        spec = resolved.spec
        unfit = await entrypoints.why_unfit(self.code, spec.script, owner)
        unfit = unfit or await models.why_unfit(self.code, spec, owner, self._settings.storage_url)
        arrays.refuse_too_large(spec, self._settings)
        trials = await submitting.trials_of(spec)
        policy_of = partial(node_policies.data_policy, self._settings)
        await trial_models.refuse_unfit(spec, trials, self._plans, policy_of)
        return PreparedDocument(resolved, unfit, trials, silo_sources)

    def check(self, session: Session, new: NewJob) -> None:
        """Do the checks of a submission that need a transaction, except for the checks of the space
        that is left in the queue and the storage. Raises the errors of `submit`."""
        self._accepted(session, new, needs_space=False)

    def store(self, session: Session, new: NewJob) -> JobRow:
        """Store a job that `prepare` has checked. Raises the errors of `submit`."""
        row, after = self._accepted(session, new)
        resolved, trials = new.prepared.resolved, new.prepared.trials
        event = new_jobs.first_event(row, resolved, new.actor, new.now, new.run)
        arrays.insert(session, row, resolved.spec, trials, event, new.now)
        dependencies.insert(session, row.array_id or row.id, after, new.now)
        notify(session, row.id, QUEUE)
        return row

    def _accepted(
        self, session: Session, new: NewJob, *, needs_space: bool = True
    ) -> tuple[JobRow, list[Prerequisite]]:
        """Return the job's row, which is not stored yet, and its dependencies. Raises the errors of
        `submit`."""
        prepared, owner, now = new.prepared, new.owner, new.now
        spec = prepared.resolved.spec
        admitted = new_jobs.admit(
            session,
            prepared.resolved,
            owner,
            self._settings,
            now,
            coming={None: spec.num_jobs} if needs_space else {},
        )
        reservations.refuse_unfit(session, spec, owner, new.project, now)
        if needs_space:
            refuse_if_full(session)
        if prepared.unfit is not None:
            raise prepared.unfit
        new_jobs.use_code(session, spec, owner, now)
        data_files.use(session, data_policy.sources_of(spec.data), owner, now)
        origin = init_from.resolve(session, spec)
        base_jobs.refuse_unfit(session, spec)
        after = dependencies.hold(session, spec)
        row = new_jobs.new_row(
            *(new.id, spec, admitted, origin, owner, new.project, self._settings, now), run=new.run
        )
        if prepared.trials is not None:
            row.spec = prepared.trials.document(0)
        row.silo_sources = prepared.silo_sources
        return row, after

    async def get(self, job_id: str) -> views.Job:
        """Return the job. Raises NotFound if the job does not exist."""
        return await self._database.read(
            lambda session: serializers.job(session, found(session, job_id))
        )

    async def wait(
        self, job_id: str, *, wait_s: float, known_state: JobState | None = None
    ) -> views.Job:
        """Return the job as soon as its state differs from `known_state`, or after `wait_s`.

        `known_state` defaults to the current state. A finished job is returned immediately. Uses
        several transactions, because the job is read again whenever it may have changed.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        with self._signals.subscribe(events_of(job_id)) as woken:
            while True:
                job = await self.get(job_id)
                known_state = known_state or job.state
                left_s = deadline - asyncio.get_running_loop().time()
                if job.state != known_state or job.state.is_terminal or left_s <= 0:
                    return job
                await woken.wait(min(left_s, LOOK_AGAIN_S))

    async def list(
        self, query: JobFilter | None = None, *, limit: int = 50, cursor: str | None = None
    ) -> views.JobPage:
        """Return jobs, by default newest first, at most `limit` (1 to 500). Raises BadCursor for a
        cursor from another listing."""
        wanted = listing.table_of(query)
        after = listing.position(wanted, cursor)
        if not listing.can_match(wanted):
            return views.JobPage(items=[])
        return await self._database.read(
            lambda session: listing.page(session, wanted, limit=limit, after=after)
        )

    async def cancel(self, job_id: str, *, actor: str = ANONYMOUS) -> views.Job:
        """Ask the job to end, on behalf of `actor`. Idempotent.

        Raises JobFinished if the job succeeded or failed.
        """
        now = self._clock()
        moved = False

        def work(session: Session) -> views.Job:
            nonlocal moved
            row = found(session, job_id, lock=True)
            moved = cancel_row(session, row, actor=actor, now=now)
            return serializers.job(session, row)

        job = await self._database.write(work)
        if moved:
            logger.info("the job %s was cancelled by %s", job_id, actor)
        return job

    async def delete(self, job_id: str, *, actor: str = ANONYMOUS) -> None:
        """Delete a finished job and all its files on behalf of `actor`, whose name is logged.

        Raises JobLive if the job has not ended, CheckpointInUse if a live job starts from one of
        its checkpoints, and StorageUnavailable if the job is deleted, but its files remain for now.
        """
        for problem in (await self.delete_all([job_id], actor=actor)).values():
            raise problem

    async def delete_all(self, job_ids: Sequence[str], *, actor: str) -> dict[str, DomainError]:
        """Delete several jobs. Return the errors that `delete` would raise, by job."""
        problems = await self.deletions.delete(job_ids, actor=actor)
        if self.storage_watch.is_limited:
            await self.storage_watch.look(self._clock())
        return problems


def cancel_row(
    session: Session, row: JobRow, *, actor: str, now: datetime, ends: Ends | None = None
) -> bool:
    """Ask a locked job to end, and return whether its state has changed. `ends` is passed to
    `move`. Raises JobFinished if the job succeeded or failed."""
    if row.state in (JobState.SUCCEEDED, JobState.FAILED):
        raise JobFinished(f"the job {row.id} has already {row.state.lower()}")
    if row.state in (JobState.CANCELLING, JobState.CANCELLED):
        return False
    by = cancelled_by(actor, row.owner)
    message = f"{by}{BEING_STOPPED}"
    if row.state == JobState.QUEUED:
        message = cancelled_while_queued(by, row.attempt)
    return move(
        session,
        row,
        Trigger.CANCEL,
        code="cancelled_by_user",
        message=message,
        now=now,
        data={ACTOR: actor},
        ends=ends,
    )


def found(session: Session, job_id: str, *, lock: bool = False) -> JobRow:
    """Return the job's row. Raises NotFound if the job does not exist, or is being deleted."""
    look = repository.lock if lock else repository.get
    row = look(session, job_id) if storable(job_id) else None
    if row is None or row.deleted_at is not None:
        raise not_found(job_id)
    return row
