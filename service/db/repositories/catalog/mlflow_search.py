"""SQL for MLflow's searches for jobs by experiment, metrics, parameters, tags and attributes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Float,
    Select,
    Text,
    and_,
    case,
    cast,
    false,
    func,
    not_,
    or_,
    select,
    true,
    union,
)
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from dray.views import JobState
from service.db.models import JobAnnotationRow, JobLabelRow, JobRow, JobTagRow
from service.db.repositories.catalog.search import limited
from service.domain.tracking.mlflow_search import Condition, Entity, Ordering


@dataclass(frozen=True)
class Names:
    """The names that MLflow uses."""

    experiment_label: str
    states: dict[str, tuple[JobState, ...]]
    """The job states that correspond to each status of a run."""
    tags: dict[str, str]
    """The column of each tag that is not a label."""
    notes: str
    """Name of the tag with a job's notes."""
    job_tags: str
    """Name of the MLflow tag that contains a job's tags, separated by commas."""


def experiments(
    session: Session, names: Names, default: str, filters: Sequence[Condition]
) -> list[str]:
    """Return the names of experiments that match all filters: `default` first, then the sorted
    values of the label."""
    row = JobLabelRow
    labelled = select(row.value.label("name")).where(
        row.key == names.experiment_label, row.value != ""
    )
    found = union(labelled, select(cast(default, Text).label("name"))).subquery()
    compile_ = _Compiler(session, names)
    conditions = [compile_.compare(found.c.name, one) for one in filters]
    query = select(found.c.name).where(*conditions)
    with limited(session):
        return list(session.scalars(query.order_by(found.c.name != default, found.c.name)))


def page(
    session: Session,
    names: Names,
    experiments: Collection[str],
    *,
    unlabelled: bool,
    filters: Sequence[Condition],
    order: Sequence[Ordering],
    offset: int,
    before: int | None,
    limit: int,
) -> list[JobRow]:
    """Return jobs after `offset` that match all filters and have numbers below `before`.

    The jobs are sorted by `order`, then newest first. Raises InvalidSearch if the search takes too
    long.
    """
    compile_ = _Compiler(session, names)
    query = select(JobRow).where(
        JobRow.deleted_at.is_(None), compile_.of_experiments(experiments, unlabelled)
    )
    if before is not None:
        query = query.where(JobRow.number < before)
    for one in filters:
        query = query.where(compile_.holds(one))
    query = _ordered(query, compile_, order).offset(offset).limit(limit)
    with limited(session):
        return list(session.scalars(query))


def _ordered(
    query: Select[JobRow], compile_: _Compiler, order: Sequence[Ordering]
) -> Select[JobRow]:
    for one in order:
        by = compile_.sort_key(one)
        # Jobs without a value come last in both ascending and descending order.
        query = query.order_by(by.is_(None), by.desc() if one.descending else by.asc())
    return query.order_by(JobRow.number.desc())


class _Compiler:
    """Compiles conditions to SQL for one database, with bound values."""

    def __init__(self, session: Session, names: Names) -> None:
        self._is_sqlite = session.get_bind().dialect.name == "sqlite"
        self._names = names

    def of_experiments(self, values: Collection[str], unlabelled: bool) -> ColumnElement[bool]:
        label = aliased(JobLabelRow)
        own = select(label.job_id).where(
            label.job_id == JobRow.id,
            label.key == self._names.experiment_label,
            label.value != "",
        )
        named = own.where(label.value.in_(values)).exists() if values else false()
        return or_(named, ~own.exists()) if unlabelled else named

    def holds(self, one: Condition) -> ColumnElement[bool]:
        match one.entity:
            case Entity.METRIC:
                return self._metric_holds(one)
            case Entity.PARAM:
                return self._param_holds(one)
            case Entity.TAG:
                return self._tag_holds(one)
            case Entity.ATTRIBUTE:
                return self._attribute_holds(one)

    def sort_key(self, one: Ordering) -> ColumnElement[Any]:
        match one.entity:
            case Entity.METRIC:
                return self._metric(one.key)
            case Entity.PARAM:
                return self._param_text(one.key)
            case Entity.TAG:
                return self._tag(one.key)
            case Entity.ATTRIBUTE:
                return self._column(one.key)

    def _metric(self, key: str) -> ColumnElement[Any]:
        """Return the last value of the metric; NULL for NaN. In the stored JSON, infinities and NaN
        are strings."""
        if self._is_sqlite:
            value: ColumnElement[Any] = _entry(JobRow.summary, (key,), "value")
        else:
            value = JobRow.summary[key].as_string()
        number = case((value.in_(("NaN", *_INFINITIES)), None), else_=cast(value, Float(53)))
        return case(
            *((value == name, cast(infinity, Float(53))) for name, infinity in _INFINITIES.items()),
            else_=number,
        )

    def _metric_holds(self, one: Condition) -> ColumnElement[bool]:
        return self.compare(self._metric(one.key), one)

    def _param_path(self, key: str) -> tuple[str, ...] | None:
        """Return the path of the field in the syntax of the database; None if no document can have
        this field."""
        parts = tuple(key.split("."))
        if not all(parts):
            return None
        if self._is_sqlite:
            return parts
        # Quote each part, because SQLAlchemy doesn't quote the elements of a PostgreSQL array.
        quoted = (part.replace("\\", "\\\\").replace('"', '\\"') for part in parts)
        return tuple(f'"{part}"' for part in quoted)

    def _param_text(self, key: str) -> ColumnElement[str]:
        path = self._param_path(key)
        return self._as_text(path) if path else cast(None, Text)

    def _as_text(self, path: tuple[str, ...]) -> ColumnElement[str]:
        if self._is_sqlite and _needs_each(path):
            return cast(_entry(JobRow.spec, path, "value"), Text)
        text: ColumnElement[str] = JobRow.spec[path].as_string()
        return text

    def _param_holds(self, one: Condition) -> ColumnElement[bool]:
        path = self._param_path(one.key)
        if path is None:
            return false()
        if one.operator in ("LIKE", "ILIKE"):
            return self.compare(cast(self._as_text(path), Text), one)
        in_json = self._as_json(path)
        values = one.value if isinstance(one.value, tuple) else (str(one.value),)
        # MLflow sends every parameter value as a string, but in the document the value can be a
        # string, a number or a list.
        forms = [
            form
            for value in values
            for form in (json.dumps(value), json.dumps(value, ensure_ascii=False), value)
        ]
        is_set = and_(in_json.is_not(None), in_json != "null")
        if one.operator in ("!=", "NOT IN"):
            return and_(is_set, in_json.not_in(forms))
        return and_(is_set, in_json.in_(forms))

    def _as_json(self, path: tuple[str, ...]) -> ColumnElement[str]:
        """Return the stored JSON of the field."""
        if self._is_sqlite and _needs_each(path):
            return _entry(JobRow.spec, path, "json")
        if self._is_sqlite:
            quoted = "$" + "".join(f'."{part}"' for part in path)
            return JobRow.spec.op("->", return_type=Text())(quoted)
        return cast(JobRow.spec[path], Text)

    def _tag(self, key: str) -> ColumnElement[Any]:
        column = self._names.tags.get(key)
        if column is not None:
            return cast(getattr(JobRow, column), Text)
        if key == self._names.notes:
            annotation = aliased(JobAnnotationRow)
            own = select(annotation.notes).where(annotation.job_id == JobRow.id)
            return own.scalar_subquery()
        if key == self._names.job_tags:
            tag = aliased(JobTagRow)
            joined = func.aggregate_strings(tag.tag, ", ")
            return select(joined).where(tag.job_id == JobRow.id).scalar_subquery()
        label = aliased(JobLabelRow)
        own = select(label.value).where(label.job_id == JobRow.id, label.key == key)
        return own.scalar_subquery()

    def _tag_holds(self, one: Condition) -> ColumnElement[bool]:
        return self.compare(self._tag(one.key), one)

    def _column(self, key: str) -> ColumnElement[Any]:
        columns: dict[str, Any] = {
            "run_id": JobRow.id,
            "run_name": JobRow.name,
            "user_id": JobRow.owner,
            "start_time": JobRow.created_at,
            "end_time": JobRow.finished_at,
            "status": JobRow.state,
        }
        column: ColumnElement[Any] = columns[key].expression
        return column

    def _attribute_holds(self, one: Condition) -> ColumnElement[bool]:
        column = self._column(one.key)
        if one.key == "status":
            values = one.value if isinstance(one.value, tuple) else (str(one.value),)
            states = [state for value in values for state in self._names.states.get(value, ())]
            has = column.in_(states) if states else false()
            return has if one.operator in ("=", "IN") else not_(has)
        if isinstance(one.value, float):
            try:
                time = datetime.fromtimestamp(one.value / 1000, UTC)
            except (ValueError, OverflowError, OSError):
                return true() if (one.value > 0) == one.operator.startswith("<") else false()
            return _OPERATORS[one.operator](column, time)
        return self.compare(column, one)

    def compare(self, column: ColumnElement[Any], one: Condition) -> ColumnElement[bool]:
        if one.operator == "LIKE" and self._is_sqlite:  # its LIKE ignores case
            return column.op("GLOB")(_as_glob(str(one.value)))
        return _OPERATORS[one.operator](column, one.value)


def _needs_each(path: tuple[str, ...]) -> bool:
    """Whether `path` contains a name that SQLite can't find with a JSON path.

    SQLite's paths can't escape quotes, and SQLite compares names with JSON text in which non-ASCII
    letters are escaped.
    """
    return not all(part.isascii() and part.isprintable() for part in path) or any(
        character in part for part in path for character in '"\\'
    )


def _entry(
    column: InstrumentedAttribute[Any], path: tuple[str, ...], form: Literal["value", "json"]
) -> ColumnElement[Any]:
    """Return the value at a path in a JSON column on SQLite; NULL if it does not exist."""
    each = func.json_each(column).table_valued("key", "value", "type", name="each_0")
    conditions = [each.c.key == path[0]]
    for depth, part in enumerate(path[1:], 1):
        is_nested = each.c.type.in_(("object", "array"))
        inner = func.json_each(case((is_nested, each.c.value), else_="{}"))
        each = inner.table_valued("key", "value", "type", name=f"each_{depth}")
        conditions.append(each.c.key == part)
    kind, value = each.c.type, each.c.value
    found: ColumnElement[Any] = value
    if form == "json":
        found = case(
            (kind == "text", func.json_quote(value)),
            (kind.in_(("true", "false", "null")), kind),
            else_=cast(value, Text),
        )
    return select(found).where(*conditions).correlate(JobRow).scalar_subquery()


def _as_glob(pattern: str) -> str:
    """Convert a LIKE pattern to a GLOB pattern."""
    quoted = re.sub(r"[*?[]", r"[\g<0>]", pattern)
    return quoted.replace("%", "*").replace("_", "?")


_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}
_OPERATORS: dict[str, Callable[[Any, Any], ColumnElement[bool]]] = {
    "=": lambda column, value: column == value,
    "!=": lambda column, value: column != value,
    ">": lambda column, value: column > value,
    ">=": lambda column, value: column >= value,
    "<": lambda column, value: column < value,
    "<=": lambda column, value: column <= value,
    "LIKE": lambda column, value: column.like(value),
    "ILIKE": lambda column, value: column.ilike(value),
    "IN": lambda column, value: column.in_(value),
    "NOT IN": lambda column, value: column.not_in(value),
}
