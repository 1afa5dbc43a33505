"""SQL on the lease of the loops, and the database's own clock."""

from __future__ import annotations

from datetime import datetime
from typing import cast

from sqlalchemy import Table, bindparam, func, select, text, update
from sqlalchemy.orm import Session

from service.db.models import LeaseRow
from service.domain.leases import Lease

LOOPS = "loops"
ADVISORY_LOCK = 0x6C656173
"""Held shared by each transaction under the lease, and alone by the one that passes it on."""

_TABLE = cast(Table, LeaseRow.__table__)
_LEASE = select(_TABLE.c.holder, _TABLE.c.term, _TABLE.c.expires_at).where(_TABLE.c.name == LOOPS)
_RENEW = (
    update(_TABLE)
    .where(_TABLE.c.name == LOOPS, _TABLE.c.holder == bindparam("by"))
    .where(_TABLE.c.term == bindparam("in_term"), _TABLE.c.expires_at > bindparam("at"))
    .values(expires_at=bindparam("until"))
    .returning(_TABLE.c.term)
)

_LOCK = {
    alone: select(take(ADVISORY_LOCK))
    for alone, take in (
        (False, func.pg_advisory_xact_lock_shared),
        (True, func.pg_advisory_xact_lock),
    )
}

# A bigint key is shown in two halves; ours has no upper one.
_END_WRITES = text(
    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
    " AND classid = 0 AND objid = :key AND objsubid = 1 AND granted AND mode = 'ShareLock'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND pid <> pg_backend_pid()"
)


def lock(session: Session, *, alone: bool) -> None:
    """Keep the lease from passing on before this transaction ends; `alone`, wait for all
    transactions that do.

    An advisory lock, because its waiters are served in turn: rows locked `FOR SHARE` again and
    again would keep the one that wants to take the lease waiting for ever. On SQLite no other
    process writes.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.connection().execute(_LOCK[alone])


def end_writes(session: Session) -> None:
    """End the transactions that keep the lease from passing on. On SQLite there are none."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(_END_WRITES, {"key": ADVISORY_LOCK})


def get(session: Session) -> Lease | None:
    """As it is committed now: after `lock`, as it stays until this transaction ends."""
    row = session.connection().execute(_LEASE).one_or_none()
    return None if row is None else Lease(*row)


def compare_and_set(session: Session, seen: Lease, then: Lease, now: datetime) -> bool:
    """Replace the lease that `holder` has, unless it passed on or ended meanwhile."""
    values = {"by": seen.holder, "in_term": seen.term, "at": now, "until": then.expires_at}
    changed = session.connection().execute(_RENEW, values)
    return changed.scalar_one_or_none() is not None


def put(session: Session, lease: Lease) -> None:
    session.merge(
        LeaseRow(name=LOOPS, holder=lease.holder, term=lease.term, expires_at=lease.expires_at)
    )
