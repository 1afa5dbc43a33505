"""The values of the columns of a table of jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from sqlalchemy.orm import Session

from dray import views
from dray.arguments import parameters_of
from service.db.models import JobRow
from service.db.repositories.telemetry import metric_summaries
from service.db.repositories.telemetry.metric_summaries import LaggingSummary
from service.domain.tracking.columns import Fact, Field, ParameterField, TableColumn
from service.domain.tracking.document_values import PARAMETERS
from service.domain.tracking.search_tree import DocumentField, JobColumn, LabelField, MetricField
from service.telemetry.chunk_columns import by_name

Summaries = Mapping[str, LaggingSummary]


def add(
    session: Session,
    rows: Sequence[JobRow],
    items: Sequence[views.Job],
    columns: Sequence[TableColumn],
) -> None:
    """Set the values of the columns in the views of these jobs."""
    keys = [column.field.key for column in columns if isinstance(column.field, MetricField)]
    ids = [row.id for row in rows]
    summaries = metric_summaries.lagging(session, ids, keys) if keys else {}
    readers = {column.text: _reader(column.field) for column in columns}
    for row, item in zip(rows, items, strict=True):
        found = summaries.get(row.id, {})
        item.values = {text: read(row, item, found) for text, read in readers.items()}
        if not row.state.is_terminal:
            times = [one.as_of for one in found.values() if one.as_of is not None]
            item.values_as_of = min(times, default=None)


Read = Callable[[JobRow, views.Job, Summaries], Any]


def _reader(field: Field) -> Read:
    """Return a function that returns the value of the field of a job."""
    match field:
        case JobColumn("created_at" | "started_at" | "finished_at" as name):
            return lambda _row, item, _: getattr(item, name)
        case JobColumn(name) | Fact("tags" as name):
            return lambda _row, item, _: getattr(item, name)
        case Fact("duration"):
            return lambda row, _item, _: row.ran_s
        case Fact("cost"):
            return lambda _row, item, _: item.cost and item.cost.total
        case Fact("array"):
            return lambda _row, item, _: item.array_id
        case Fact("goodput"):
            return lambda _row, item, _: item.goodput and item.goodput.useful_share
        case Fact("progress"):
            return lambda _row, item, _: _progress(item)
        case Fact("variant" | "attempt" as name):
            return lambda _row, item, _: getattr(item, name)
        case Fact():
            raise ValueError(f"there is no column {field.name}")
        case LabelField(key):
            return lambda _row, item, _: item.labels.get(key)
        case MetricField(key, of):
            return lambda _row, _item, found: _metric(found.get(key), of)
        case DocumentField(pointer):
            return lambda _row, item, _: _at(item.spec, pointer)
        case ParameterField():
            return lambda _row, item, _: _parameter(item.spec, field)
        case _:
            assert_never(field)


def _metric(summary: LaggingSummary | None, of: str) -> views.MetricValue | None:
    if summary is None:
        return None
    value: float | None = getattr(summary, f"{of}_value")
    return by_name(math.nan if value is None else value)


def _progress(item: views.Job) -> float | None:
    """Return the share of the steps that the job has done; None if their number is unknown."""
    steps = item.progress
    return steps.step / steps.total_steps if steps and steps.total_steps else None


def _parameter(document: Mapping[str, Any], field: ParameterField) -> Any:
    named = parameters_of(document)
    if field.name in named or field.pointer is None or document.get("recipe") is None:
        return named.get(field.name)
    return _at(document, field.pointer)


def _at(document: Mapping[str, Any], pointer: str) -> Any:
    """Return the value at a JSON pointer; None if there is no such value."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    found: Any = document
    if parts[0] == PARAMETERS:
        found = {PARAMETERS: parameters_of(document)}
    for part in parts:
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found
