"""SQL for webhooks and their messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session

from dray.views import DeliveryStatus
from service.db.models import JobRow, WebhookDeliveryRow, WebhookRow
from service.db.repositories.bulk import table_of

_WAITING: ColumnElement[bool] = WebhookDeliveryRow.next_try_at.is_not(None)


def enabled_for(session: Session, owners: Collection[str]) -> Sequence[Row[Any]]:
    """Return (id, owner, all_users, states, queue, labels) of the enabled webhooks that apply to
    jobs of these owners."""
    c = WebhookRow.__table__.c
    names = ("id", "owner", "all_users", "states", "queue", "labels")
    query = select(*(c[name] for name in names)).where(
        c.disabled_at.is_(None), or_(c.all_users, c.owner.in_(owners))
    )
    return session.connection().execute(query).all()


def owners_of_jobs(session: Session, job_ids: Collection[str]) -> dict[str, Row[Any]]:
    """Return the columns (id, owner, queue) of these jobs, keyed by id."""
    return _of_jobs(session, job_ids, ("id", "owner", "queue"))


_REPORTED = (
    *("id", "name", "owner", "queue", "summary"),
    *("created_at", "started_at", "first_step_at", "finished_at"),
)


def columns_of_jobs(session: Session, job_ids: Collection[str]) -> dict[str, Row[Any]]:
    """Return the columns of these jobs that are needed for messages, keyed by job id."""
    return _of_jobs(session, job_ids, _REPORTED)


def _of_jobs(
    session: Session, job_ids: Collection[str], names: tuple[str, ...]
) -> dict[str, Row[Any]]:
    found = session.connection().execute(_jobs(names), {"job_ids": list(job_ids)})
    return {row.id: row for row in found}


@cache
def _jobs(names: tuple[str, ...]) -> Select[Any]:
    c = JobRow.__table__.c
    query = select(*(c[name] for name in names))
    return query.where(c.id.in_(bindparam("job_ids", expanding=True)))


def add_deliveries(session: Session, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        session.connection().execute(insert(table_of(WebhookDeliveryRow)), list(rows))


def add(session: Session, row: WebhookRow) -> None:
    session.add(row)


def add_delivery(session: Session, row: WebhookDeliveryRow) -> None:
    """Add a message and assign its number."""
    session.add(row)
    session.flush()


def get(session: Session, webhook_id: str, *, lock: bool = False) -> WebhookRow | None:
    query = select(WebhookRow).where(WebhookRow.id == webhook_id)
    if lock:
        query = query.with_for_update().execution_options(populate_existing=True)
    return session.scalar(query)


def every(session: Session, owner: str | None) -> Sequence[WebhookRow]:
    """Return the owner's webhooks, or all webhooks if `owner` is None, oldest first."""
    query = select(WebhookRow).order_by(WebhookRow.id)
    if owner is not None:
        query = query.where(WebhookRow.owner == owner)
    return session.scalars(query).all()


def count_of(session: Session, owner: str) -> int:
    query = select(func.count()).select_from(WebhookRow).where(WebhookRow.owner == owner)
    return session.scalar(query) or 0


def remove(session: Session, webhook_id: str) -> None:
    """Delete a webhook. There can be many messages, so they are deleted later (see `surplus`)."""
    session.execute(delete(WebhookRow).where(WebhookRow.id == webhook_id))


def num_waiting(session: Session, webhook_ids: Collection[str]) -> dict[str, int]:
    """Return the number of waiting messages for each of these webhooks. Webhooks without waiting
    messages are omitted."""
    query = (
        select(WebhookDeliveryRow.webhook_id, func.count())
        .where(_WAITING, WebhookDeliveryRow.webhook_id.in_(webhook_ids))
        .group_by(WebhookDeliveryRow.webhook_id)
    )
    return {row[0]: row[1] for row in session.execute(query)}


def enabled(session: Session) -> Sequence[Row[str, str, str | None, bool]]:
    """Return (id, owner, enabled_by, all_users) of all enabled webhooks."""
    hook = WebhookRow
    query = select(hook.id, hook.owner, hook.enabled_by, hook.all_users)
    return session.execute(query.where(hook.disabled_at.is_(None))).all()


def with_due(session: Session) -> Sequence[Row[str, datetime | None, datetime | None]]:
    """Return (id, paused_until, due_at of the first message) of the enabled webhooks that have
    waiting messages."""
    due = (
        select(func.min(WebhookDeliveryRow.next_try_at))
        .where(_WAITING, WebhookDeliveryRow.webhook_id == WebhookRow.id)
        .correlate(WebhookRow)
        .scalar_subquery()
    )
    some = exists().where(_WAITING, WebhookDeliveryRow.webhook_id == WebhookRow.id)
    query = select(WebhookRow.id, WebhookRow.paused_until, due.label("due_at"))
    return session.execute(query.where(WebhookRow.disabled_at.is_(None), some)).all()


def next_due(session: Session, webhook_id: str, now: datetime) -> WebhookDeliveryRow | None:
    """Return the message that has been due for the longest time; None if no message is due."""
    query = select(WebhookDeliveryRow).where(
        WebhookDeliveryRow.webhook_id == webhook_id,
        _WAITING,
        WebhookDeliveryRow.next_try_at <= now,
    )
    order = (WebhookDeliveryRow.next_try_at, WebhookDeliveryRow.number)
    return session.scalar(query.order_by(*order).limit(1))


def delivery(session: Session, webhook_id: str, number: int) -> WebhookDeliveryRow | None:
    query = select(WebhookDeliveryRow).where(
        WebhookDeliveryRow.webhook_id == webhook_id, WebhookDeliveryRow.number == number
    )
    return session.scalar(query.with_for_update())


def deliveries(
    session: Session, webhook_id: str, before: int | None, limit: int
) -> Sequence[WebhookDeliveryRow]:
    """Return up to `limit` messages of the webhook with numbers below `before`, newest first."""
    query = select(WebhookDeliveryRow).where(WebhookDeliveryRow.webhook_id == webhook_id)
    if before is not None:
        query = query.where(WebhookDeliveryRow.number < before)
    return session.scalars(query.order_by(WebhookDeliveryRow.number.desc()).limit(limit)).all()


def drop_waiting(session: Session, webhook_id: str) -> int:
    """Drop all waiting messages of the webhook, and return their number."""
    dropped = session.execute(
        update(WebhookDeliveryRow)
        .where(WebhookDeliveryRow.webhook_id == webhook_id, _WAITING)
        .values(next_try_at=None, status=DeliveryStatus.DROPPED.value)
        .returning(WebhookDeliveryRow.number)
        .execution_options(synchronize_session=False)
    )
    return len(dropped.all())


def overfull(session: Session, most: int) -> Sequence[str]:
    """Return the ids of enabled webhooks with more than `most` waiting messages."""
    query = (
        select(WebhookDeliveryRow.webhook_id)
        .join(WebhookRow, WebhookRow.id == WebhookDeliveryRow.webhook_id)
        .where(_WAITING, WebhookRow.disabled_at.is_(None))
        .group_by(WebhookDeliveryRow.webhook_id)
        .having(func.count() > most)
    )
    return session.scalars(query).all()


def surplus(session: Session, before: datetime, keep: int, limit: int) -> list[int]:
    """Return the numbers of messages to delete.

    These are settled messages that were created before this time, settled messages except for the
    `keep` newest of each webhook, and all messages of deleted webhooks.
    """
    table = WebhookDeliveryRow
    position = func.row_number().over(partition_by=table.webhook_id, order_by=table.number.desc())
    settled = select(table.number, table.created_at, position.label("position")).where(~_WAITING)
    found = settled.subquery()
    old = select(found.c.number).where(or_(found.c.created_at < before, found.c.position > keep))
    orphaned = select(table.number).where(table.webhook_id.not_in(select(WebhookRow.id)))
    numbers = {*session.scalars(old.limit(limit)), *session.scalars(orphaned.limit(limit))}
    return sorted(numbers)


def delete_deliveries(session: Session, numbers: Sequence[int]) -> None:
    table = WebhookDeliveryRow
    session.execute(
        delete(table).where(table.number.in_(numbers)).execution_options(synchronize_session=False)
    )


def summary(session: Session) -> tuple[int, int, int, int, datetime | None]:
    """Return (working, failing, disabled, waiting, oldest).

    The first three values are numbers of webhooks; only enabled webhooks count as working or
    failing. `waiting` is the number of waiting messages, and `oldest` is the time when the oldest
    waiting message was created.
    """
    is_enabled = WebhookRow.disabled_at.is_(None)
    is_failing = WebhookRow.failing_since.is_not(None)
    counts = session.execute(
        select(
            func.count().filter(is_enabled, ~is_failing),
            func.count().filter(is_enabled, is_failing),
            func.count().filter(~is_enabled),
        ).select_from(WebhookRow)
    ).one()
    waiting = session.execute(
        select(func.count(), func.min(WebhookDeliveryRow.created_at)).where(_WAITING)
    ).one()
    return (*counts, *waiting)
