"""Use cases for tracking: compare jobs, summarise experiments, annotate jobs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy.orm import Session

from dray import views
from dray.requests import MAX_TAGS, AnnotationRequest
from service.db.models import JobRow
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.catalog import mlflow_exports
from service.db.repositories.catalog import tracking as repository
from service.db.repositories.telemetry import metric_summaries
from service.db.repositories.telemetry.metric_summaries import MetricSummary
from service.db.session import Database, touch
from service.db.types import storable
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import (
    AnnotationsChanged,
    BadCursor,
    ExperimentNotFound,
    NotComparable,
    TooManyTags,
)
from service.domain.events import ANONYMOUS
from service.domain.tracking.search_tree import EXPERIMENT
from service.jobs.service import found
from service.telemetry.chunk_columns import by_name
from service.tracking import comparisons

logger = logging.getLogger(__name__)

MAX_PAGE = 500
MAX_SUMMARISED = 1000
"""Maximum number of an experiment's jobs whose metrics are summarised, newest first."""
SCOPE = "experiments"


class Tracking:
    """Use cases for tracking, each in one transaction. All callers may read and annotate all
    jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._clock = database.clock

    async def compare(self, job_ids: Sequence[str]) -> views.Comparison:
        """Compare jobs with each other and with a baseline. Raises NotFound or NotComparable."""
        now = self._clock()
        return await self._database.read(lambda s: comparisons.compare(s, job_ids, now))

    async def annotations(self, job_id: str) -> views.Annotations:
        return await self._database.read(lambda s: _annotations(s, found(s, job_id)))

    async def annotate(
        self,
        job_id: str,
        wanted: AnnotationRequest,
        *,
        revision: int | None = None,
        actor: str = ANONYMOUS,
    ) -> views.Annotations:
        """Change tags and notes on behalf of `actor`, whatever the job's state.

        Raises AnnotationsChanged if `revision` is outdated, or TooManyTags if there are too many.
        """
        now = self._clock()

        def work(session: Session) -> views.Annotations:
            row = found(session, job_id, lock=True)
            annotate_row(session, row, wanted, revision=revision, actor=actor, now=now)
            return _annotations(session, row)

        return await self._database.write(work)

    async def experiments(
        self, *, limit: int = 100, cursor: str | None = None
    ) -> views.ExperimentPage:
        """Return a page of experiments, sorted by name. Raises BadCursor for a cursor from another
        list."""
        after = "" if cursor is None else decode_cursor(SCOPE, cursor)
        if not isinstance(after, str) or not storable(after):
            raise BadCursor("the cursor does not belong to this listing")
        limit = max(1, min(limit, MAX_PAGE))

        def work(session: Session) -> views.ExperimentPage:
            rows = repository.experiments(session, after, limit + 1)
            some = rows[:limit]
            baselines = repository.baselines(session, [name for name, _, _ in some])
            items = [
                views.Experiment(
                    name=name, num_jobs=count, newest_job=newest, baseline=baselines.get(name)
                )
                for name, count, newest in some
            ]
            more = encode_cursor(SCOPE, items[-1].name) if len(rows) > limit else None
            return views.ExperimentPage(items=items, next_cursor=more)

        return await self._database.read(work)

    async def experiment(self, name: str) -> views.ExperimentSummary:
        """Summarise an experiment. Raises ExperimentNotFound if the experiment has no jobs."""
        return await self._database.read(lambda s: _summary(s, name))

    async def pin_baseline(
        self, name: str, job_id: str | None, *, actor: str = ANONYMOUS
    ) -> views.ExperimentSummary:
        """Set the job with which the experiment's jobs are compared; None unsets it.

        Raises ExperimentNotFound if the experiment has no jobs, NotFound if the job does not exist,
        and NotComparable if the job is not in the experiment.
        """

        def work(session: Session) -> None:
            _refuse_unknown(session, name)
            if job_id is not None:
                row = found(session, job_id, lock=True)
                if jobs_repository.labels(session, [row.id])[row.id].get(EXPERIMENT) != name:
                    raise NotComparable(
                        f"{job_id} is not in the experiment {name!r}",
                        pointer="/baseline",
                        hint="set the label in the job document: `labels: {experiment: ...}`",
                    )
            repository.set_baseline(session, name, job_id)
            touch(session)

        await self._database.write(work)
        logger.info("%s set the baseline of %r to %s", actor, name, job_id)
        return await self.experiment(name)


def annotate_row(
    session: Session,
    row: JobRow,
    wanted: AnnotationRequest,
    *,
    revision: int | None = None,
    actor: str,
    now: datetime,
) -> bool:
    """Change the tags, notes and colour of a locked job, and return whether anything was changed.
    Raises the errors of `Tracking.annotate`."""
    touch(session, row.id)
    before = _annotations(session, row)
    if revision is not None and before.revision != revision:
        raise AnnotationsChanged(
            f"the tags and notes of {row.id} have changed and are now at revision "
            f"{before.revision}",
            hint="read the current tags and notes again, and apply your change to them",
        )
    tags = sorted((set(before.tags) | set(wanted.add_tags)) - set(wanted.remove_tags))
    if len(tags) > MAX_TAGS:
        message = f"{row.id} would have {len(tags)} tags: at most {MAX_TAGS} are allowed"
        raise TooManyTags(message, pointer="/add_tags")
    notes = before.notes if wanted.notes is None else wanted.notes
    colour = before.colour if wanted.colour is None else wanted.colour
    colour = None if colour == "auto" else colour
    if (tags, notes, colour) == (before.tags, before.notes, before.colour):
        return False
    row.colour = colour
    repository.set_tags(session, row.id, tags)
    repository.annotate(session, row.id, notes, now, actor)
    mlflow_exports.reopen(session, row.id)
    return True


def _annotations(session: Session, row: JobRow) -> views.Annotations:
    kept = repository.annotation(session, row.id)
    return views.Annotations(
        tags=jobs_repository.tags(session, [row.id])[row.id],
        notes=kept.notes if kept else "",
        colour=row.colour,
        revision=kept.revision if kept else 0,
        updated_at=kept and kept.updated_at,
        updated_by=kept and kept.updated_by,
    )


def _refuse_unknown(session: Session, name: str) -> None:
    if not storable(name) or not repository.jobs_of(session, name, 1):
        raise ExperimentNotFound(
            f"no job belongs to the experiment {name!r}",
            hint="set the label in the job document: `labels: {experiment: ...}`",
        )


def _summary(session: Session, name: str) -> views.ExperimentSummary:
    _refuse_unknown(session, name)
    states = repository.states_of(session, name)
    newest = repository.jobs_of(session, name, MAX_SUMMARISED)
    return views.ExperimentSummary(
        name=name,
        num_jobs=sum(states.values()),
        newest_job=newest[0],
        baseline=repository.baselines(session, [name]).get(name),
        states=states,
        num_summarised=len(newest),
        metrics=_ranges(metric_summaries.of_jobs(session, newest)),
    )


def _ranges(by_job: Mapping[str, Mapping[str, MetricSummary]]) -> list[views.MetricRange]:
    num_jobs: dict[str, int] = {}
    numbers: dict[str, list[tuple[float, str]]] = {}
    for job_id, of_job in by_job.items():
        for key, summary in of_job.items():
            num_jobs[key] = num_jobs.get(key, 0) + 1
            if summary.last_value is not None:
                numbers.setdefault(key, []).append((summary.last_value, job_id))
    ranges = []
    for key in sorted(num_jobs):
        least = min(numbers.get(key, ()), default=None)
        greatest = max(numbers.get(key, ()), default=None)
        ranges.append(
            views.MetricRange(
                key=key,
                num_jobs=num_jobs[key],
                least=None if least is None else by_name(least[0]),
                least_job=None if least is None else least[1],
                greatest=None if greatest is None else by_name(greatest[0]),
                greatest_job=None if greatest is None else greatest[1],
            )
        )
    return ranges
