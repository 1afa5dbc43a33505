"""Use cases for experiments: list, summarise and change them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray import views
from dray.experiment_requests import ExperimentRequest
from dray.views import JobState
from service.db.models import ExperimentRow
from service.db.repositories.catalog import experiments as repository
from service.db.repositories.telemetry import metric_summaries
from service.db.repositories.telemetry.metric_summaries import MetricSummary
from service.db.session import Database, touch
from service.db.types import storable
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor, ExperimentChanged, ExperimentNotFound, NotComparable
from service.domain.events import ANONYMOUS
from service.jobs.service import found
from service.telemetry.chunk_columns import by_name

logger = logging.getLogger(__name__)

MAX_PAGE = 500
MAX_SUMMARISED = 1000
"""Maximum number of an experiment's jobs whose metrics are summarised, newest first."""
SCOPE = "experiments"
LABEL_HINT = "set the label in the job document: `labels: {experiment: ...}`"


class Experiments:
    """Use cases for experiments, each in one transaction. All callers may read and change all
    experiments, like the annotations of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._clock = database.clock

    async def list(self, *, limit: int = 100, cursor: str | None = None) -> views.ExperimentPage:
        """Return a page of experiments, sorted by name. Raises BadCursor for a cursor from another
        list."""
        after = "" if cursor is None else decode_cursor(SCOPE, cursor)
        if not isinstance(after, str) or not storable(after):
            raise BadCursor("the cursor does not belong to this listing")
        limit = max(1, min(limit, MAX_PAGE))

        def work(session: Session) -> views.ExperimentPage:
            rows = repository.experiments(session, after, limit + 1)
            some = rows[:limit]
            states = repository.states_of(session, [name for name, _, _ in some])
            items = _described(session, some, states)
            more = encode_cursor(SCOPE, items[-1].name) if len(rows) > limit else None
            return views.ExperimentPage(items=items, next_cursor=more)

        return await self._database.read(work)

    async def get(self, name: str, *, brief: bool = False) -> views.ExperimentSummary:
        """Summarise an experiment; with `brief`, without the ranges of its metrics. Raises
        ExperimentNotFound if the experiment has no jobs."""
        return await self._database.read(lambda session: _summary(session, name, brief))

    async def change(
        self,
        name: str,
        wanted: ExperimentRequest,
        *,
        revision: int | None = None,
        actor: str = ANONYMOUS,
    ) -> views.ExperimentSummary:
        """Change the fields of `wanted` that were given, on behalf of `actor`.

        Raises ExperimentNotFound if the experiment has no jobs, NotFound if a job does not exist,
        NotComparable if a job is not in the experiment, and ExperimentChanged if `revision` is
        outdated.
        """
        changes = wanted.changes
        now = self._clock()

        def work(session: Session) -> bool:
            touch(session)
            _refuse_unknown(session, name)
            _refuse_jobs_of_others(session, name, wanted)
            row = repository.locked(session, name)
            if revision is not None and row.revision != revision:
                raise ExperimentChanged(
                    f"the experiment {name!r} has changed and is now at revision {row.revision}"
                    f"{f', changed by {row.updated_by}' if row.updated_by else ''}",
                    hint="read the experiment again, and apply your change to it",
                )
            if all(getattr(row, field) == value for field, value in changes.items()):
                return False
            for field, value in changes.items():
                setattr(row, field, value)
            row.revision, row.updated_at, row.updated_by = row.revision + 1, now, actor
            return True

        if await self._database.write(work):
            logger.info("%s changed %s of the experiment %r", actor, ", ".join(changes), name)
        return await self.get(name)


def _refuse_jobs_of_others(session: Session, name: str, wanted: ExperimentRequest) -> None:
    """Lock the jobs of the request. Raises NotFound for a job that does not exist, and
    NotComparable for a job that is not in the experiment."""
    pointers = {job_id: f"/pinned/{number}" for number, job_id in enumerate(wanted.pinned)}
    if wanted.baseline is not None:
        pointers[wanted.baseline] = "/baseline"
    for job_id in sorted(pointers):  # the order in which all transactions lock jobs
        found(session, job_id, lock=True)
    members = repository.members(session, name, list(pointers))
    for job_id, pointer in pointers.items():
        if job_id not in members:
            message = f"{job_id} is not in the experiment {name!r}"
            raise NotComparable(message, pointer=pointer, hint=LABEL_HINT)


def _refuse_unknown(session: Session, name: str) -> None:
    if not storable(name) or not repository.jobs_of(session, name, 1):
        raise ExperimentNotFound(f"no job belongs to the experiment {name!r}", hint=LABEL_HINT)


def _summary(session: Session, name: str, brief: bool) -> views.ExperimentSummary:
    _refuse_unknown(session, name)
    newest = repository.jobs_of(session, name, 1 if brief else MAX_SUMMARISED)
    states = repository.states_of(session, [name])
    (listed,) = _described(session, [(name, sum(states[name].values()), newest[0])], states)
    summarised = [] if brief else newest
    row = repository.stored(session, name) or ExperimentRow(
        notes="", pinned=[], layout={}, revision=0
    )
    return views.ExperimentSummary(
        **dict(listed),
        num_summarised=len(summarised),
        metrics=_ranges(metric_summaries.of_jobs(session, summarised)),
        notes=row.notes,
        pinned=repository.members(session, name, row.pinned),
        layout=row.layout,
        revision=row.revision,
        updated_at=row.updated_at,
        updated_by=row.updated_by,
    )


def _described(
    session: Session,
    rows: Sequence[tuple[str, int, str] | Row[str, int, str]],
    states: Mapping[str, Mapping[JobState, int]],
) -> Sequence[views.Experiment]:
    """Return the experiments of these names, numbers of jobs, newest jobs and states."""
    baselines = repository.baselines(session, [name for name, _, _ in rows])
    newest_jobs = repository.named(session, [newest for _, _, newest in rows])
    return [
        views.Experiment(
            name=name,
            num_jobs=num_jobs,
            newest_job=newest,
            newest_name=newest_jobs.get(newest, ("", None))[0],
            newest_at=newest_jobs.get(newest, ("", None))[1],
            baseline=baselines.get(name),
            states=dict(states[name]),
        )
        for name, num_jobs, newest in rows
    ]


def _ranges(by_job: Mapping[str, Mapping[str, MetricSummary]]) -> Sequence[views.MetricRange]:
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
