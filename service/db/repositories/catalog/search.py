"""Search expressions as SQL conditions with bound values.

Most conditions are sets of job ids that are found through an index, so that the cost of a search
depends on the number of matches rather than on the number of jobs.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, assert_never

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    exists,
    false,
    not_,
    or_,
    select,
    text,
    true,
    union_all,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, aliased

from service.db.models import DocumentValueRow, JobLabelRow, JobRow, JobTagRow, MetricSummaryRow
from service.db.repositories.catalog.document_values import SHARES
from service.domain.errors import InvalidSearch
from service.domain.ids import ids_since, ids_up_to, last_id
from service.domain.tracking.document_values import ABSENT, DEFAULTS, StoredValue, stored
from service.domain.tracking.search import POINTER
from service.domain.tracking.search_tree import (
    AllOf,
    AnyOf,
    Compared,
    DocumentField,
    Exists,
    HasTag,
    IsOneOf,
    JobColumn,
    LabelField,
    Literal,
    MetricField,
    Negated,
    Of,
    Order,
    SearchField,
    SearchNode,
)

LIMIT_S = 5.0
"""Time limit of a search. A combination of many conditions that nearly all jobs match can exceed
this limit."""
_STEPS = 10_000
"""Number of instructions after which SQLite checks the clock."""
_CANCELLED = "57014"
"""PostgreSQL's code for statements that were cancelled by a timeout."""


@contextmanager
def limited(session: Session) -> Iterator[None]:
    """A context manager that raises InvalidSearch if the statements in its block take longer than
    `LIMIT_S`."""
    connection: Any = session.connection().connection.driver_connection
    is_sqlite = session.get_bind().dialect.name == "sqlite"
    until = time.monotonic() + LIMIT_S
    if is_sqlite:
        connection.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
    else:
        session.execute(text(f"SET LOCAL statement_timeout = {LIMIT_S * 1000:.0f}"))
    try:
        yield
        if not is_sqlite:  # remove the limit for later statements of the transaction
            session.execute(text("SET LOCAL statement_timeout = DEFAULT"))
    except DBAPIError as error:
        is_late = is_sqlite and time.monotonic() > until
        if not is_late and getattr(error.orig, "sqlstate", None) != _CANCELLED:
            raise
        raise InvalidSearch(
            f"the search took longer than the limit of {LIMIT_S:.0f} s",
            pointer=POINTER,
            hint="narrow the search down with a metric, a label or a time",
        ) from None
    finally:
        if is_sqlite:
            connection.set_progress_handler(None, _STEPS)


_JOBS = "job-"
"""The prefix of job ids. The ids of arrays and of defaults sort before job ids."""
_ORDERS = {
    Order.LESS: operator.lt,
    Order.AT_MOST: operator.le,
    Order.MORE: operator.gt,
    Order.AT_LEAST: operator.ge,
}


def condition(session: Session, node: SearchNode) -> ColumnElement[bool]:
    """Return the SQL condition that is true for jobs that match the expression. It is never
    NULL."""
    match node:
        case AllOf(items):
            return and_(*(condition(session, item) for item in items))
        case AnyOf(items):
            return or_(*(condition(session, item) for item in items))
        case Negated(inner):
            return not_(condition(session, inner))
        case HasTag(tag):
            return JobRow.id.in_(select(JobTagRow.job_id).where(JobTagRow.tag == tag))
        case Exists(field) | IsOneOf(field) | Compared(field):
            return _on_field(session, field, node)
        case _:
            assert_never(node)


_OnField = Exists | IsOneOf | Compared


def _on_field(session: Session, field: SearchField, node: _OnField) -> ColumnElement[bool]:
    match field:
        case JobColumn(name):
            column: Any = getattr(JobRow, name)
            return and_(column.is_not(None), _holds(column, node), _id_bound(name, node))
        case LabelField(key):
            labels = select(JobLabelRow.job_id).where(JobLabelRow.key == key)
            return JobRow.id.in_(labels.where(_holds(JobLabelRow.value, node)))
        case MetricField(key, of):
            m = MetricSummaryRow
            value = metric_value(of)
            series = select(m.job_id).where(m.key == key)
            has_series = isinstance(node, Exists)
            return JobRow.id.in_(series if has_series else series.where(_holds(value, node)))
        case DocumentField(pointer):
            return in_document(session, pointer, lambda row: _value_holds(row, node))
        case _:
            assert_never(field)


def metric_value(of: Of) -> Any:
    """Return the column of `MetricSummaryRow` with this value of a series."""
    return getattr(MetricSummaryRow, f"{of}_value")


def _id_bound(name: str, node: _OnField) -> ColumnElement[bool]:
    """Return the bound on ids that the condition implies. Ids start with the submission time. With
    this bound, the database can use an index."""
    if name != "created_at" or not isinstance(node, Compared):
        return true()
    assert isinstance(node.literal, datetime)
    is_lower = node.order in (Order.MORE, Order.AT_LEAST)
    bound: ColumnElement[bool] = (
        JobRow.id >= ids_since(node.literal) if is_lower else JobRow.id <= ids_up_to(node.literal)
    )
    return bound


def _holds(column: Any, node: _OnField) -> ColumnElement[bool]:
    match node:
        case Exists():
            is_set: ColumnElement[bool] = column.is_not(None)
            return is_set
        case IsOneOf(_, literals):
            return _in(column, literals)
        case Compared(_, order, literal):
            compared: ColumnElement[bool] = _ORDERS[order](column, literal)
            return compared
        case _:
            assert_never(node)


def _in(column: Any, literals: Sequence[Literal]) -> ColumnElement[bool]:
    found: ColumnElement[bool] = (
        column == literals[0] if len(literals) == 1 else column.in_(list(literals))
    )
    return found


def in_document(
    session: Session, pointer: str, holds: Callable[[Any], ColumnElement[bool]]
) -> ColumnElement[bool]:
    """Return a condition that is true for jobs in whose document `holds` is true for the value at
    the pointer. The value is stored either for the job itself or as a shared value.

    `holds` returns a condition on a row of `DocumentValueRow`.
    """
    own, shares, shared = (aliased(DocumentValueRow) for _ in range(3))
    if _is_default(session, pointer, holds):
        # Most jobs match, so evaluate the condition for each job instead of listing the matching
        # jobs.
        of_job = (own.holder == JobRow.id, own.pointer == pointer)
        of_shared = (shared.holder == shares.text, shared.pointer == pointer)
        of_shares = (shares.holder == JobRow.id, shares.pointer == SHARES)
        return or_(
            exists().where(*of_job, holds(own)),
            and_(
                ~exists().where(*of_job),
                exists().where(*of_shares, *of_shared, holds(shared)),
            ),
        )
    is_overridden = exists().where(own.holder == shares.holder, own.pointer == pointer)
    holders = _holders(shared, pointer, holds).where(shared.holder < _JOBS)
    by_sharing = select(shares.holder).where(
        shares.pointer == SHARES, shares.text.in_(holders), ~is_overridden
    )
    return JobRow.id.in_(union_all(_holders(DocumentValueRow, pointer, holds), by_sharing))


def _is_default(
    session: Session, pointer: str, holds: Callable[[Any], ColumnElement[bool]]
) -> bool:
    """Whether the default of the field matches, in which case documents without this field
    match."""
    row = DocumentValueRow
    holders = _holders(row, pointer, holds).where(
        row.holder >= DEFAULTS, row.holder <= last_id(DEFAULTS)
    )
    return session.execute(holders.limit(1)).first() is not None


def _holders(row: Any, pointer: str, holds: Callable[[Any], ColumnElement[bool]]) -> Select[Any]:
    return select(row.holder).where(row.pointer == pointer, holds(row))


def _value_holds(row: Any, node: _OnField) -> ColumnElement[bool]:
    match node:
        case Exists():
            return or_(row.text.is_not(None), row.number.is_not(None))
        case IsOneOf(_, literals):
            return or_(false(), *(_equals(row, stored(literal)) for literal in literals))
        case Compared(_, order, literal):
            compared: ColumnElement[bool] = _ORDERS[order](row.number, literal)
            return and_(row.text.is_(None), compared)
        case _:
            assert_never(node)


def _equals(row: Any, value: StoredValue) -> ColumnElement[bool]:
    if value == ABSENT:
        return false()
    text = row.text.is_(None) if value.text is None else row.text == value.text
    number = row.number.is_(None) if value.number is None else row.number == value.number
    return and_(text, number)
