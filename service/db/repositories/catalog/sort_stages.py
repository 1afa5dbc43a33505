"""The stages of a sorted list of jobs (see `sorting`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeAlias

from sqlalchemy import ColumnElement, Select, literal, select, tuple_
from sqlalchemy.orm import Session

from service.db.models import JobRow
from service.db.types import UtcDateTime
from service.domain.errors import BadCursor

Value = str | float | None
AnySelect: TypeAlias = Select[*tuple[Any, ...]]


@dataclass(frozen=True)
class SortPosition:
    """A job's position in an order."""

    stage: int
    value: Value
    job_id: str


@dataclass(frozen=True)
class Chosen:
    """The jobs that a filter selects."""

    ids: Sequence[str] | None
    """Ids of these jobs; None if there are more than `FEW`."""
    conditions: Sequence[ColumnElement[bool]] = ()
    """Conditions on `JobRow`, if `ids` is None."""
    is_filtered: bool = False
    """Whether the filter does more than leave out deleted jobs."""

    def of(self, query: AnySelect, job_id: Any) -> AnySelect:
        """Restrict a query to these jobs. `job_id` is the query's column with the job's id."""
        if self.ids is not None:
            query = query.where(job_id.in_(self.ids))
        if not self.conditions:
            return query
        if job_id is JobRow.id:
            return query.where(*self.conditions)
        if not self.is_filtered:
            deleted = select(JobRow.id).where(JobRow.deleted_at.is_not(None))
            return query.where(job_id.not_in(deleted))
        same = select(JobRow.id).where(JobRow.id == job_id, *self.conditions)
        return query.where(same.correlate_except(JobRow).exists())


class SortStage(Protocol):
    def page(
        self, session: Session, chosen: Chosen, after: SortPosition | None, limit: int
    ) -> Sequence[tuple[Value, str]]:
        """Return up to `limit` values and ids of jobs behind the position `after`."""
        ...


@dataclass(frozen=True)
class Values:
    """The jobs that have a value, in the order of the values."""

    job_id: Any
    value: Any
    descending: bool
    where: Sequence[ColumnElement[bool]] = ()

    def page(
        self, session: Session, chosen: Chosen, after: SortPosition | None, limit: int
    ) -> Sequence[tuple[Value, str]]:
        query = select(self.value, self.job_id).where(*self.where, self.value.is_not(None))
        if after is not None:
            here = tuple_(self.value, self.job_id)
            last = tuple_(self._literal(after.value), literal(after.job_id))
            query = query.where(here < last if self.descending else here > last)
        rows = session.execute(
            chosen.of(query, self.job_id)
            .order_by(*directed(self.descending, self.value, self.job_id))
            .limit(limit)
        )
        return [(_plain(value), job_id) for value, job_id in rows]

    def _literal(self, value: Value) -> ColumnElement[Any]:
        """Return the value of a cursor. Raises BadCursor if the column can't have this value."""
        kind = self.value.type
        try:
            if isinstance(kind, UtcDateTime):
                time = datetime.fromisoformat(str(value))
                if time.tzinfo is None:
                    raise ValueError(f"{time!r} has no time zone")
                return literal(time.astimezone(UTC), kind)
            return literal(kind.python_type(value), kind)
        except (TypeError, ValueError, OverflowError):
            raise BadCursor("the cursor does not belong to this listing") from None


@dataclass(frozen=True)
class Ids:
    """The jobs that satisfy a condition, in the order of their ids."""

    job_id: Any
    descending: bool
    where: Sequence[ColumnElement[bool]]

    def page(
        self, session: Session, chosen: Chosen, after: SortPosition | None, limit: int
    ) -> Sequence[tuple[Value, str]]:
        query = select(self.job_id).where(*self.where)
        if after is not None:
            is_less = self.job_id < after.job_id
            query = query.where(is_less if self.descending else self.job_id > after.job_id)
        ordered = chosen.of(query, self.job_id).order_by(*directed(self.descending, self.job_id))
        return [(None, job_id) for job_id in session.scalars(ordered.limit(limit))]


def directed(descending: bool, *columns: Any) -> list[Any]:
    return [column.desc() if descending else column.asc() for column in columns]


def _plain(value: Any) -> Value:
    return value.isoformat() if isinstance(value, datetime) else value
