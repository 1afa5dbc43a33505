"""Use cases for the importance of parameters: of a sweep, and of the jobs that a search finds."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.orm import Session

from dray import views
from dray.filters import ImportanceFilter
from dray.spec import Sweep
from dray.views import JobState
from service.db.repositories.catalog import grouping
from service.db.repositories.catalog import importance as repository
from service.db.repositories.submission import sweeps
from service.db.session import Database
from service.db.types import storable
from service.domain.errors import InvalidSearch, SweepNotFound
from service.domain.states import STOPPED_EARLY
from service.domain.tracking import importance as domain
from service.domain.tracking.columns import parse_metric
from service.domain.tracking.document_values import PARAMETERS, PARTS, searchable
from service.jobs import listing
from service.tracking.groups import MAX_JOBS
from service.tracking.importance import process

SEED: Final = 46
NORMAL_90: Final = 1.645
"""Standard deviations on each side of the mean that contain 90% of a normal distribution."""
METHOD: Final = (
    "permutation importance of a random forest, for the runs on which each tree was not trained, "
    "divided by twice the variance of the metric; the interval is 1.645 standard deviations of 30 "
    "bootstrap samples of the runs to each side"
)


@dataclass(frozen=True)
class ChosenRun:
    """A run that counts, with its value of the metric."""

    job_id: str
    value: float


@dataclass(frozen=True)
class Question:
    """The runs from which the importance is estimated."""

    metric: str
    values: Sequence[float]
    parameters: Sequence[Mapping[str, Any]]
    """The parameters of each run."""
    num_runs: int
    """Number of runs that could be used, of which `values` can be a sample."""
    left_out: Mapping[str, int]


class Importances:
    """Use cases for the importance of parameters."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_sweep(
        self, sweep_id: str, *, metric: str | None, include_stopped: bool
    ) -> views.Importance:
        """Return the importance of the parameters of a sweep, by default for its own metric.

        Raises SweepNotFound, InvalidSearch if the metric can't be parsed, or Unavailable.
        """

        def work(session: Session) -> Question:
            return _of_sweep(session, sweep_id, metric, include_stopped)

        return await _answer(await self._database.read(work))

    async def of_search(self, wanted: ImportanceFilter) -> views.Importance:
        """Return the importance of the fields in which the documents of the jobs differ.

        Raises InvalidSearch if the metric or the search can't be parsed, if the metric is not a
        number, or if more than `MAX_JOBS` jobs match; or Unavailable.
        """
        if not listing.can_match(wanted):
            return await _answer(Question(wanted.metric, [], [], 0, {}))
        return await _answer(await self._database.read(lambda s: _of_search(s, wanted)))


def _of_sweep(
    session: Session, sweep_id: str, metric: str | None, include_stopped: bool
) -> Question:
    row = sweeps.get(session, sweep_id) if storable(sweep_id) else None
    if row is None:
        raise SweepNotFound(
            f"there is no sweep {sweep_id}", hint="`dray ls` lists the existing jobs and sweeps"
        )
    trials = repository.trials(session, sweep_id)
    numbers: Mapping[str, float]
    if metric is None:
        sweep = Sweep.model_validate(row.sweep)
        metric = f"{sweep.by}:{sweep.metric}"
        numbers = {trial.id: trial.value for trial in trials if trial.value is not None}
    else:
        numbers = grouping.numbers(session, parse_metric(metric), [trial.id for trial in trials])
    counted, left_out = _counted(trials, numbers, include_stopped)
    own = {trial.id: trial.parameters or {} for trial in trials}
    chosen = _sample(counted)
    return Question(
        metric=metric,
        values=[run.value for run in chosen],
        parameters=[own[run.job_id] for run in chosen],
        num_runs=len(counted),
        left_out=left_out,
    )


def _of_search(session: Session, wanted: ImportanceFilter) -> Question:
    field = parse_metric(wanted.metric)
    rows = repository.runs(session, listing.chosen(session, wanted), MAX_JOBS + 1)
    if len(rows) > MAX_JOBS:
        raise InvalidSearch(
            f"more than {MAX_JOBS:,} jobs match",
            hint="narrow the list down with a time, a label or an owner",
        )
    numbers = grouping.numbers(session, field, [row.id for row in rows])
    counted, left_out = _counted(rows, numbers, wanted.include_stopped)
    chosen = _sample(counted)
    documents = repository.documents(session, [run.job_id for run in chosen])
    return Question(
        metric=wanted.metric,
        values=[run.value for run in chosen],
        parameters=[_fields(documents.get(run.job_id, {})) for run in chosen],
        num_runs=len(counted),
        left_out=left_out,
    )


def _counted(
    runs: Collection[repository.RunOutcome | repository.TrialValues],
    numbers: Mapping[str, float],
    include_stopped: bool,
) -> tuple[list[ChosenRun], dict[str, int]]:
    """Return the runs whose values can be compared, and the number of the others by reason."""
    counted: list[ChosenRun] = []
    left_out: Counter[str] = Counter()
    for run in runs:
        why = _why_not(run.state, run.reason_code, include_stopped)
        number = numbers.get(run.id)
        if why is None and (number is None or not math.isfinite(number)):
            why = "without_value"
        if why is not None:
            left_out[why] += 1
        else:
            assert number is not None
            counted.append(ChosenRun(run.id, float(number)))
    return counted, dict(sorted(left_out.items()))


def _why_not(state: JobState, reason: str, include_stopped: bool) -> str | None:
    if reason == STOPPED_EARLY:
        return None if include_stopped else "stopped_early"
    if not state.is_terminal:
        return "unfinished"
    return {JobState.FAILED: "failed", JobState.CANCELLED: "cancelled"}.get(state)


def _sample(runs: Sequence[ChosenRun]) -> list[ChosenRun]:
    """Return up to `MAX_RUNS` runs in a random order, which is always the same, so that the first
    runs are a sample as well."""
    ordered = sorted(runs, key=lambda run: run.job_id)
    return random.Random(SEED).sample(ordered, min(len(ordered), domain.MAX_RUNS))


def _fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a document by the path of the field. A named argument of a script
    replaces the position of its value in `script.args`."""
    found = {}
    for pointer, value in searchable(document).items():
        top = pointer.split("/", 2)[1]
        if value == PARTS or pointer.startswith("/script/args/"):
            continue
        name = pointer[1:].replace("/", ".").replace("~1", "/").replace("~0", "~")
        name = name.removeprefix(f"{PARAMETERS}.") if top == PARAMETERS else name
        found[name] = value.number if value.text is None else value.text
    return found


async def _answer(question: Question) -> views.Importance:
    found = views.Importance(
        metric=question.metric,
        num_runs=len(question.values),
        num_sampled_from=question.num_runs,
        left_out=dict(question.left_out),
        method=METHOD,
        parameters=[],
    )
    encoded, constant = await asyncio.to_thread(domain.encode, question.parameters)
    found.parameters = [
        views.ParameterImportance(name=each.name, num_values=each.num_values, same_as=each.same_as)
        for each in encoded
    ]
    found.constant = constant
    num_columns = sum(len(each.columns) for each in encoded)
    num_runs = min(len(question.values), domain.num_runs_at_most(num_columns))
    found.num_runs = num_runs
    found.reason = _why_none(question, encoded)
    if found.reason is not None:
        return found
    outcome = await process.ask(
        {
            "parameters": [[column[:num_runs] for column in each.columns] for each in encoded],
            "values": question.values[:num_runs],
        }
    )
    found.explained = round(outcome["explained"], 4)
    if outcome["explained"] <= 0:
        found.reason = views.Reason(
            code="not_explained",
            message="the forest predicts the metric no better than the mean of the runs does, so "
            "nothing is known about the importance of the parameters",
        )
        return found
    each_of = zip(found.parameters, outcome["importances"], outcome["deviations"], strict=True)
    for parameter, estimate, deviation in each_of:
        parameter.importance = _rounded(estimate)
        parameter.low = _rounded(estimate - NORMAL_90 * deviation)
        parameter.high = _rounded(estimate + NORMAL_90 * deviation)
    found.parameters.sort(key=lambda one: (-(one.importance or 0.0), one.name))
    return found


def _rounded(number: float) -> float:
    """Return the number, but at least 0: chance can make an estimate slightly negative."""
    return round(max(0.0, number), 4)


def _why_none(
    question: Question, encoded: Sequence[domain.EncodedParameter]
) -> views.Reason | None:
    number = len(question.values)
    if number < domain.MIN_RUNS:
        return views.Reason(
            code="too_few_runs",
            message=f"too few runs: {number} of at least {domain.MIN_RUNS} that succeeded and have "
            f"a finite value of {question.metric}",
        )
    if not encoded:
        return views.Reason(code="no_parameters", message="all runs have the same parameters")
    if min(question.values) == max(question.values):
        return views.Reason(
            code="same_value", message=f"all runs have the same value of {question.metric}"
        )
    return None
