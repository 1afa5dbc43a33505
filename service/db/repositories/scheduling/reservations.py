"""SQL for reservations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Row, Select, delete, func, select, update
from sqlalchemy.orm import Session

from service.db.models import JobRow, ReservationRow
from service.db.repositories.bulk import table_of
from service.db.session import wait_for_others
from service.domain.scheduling.rules.reservations import ReservationRules

_RULES = tuple(field.name for field in fields(ReservationRules))
_LISTS = frozenset({"users", "queues", "projects", "nodes", "chosen"})
LOCK_OF_CHANGES = 0x72657376
"""Key of the advisory lock of transactions that change reservations. Without the lock, two such
transactions could add reservations of the same nodes for the same time."""


def lock_changes(session: Session) -> None:
    """Wait for all other transactions that change reservations."""
    wait_for_others(session, LOCK_OF_CHANGES)


def every(session: Session) -> list[ReservationRules]:
    """Return all reservations, in the order in which they begin."""
    return [_rules(row) for row in session.connection().execute(_every())]


def unfinished(session: Session, now: datetime) -> list[ReservationRules]:
    """Return the reservations that have not ended, in the order in which they begin."""
    query = _every().where(ReservationRow.ends_at > now)
    return [_rules(row) for row in session.connection().execute(query)]


def get(session: Session, name: str) -> ReservationRules | None:
    row = session.connection().execute(_every().where(ReservationRow.name == name)).one_or_none()
    return None if row is None else _rules(row)


@cache
def _every() -> Select[Any]:
    c = ReservationRow.__table__.c
    return select(*(c[name] for name in _RULES)).order_by(c.begins_at, c.name)


def _rules(row: Row[Any]) -> ReservationRules:
    values: Iterable[Any] = (tuple(each) if isinstance(each, list) else each for each in row)
    return ReservationRules(*values)


def put(session: Session, rules: ReservationRules, now: datetime) -> None:
    """Add a reservation, or replace the reservation with this name."""
    remove(session, rules.name)
    values = {name: getattr(rules, name) for name in _RULES}
    lists = {name: list(values[name]) for name in _LISTS}
    row = {**values, **lists, "node_labels": dict(rules.node_labels), "created_at": now}
    session.connection().execute(table_of(ReservationRow).insert(), row)


def remove(session: Session, name: str) -> None:
    session.connection().execute(delete(ReservationRow).where(ReservationRow.name == name))


def count(session: Session) -> int:
    return session.scalar(select(func.count()).select_from(ReservationRow)) or 0


def remove_ended(session: Session, before: datetime) -> None:
    session.connection().execute(delete(ReservationRow).where(ReservationRow.ends_at < before))


def choose(session: Session, seen: ReservationRules, chosen: Sequence[str]) -> None:
    """Store the nodes that were chosen for the reservation, unless the reservation has changed
    since they were chosen."""
    c = table_of(ReservationRow).c
    same = (
        c.name == seen.name,
        c.begins_at == seen.begins_at,
        c.ends_at == seen.ends_at,
        c.num_nodes.is_not_distinct_from(seen.num_nodes),
        c.num_gpus.is_not_distinct_from(seen.num_gpus),
    )
    session.connection().execute(
        update(table_of(ReservationRow)).where(*same).values(chosen=list(chosen))
    )


def num_jobs(session: Session, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the numbers of unfinished jobs that name each reservation: (waiting, others)."""
    query = select(JobRow.reservation, JobRow.state, func.count()).where(
        JobRow.finished_at.is_(None), JobRow.reservation.is_not(None)
    )
    found: dict[str, tuple[int, int]] = {}
    for name, state, number in session.execute(query.group_by(JobRow.reservation, JobRow.state)):
        waiting, others = found.get(name or "", (0, 0))
        is_waiting = state == "QUEUED"
        found[name or ""] = waiting + number * is_waiting, others + number * (not is_waiting)
    return {name: found[name] for name in names if name in found}
