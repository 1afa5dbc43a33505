"""Jobs and their metrics as pandas DataFrames."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dray.arguments import with_parameters

if TYPE_CHECKING:
    import pandas

    from dray import views

EXPERIMENT = "experiment"
"""The label that groups jobs into experiments."""


def require_pandas() -> Any:
    """Import and return pandas. Raises an ImportError with installation instructions if pandas is
    missing."""
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"DataFrames require the package {error.name}: pip install 'dray[frames]'",
            name=error.name,
        ) from error


def of_jobs(jobs: Sequence[views.Job]) -> pandas.DataFrame:
    """Return a DataFrame with one row per job, indexed by job id. The columns are the job's
    outcome, the document's fields that differ between the jobs (named by their paths), the job's
    arguments (such as `parameters.lr`), and the last value of each metric. If the jobs were listed
    with `columns`, the columns are these instead, and `values_as_of` if the metrics of a job are
    not final."""
    pandas = require_pandas()
    index = pandas.Index([job.id for job in jobs], name="job", dtype=object)
    if any(job.values for job in jobs):
        values = of_values(jobs)
        if any(job.values_as_of for job in jobs):
            values["values_as_of"] = [job.values_as_of for job in jobs]
        return pandas.DataFrame(values, index=index)
    documents = [_flat(with_parameters(job.spec)) for job in jobs]
    paths = [
        path
        for path in dict.fromkeys(path for document in documents for path in document)
        if len({repr(document.get(path)) for document in documents}) > 1
    ]
    keys = sorted({key for job in jobs for key in job.summary})
    rows = [
        {
            **_about(job),
            **{path: document.get(path) for path in paths},
            **{key: _number(job.summary.get(key)) for key in keys},
        }
        for job, document in zip(jobs, documents, strict=True)
    ]
    columns = list(rows[0]) if rows else list(_ABOUT)
    return pandas.DataFrame(rows, index=index, columns=columns)


_NOT_IN_JSON = ("NaN", "Infinity", "-Infinity")
"""Numbers that JSON can't represent."""
_TIMES = ("created_at", "started_at", "finished_at")


def of_values(jobs: Sequence[views.Job]) -> dict[str, list[Any]]:
    """Return the values of each column with which the jobs were listed, keyed by column. Times are
    converted to datetimes, and names such as `NaN` in a column of numbers are converted to
    floats."""
    found: dict[str, list[Any]] = {}
    for name in jobs[0].values if jobs else ():
        values = [job.values[name] for job in jobs]
        if name in _TIMES:
            values = [None if value is None else datetime.fromisoformat(value) for value in values]
        elif all(value is None or _is_number(value) for value in values):
            values = [float(value) if value in _NOT_IN_JSON else value for value in values]
        found[name] = values
    return found


def _is_number(value: Any) -> bool:
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain or value in _NOT_IN_JSON


_ABOUT = (
    *("name", "state", "owner", "experiment", "tags", "workers", "created_at", "started_at"),
    *("finished_at", "ran_s", "useful_share", "cost"),
)


def _about(job: views.Job) -> dict[str, Any]:
    ran_s = None
    if job.started_at is not None and job.finished_at is not None:
        ran_s = (job.finished_at - job.started_at).total_seconds()
    values = (
        *(job.name, job.state.value, job.owner, job.labels.get(EXPERIMENT), ", ".join(job.tags)),
        *(job.world_size, job.created_at, job.started_at, job.finished_at, ran_s),
        *(job.goodput and job.goodput.useful_share, job.cost and job.cost.total),
    )
    return dict(zip(_ABOUT, values, strict=True))


_LEFT_OUT = frozenset({"version", "name", "labels"})
"""Fields that identify a job. They are not compared."""


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a mapping from paths, such as `train.optimizer.lr`, to the values of a document. A
    list counts as one value."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        if not prefix and name in _LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def of_series(found: Iterable[tuple[str, views.Metrics]]) -> pandas.DataFrame:
    """Return a DataFrame with one row per point and the columns job (its id), key, step and
    value."""
    pandas = require_pandas()
    columns: dict[str, list[Any]] = {"job": [], "key": [], "step": [], "value": []}
    for job_id, metrics in found:
        for key, series in metrics.series.items():
            columns["job"] += [job_id] * len(series.steps)
            columns["key"] += [key] * len(series.steps)
            columns["step"] += series.steps
            columns["value"] += map(_number, series.values)
    return pandas.DataFrame(columns).astype({"step": "int64", "value": "float64"})


def _number(value: float | str | None) -> float | None:
    """Convert a metric value to a float. NaN and infinities are strings in JSON."""
    return None if value is None else float(value)
