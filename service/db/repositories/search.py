"""Search expressions as conditions of SQL, with bound values.

Each condition that is not on a column of the job is a set of job ids that an index gives, so that a
search costs what its matches cost and not what all jobs do.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
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
    union_all,
)
from sqlalchemy.orm import aliased

from service.db.models import DocumentValueRow, JobLabelRow, JobRow, JobTagRow, MetricSummaryRow
from service.db.repositories.document_values import SHARES
from service.domain.tracking.document_values import ABSENT, StoredValue, stored
from service.domain.tracking.search import (
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
    Order,
    SearchField,
    SearchNode,
)

_ORDERS = {
    Order.LESS: operator.lt,
    Order.AT_MOST: operator.le,
    Order.MORE: operator.gt,
    Order.AT_LEAST: operator.ge,
}


def condition(node: SearchNode) -> ColumnElement[bool]:
    """True of the jobs that the expression matches; it is never NULL."""
    match node:
        case AllOf(items):
            return and_(*map(condition, items))
        case AnyOf(items):
            return or_(*map(condition, items))
        case Negated(inner):
            return not_(condition(inner))
        case HasTag(tag):
            return JobRow.id.in_(select(JobTagRow.job_id).where(JobTagRow.tag == tag))
        case Exists(field) | IsOneOf(field) | Compared(field):
            return _on_field(field, node)
        case _:
            assert_never(node)


_OnField = Exists | IsOneOf | Compared


def _on_field(field: SearchField, node: _OnField) -> ColumnElement[bool]:
    match field:
        case JobColumn(name):
            column: Any = getattr(JobRow, name)
            return and_(column.is_not(None), _holds(column, node))
        case LabelField(key):
            labels = select(JobLabelRow.job_id).where(JobLabelRow.key == key)
            return JobRow.id.in_(labels.where(_holds(JobLabelRow.value, node)))
        case MetricField(key, of):
            m = MetricSummaryRow
            value = {"last": m.last_value, "min": m.min_value, "max": m.max_value}[of]
            series = select(m.job_id).where(m.key == key)
            has_series = isinstance(node, Exists)
            return JobRow.id.in_(series if has_series else series.where(_holds(value, node)))
        case DocumentField(pointer):
            return JobRow.id.in_(_with_value(pointer, node))
        case _:
            assert_never(field)


def _holds(column: Any, node: _OnField) -> ColumnElement[bool]:
    match node:
        case Exists():
            return column.is_not(None)
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


def _with_value(pointer: str, node: _OnField) -> Any:
    """Holders whose document has such a value there: its own, or one that it shares."""
    own, shared, sharer = DocumentValueRow, aliased(DocumentValueRow), aliased(DocumentValueRow)
    overriding = aliased(DocumentValueRow)
    is_overridden = exists().where(
        overriding.holder == sharer.holder, overriding.pointer == pointer
    )
    by_sharing = select(sharer.holder).where(
        sharer.pointer == SHARES,
        sharer.text.in_(_holders(shared, pointer, node)),
        ~is_overridden,
    )
    return union_all(_holders(own, pointer, node), by_sharing)


def _holders(row: Any, pointer: str, node: _OnField) -> Select[Any]:
    return select(row.holder).where(row.pointer == pointer, _value_holds(row, node))


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
