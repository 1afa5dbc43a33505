"""Jobs and their metrics as pandas DataFrames."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
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
    arguments (such as `parameters.lr`), and the last value of each metric."""
    pandas = require_pandas()
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
    index = pandas.Index([job.id for job in jobs], name="job", dtype=object)
    return pandas.DataFrame(rows, index=index, columns=columns)


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
