"""SQL for idempotency keys."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from service.db.models import IdempotencyRow


def try_lock(session: Session, number: int) -> bool:
    """Lock `number` until this transaction ends. Returns False if another transaction has locked
    `number`.

    On SQLite, no other transaction can write at the same time.
    """
    if session.get_bind().dialect.name != "postgresql":
        return True
    return bool(session.scalar(select(func.pg_try_advisory_xact_lock(number))))


def reserve(
    session: Session,
    *,
    owner: str,
    key: str,
    fingerprint: str,
    job_id: str,
    drill_id: str | None,
    now: datetime,
) -> IdempotencyRow | None:
    """Bind the key to the job or drill. If the key is already bound, return the existing row."""
    values = {
        "owner": owner,
        "key": key,
        "fingerprint": fingerprint,
        "job_id": job_id,
        "drill_id": drill_id,
        "created_at": now,
    }
    insert_ = (
        postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    )
    bound = session.execute(
        insert_(IdempotencyRow)
        .values(**values)
        .on_conflict_do_nothing(index_elements=["owner", "key"])
        .returning(IdempotencyRow.key)
    ).scalar_one_or_none()
    if bound is not None:
        return None
    return get(session, owner, key)


def get(session: Session, owner: str, key: str) -> IdempotencyRow | None:
    """Return what the key is bound to; None if it is not bound."""
    return session.scalar(
        select(IdempotencyRow).where(IdempotencyRow.owner == owner, IdempotencyRow.key == key)
    )
