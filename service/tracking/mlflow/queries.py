"""Jobs as MLflow's experiments, runs and metric histories."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.views import JobState
from service.db.repositories.catalog import mlflow_search as repository
from service.db.repositories.catalog import tracking
from service.db.session import Database
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor
from service.domain.tracking import mlflow_search as search
from service.domain.tracking.search_tree import EXPERIMENT
from service.jobs import serializers
from service.jobs.queries import Queries
from service.telemetry.series_filters import MetricsFilter
from service.tracking.mlflow.runs import (
    DEFAULT_EXPERIMENT,
    JOB_TAG,
    NOTES_TAG,
    STATUS,
    TAGS_TAG,
)

DEFAULT_ID = "0"
MAX_RUNS = 1000
"""Maximum number of runs on a page, even if the caller requests more."""
MAX_RESULTS = 25_000
"""Maximum number of points on a page of a history. MLflow's client also requests this number."""
_SCOPE = "mlflow"

_STATES: dict[str, tuple[JobState, ...]] = {
    status: tuple(state for state in JobState if STATUS[state] == status)
    for status in STATUS.values()
}
_NAMES = repository.Names(
    experiment_label=EXPERIMENT,
    states=_STATES,
    tags={
        "mlflow.runName": "name",
        "mlflow.user": "owner",
        JOB_TAG: "id",
        "dray.owner": "owner",
        "dray.project": "project",
        "dray.queue": "queue",
        "dray.state": "state",
        "dray.array_id": "array_id",
    },
    notes=NOTES_TAG,
    job_tags=TAGS_TAG,
)


@dataclass(frozen=True)
class MlflowExperiment:
    id: str
    name: str


@dataclass(frozen=True)
class RunPage:
    jobs: list[views.Job]
    notes: Mapping[str, str]
    """Notes by job id. Jobs whose tags and notes have never changed are omitted."""
    next_token: str | None


@dataclass(frozen=True)
class HistoryPage:
    steps: list[int]
    values: list[views.MetricValue]
    times_ms: list[int]
    next_token: str | None


def experiment_id(name: str) -> str:
    """Return the id of an experiment: a hash of its name, since MLflow's ids contain only letters
    and digits."""
    if name == DEFAULT_EXPERIMENT:
        return DEFAULT_ID
    return hashlib.sha256(name.encode()).hexdigest()[:18]


def _is_position(found: Any, lowest: int) -> bool:
    """Whether `found` is a valid start position of a page. The value comes from the caller's token,
    so it can be of any type. (In Python, a bool is also an int.)"""
    return type(found) is int and lowest <= found < 2**63


class MlflowQueries:
    def __init__(self, database: Database, queries: Queries) -> None:
        self._database = database
        self._queries = queries

    async def experiments(self, filter_: str = "") -> list[MlflowExperiment]:
        """Return the values of the label `experiment`, and `Default` for jobs without this label.
        Raises BadSearch."""
        filters = search.parse_name_filter(filter_)
        names = await self._database.read(
            lambda s: repository.experiments(s, _NAMES, DEFAULT_EXPERIMENT, filters)
        )
        return [MlflowExperiment(experiment_id(name), name) for name in names]

    async def search(
        self,
        experiment_ids: Sequence[str],
        filter_: str,
        order_by: Sequence[str],
        max_results: int,
        token: str | None,
    ) -> RunPage:
        """Search runs. Raises BadSearch if the filter or the order is invalid, and BadCursor if the
        token is from another search."""
        filters, order = search.parse_filter(filter_), search.parse_order(order_by)
        limit = max(1, min(max_results, MAX_RUNS))
        asked = [sorted(experiment_ids), filter_, list(order_by)]
        scope = f"{_SCOPE}:{hashlib.sha256(json.dumps(asked).encode()).hexdigest()}"
        position = 0 if token is None else decode_cursor(scope, token)
        if not _is_position(position, 0):
            raise BadCursor("the page token does not belong to this search")
        wanted = set(experiment_ids)
        names = {e.name for e in await self.experiments() if e.id in wanted}

        def work(session: Session) -> RunPage:
            # If no order is given, use a job's number as the position, so that pages do not shift
            # when jobs are submitted.
            by_number = not order
            rows = repository.page(
                session,
                _NAMES,
                names,
                unlabelled=DEFAULT_EXPERIMENT in names,
                filters=filters,
                order=order,
                offset=0 if by_number else position,
                before=(position or None) if by_number else None,
                limit=limit + 1,
            )
            shown, more = rows[:limit], None
            if len(rows) > limit:
                more = encode_cursor(scope, shown[-1].number if by_number else position + limit)
            notes = tracking.notes_of(session, [row.id for row in shown])
            return RunPage(serializers.jobs(session, shown), notes, more)

        return await self._database.read(work)

    async def notes(self, job_id: str) -> str | None:
        """Return the job's notes; None if its tags and notes have never changed."""
        found = await self._database.read(lambda s: tracking.notes_of(s, [job_id]))
        return found.get(job_id)

    async def last_metrics(self, job_id: str) -> Mapping[str, views.Series]:
        """Return the series of rank 0, reduced to a few points, of which the last is exact."""
        found = await self._queries.metrics(job_id, MetricsFilter(max_points=2, times=True))
        return found.series

    async def history(
        self, job_id: str, key: str, max_results: int, token: str | None
    ) -> HistoryPage:
        """Return the points that rank 0 reported for a metric, in order, each with its time."""
        scope = f"{_SCOPE}:{job_id}:{key}"
        after_step = -1 if token is None else decode_cursor(scope, token)
        if not _is_position(after_step, -1):
            raise BadCursor("the page token does not belong to this history")
        limit = max(1, min(max_results, MAX_RESULTS))
        query = MetricsFilter.model_construct(  # unchecked: MLflow may ask for a single point
            keys=(key,), after_step=after_step, max_points=limit, in_order=True, times=True
        )
        found = await self._queries.metrics(job_id, query)
        series = found.series.get(key)
        if series is None:
            return HistoryPage([], [], [], None)
        times = series.times or [0.0] * len(series.steps)
        more = encode_cursor(scope, series.steps[-1]) if len(series.steps) == limit else None
        return HistoryPage(series.steps, series.values, [int(1000 * at) for at in times], more)
