"""SQL on the lease of the loops, and the database's own clock."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from service.db.models import LeaseRow
from service.domain.leases import Lease

LOOPS = "loops"
ADVISORY_LOCK = 0x6C656173
"""Held shared by each transaction under the lease, and alone by the one that passes it on."""

_SERVER_NOW = select(func.clock_timestamp())
_LEASE = select(*(LeaseRow.__table__.c[name] for name in ("holder", "term", "expires_at"))).where(
    LeaseRow.__table__.c.name == LOOPS
)


def server_now(session: Session) -> datetime:
    """The time at the PostgreSQL server as this statement runs, not as the transaction began."""
    now: datetime = session.connection().execute(_SERVER_NOW).scalar_one()
    return now


def lock(session: Session, *, alone: bool) -> None:
    """Keep the lease from passing on before this transaction ends; `alone`, wait for all who do.

    An advisory lock, because its waiters are served in turn: rows locked `FOR SHARE` again and
    again would keep whoever wants to take them waiting for ever. On SQLite nobody else writes.
    """
    if session.get_bind().dialect.name == "postgresql":
        take = func.pg_advisory_xact_lock if alone else func.pg_advisory_xact_lock_shared
        session.execute(select(take(ADVISORY_LOCK)))


def get(session: Session) -> Lease | None:
    """As it is committed now: after `lock`, as it stays until this transaction ends."""
    row = session.connection().execute(_LEASE).one_or_none()
    return None if row is None else Lease(*row)


def compare_and_set(session: Session, seen: Lease, then: Lease, now: datetime) -> bool:
    """Replace the lease that `holder` has, unless it passed on or ended meanwhile."""
    changed = session.execute(
        update(LeaseRow)
        .where(LeaseRow.name == LOOPS, LeaseRow.holder == seen.holder, LeaseRow.term == seen.term)
        .where(LeaseRow.expires_at > now)
        .values(expires_at=then.expires_at)
        .returning(LeaseRow.term)
        .execution_options(synchronize_session=False)
    )
    return changed.scalar_one_or_none() is not None


def put(session: Session, lease: Lease) -> None:
    session.merge(
        LeaseRow(name=LOOPS, holder=lease.holder, term=lease.term, expires_at=lease.expires_at)
    )
