"""Operations on job arrays: groups of jobs that share one document and are created and deleted
together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.spec import JobSpec
from dray.views import JobState
from service.checkpoints import init_from, registered
from service.config.settings import Settings
from service.db.models import JobRow
from service.db.repositories import events as events_repository
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.catalog import document_values
from service.db.repositories.submission import arrays as repository
from service.db.repositories.submission import sweeps as sweeps_repository
from service.db.session import Database
from service.db.types import storable
from service.domain.documents import MAX_SEED
from service.domain.errors import ArrayNotFound, ArrayTooLarge, JobLive
from service.domain.events import ACTOR, ANONYMOUS
from service.domain.ids import new_array_id, new_job_id
from service.domain.states import BEING_STOPPED, Trigger, cancelled_by, cancelled_while_queued
from service.domain.tracking.document_values import SharedValues, defaults, searchable
from service.jobs.deletions import Deletions, files_remain
from service.lifecycle import dependencies, moves
from service.lifecycle.transitions import move
from service.sweeps import submitting
from service.sweeps.submitting import Trials

logger = logging.getLogger(__name__)


MAX_BYTES = 128 << 20
"""Maximum total size of the documents of an array or sweep. Each job is stored with its own
document."""


def refuse_too_large(spec: JobSpec, settings: Settings) -> None:
    if spec.num_jobs <= settings.max_array_size:
        _refuse_too_long(spec)
        return
    limit = f"this server allows at most {settings.max_array_size:,}"
    by = "the operator can raise DRAY_MAX_ARRAY_SIZE"
    if spec.sweep is None:
        raise ArrayTooLarge(
            f"the array has {spec.num_jobs:,} jobs, but {limit}",
            pointer="/array/size",
            hint=f"split the array; {by}",
        )
    is_grid = spec.sweep.sampler == "grid"
    raise ArrayTooLarge(
        f"the sweep has {spec.num_jobs:,} trials, but {limit}",
        pointer="/sweep/parameters" if is_grid else "/sweep/trials",
        hint=f"{'use fewer values, or sample at random' if is_grid else 'use fewer trials'}; {by}",
    )


def _refuse_too_long(spec: JobSpec) -> None:
    many = spec.sweep or spec.array
    if many is None:
        return
    size = len(spec.model_dump_json(exclude={"sweep"}))
    if spec.sweep is not None:
        size += spec.sweep.most_characters(spec.arguments) + sum(spec.sweep.longest.values())
    if size * spec.num_jobs > MAX_BYTES:
        kind, of_it = ("array", "jobs") if spec.sweep is None else ("sweep", "trials")
        raise ArrayTooLarge(
            f"the documents of the {kind}'s {spec.num_jobs:,} {of_it} have up to {size:,} bytes "
            f"each, but this server allows {MAX_BYTES:,} bytes in total",
            pointer=f"/{kind}",
            hint=f"move long strings to a file in the code or on the nodes, or split the {kind}",
        )


def insert(
    session: Session,
    row: JobRow,
    spec: JobSpec,
    trials: Trials | None,
    event: Mapping[str, Any],
    now: datetime,
) -> None:
    """Store the job with its event. If the document has `array` or `sweep`, also store the other
    jobs, which differ in their index. `trials` are the trials of a sweep."""
    many = spec.array or spec.sweep
    if many is not None:
        row.array_id = row.array_head = new_array_id(now)
        row.array_index = 0
        row.array_max_running = many.max_running
    jobs_repository.insert(session, row, spec.labels)
    events_repository.add_events(session, [event])
    moves.note(session, [event])
    if many is None:
        shared = defaults()
        document_values.insert(session, shared.holder, {row.id: shared.but_for(row.spec)})
        return
    copies = [
        {"id": new_job_id(now), "array_index": index, **_differing(row.spec, spec, trials, index)}
        for index in range(1, spec.num_jobs)
    ]
    repository.insert_copies(session, row, copies)
    _insert_values(session, row, copies)
    moves.note(session, ({**event, "job_id": one["id"]} for one in copies))
    if trials is not None and row.array_id is not None:
        submitting.insert(session, row.array_id, trials, [row.id, *(one["id"] for one in copies)])


def _insert_values(session: Session, row: JobRow, copies: Sequence[Mapping[str, Any]]) -> None:
    """Store the searchable values of an array: the values of its first document, and the differing
    values of the other documents."""
    assert row.array_id is not None
    of_first = SharedValues(row.array_id, row.spec, searchable(row.spec))
    shared, own = of_first.of_array({one["id"]: one.get("spec", row.spec) for one in copies})
    document_values.insert_shared(session, shared)
    document_values.insert(session, shared.holder, {row.id: {}, **own})


def _differing(
    document: dict[str, Any], spec: JobSpec, trials: Trials | None, index: int
) -> dict[str, Any]:
    """Return the columns of the job with this index that differ from the first job's columns."""
    if trials is None:
        return _seeded(document, spec, index)
    return {} if trials.documents is None else {"spec": trials.document(index)}


def _seeded(document: dict[str, Any], spec: JobSpec, index: int) -> dict[str, Any]:
    """Return the document of a recipe with the seed for this index; an empty dict for a script."""
    if spec.recipe is None:
        return {}
    seed = (spec.train.seed + index) % MAX_SEED
    return {"spec": {**document, "train": {**document["train"], "seed": seed}}}


class Arrays:
    """The use cases. Each raises ArrayNotFound if the array does not exist."""

    def __init__(
        self, database: Database, deletions: Deletions, clock: Callable[[], datetime]
    ) -> None:
        self._database = database
        self._deletions = deletions
        self._clock = clock

    async def get(self, array_id: str) -> views.JobArray:
        return await self._database.read(lambda session: view(session, array_id))

    async def cancel(self, array_id: str, *, actor: str = ANONYMOUS) -> views.JobArray:
        """Ask all unfinished jobs of the array to end, on behalf of `actor`. Idempotent."""
        now = self._clock()

        def work(session: Session) -> views.JobArray:
            cancel_jobs(session, array_id, actor=actor, now=now)
            return view(session, array_id)

        array = await self._database.write(work)
        logger.info("the array %s was cancelled by %s", array_id, actor)
        return array

    async def delete(self, array_id: str, *, actor: str = ANONYMOUS) -> None:
        """Delete all jobs of the array and all their files, on behalf of `actor`.

        Raises JobLive unless all jobs of the array have ended, and CheckpointInUse if a live job
        starts from a checkpoint of one of these jobs. Takes the same steps as `Deletions.delete`.
        """
        hidden: list[str] = []

        def hide(session: Session) -> None:
            if hidden:
                return  # an earlier try committed, but its answer was lost
            array = view(session, array_id)
            if not array.is_settled():
                raise JobLive(
                    f"the array {array_id} has jobs that have not ended",
                    hint="cancel the array first, and wait until all of its jobs have ended",
                )
            marked = repository.hide(session, array_id, self._database.time(session))
            # Checked after the rows are locked, because a job could have been submitted, or a
            # result registered, just before.
            needed = repository.first_needed(session, array_id)
            if needed is not None:
                init_from.refuse_if_needed(session, needed)
            registered.refuse_if_registered(session, marked)
            hidden.extend(marked)

        await self._database.write(hide)
        logger.info("the array %s was deleted by %s", array_id, actor)
        failed = await self._deletions.erase(hidden)
        if failed:
            job_id, error = next(iter(failed.items()))
            jobs = f"job {job_id}" if len(failed) == 1 else f"{len(failed)} jobs, such as {job_id}"
            what = f"the array {array_id} is deleted, but the files of {jobs}"
            raise files_remain(what, error) from error


def cancel_jobs(session: Session, array_id: str, *, actor: str, now: datetime) -> None:
    """Ask all unfinished jobs of the array to end. Raises ArrayNotFound."""
    code, data = "cancelled_by_user", {ACTOR: actor}
    by = cancelled_by(actor, view(session, array_id).owner)
    message = cancelled_while_queued(by, 0)
    dependencies.cancel_unstarted(session, array_id, message=message, now=now, data=data)
    for job_id in repository.started(session, array_id):
        row = jobs_repository.lock(session, job_id)
        if row is None or row.state.is_terminal or row.state is JobState.CANCELLING:
            continue
        why = f"{by}{BEING_STOPPED}"
        if row.state is JobState.QUEUED:
            why = cancelled_while_queued(by, row.attempt)
        move(session, row, Trigger.CANCEL, code=code, message=why, now=now, data=data)


def view(session: Session, array_id: str) -> views.JobArray:
    first = repository.first(session, array_id) if storable(array_id) else None
    if first is None:
        raise ArrayNotFound(
            f"there is no array {array_id}", hint="`dray ls` lists the existing jobs and arrays"
        )
    sweep = sweeps_repository.get(session, array_id)
    return views.JobArray(
        id=array_id,
        name=first.name,
        owner=first.owner,
        project=first.project,
        queue=first.queue,
        size=first.spec["array"]["size"] if sweep is None else sweep.num_trials,
        max_running=first.array_max_running,
        counts=repository.counts(session, array_id),
        is_sweep=sweep is not None,
        stopped_early=0 if sweep is None else sweeps_repository.num_stopped(session, array_id),
        created_at=first.created_at,
    )
