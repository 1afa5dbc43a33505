"""SQL for the lease of the loops."""

from __future__ import annotations

from datetime import datetime
from typing import cast

from sqlalchemy import Table, bindparam, func, select, text, update
from sqlalchemy.orm import Session

from service.db.models import LeaseRow
from service.domain.leases import Lease

LOOPS = "loops"
ADVISORY_LOCK = 0x6C656173
"""Key of an advisory lock. Transactions that rely on the lease hold the lock in shared mode, and a
takeover of the lease holds it in exclusive mode."""

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

# pg_locks splits a bigint key into two halves. The upper half of this key is 0.
_END_WRITES = text(
    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
    " AND classid = 0 AND objid = :key AND objsubid = 1 AND granted AND mode = 'ShareLock'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND pid <> pg_backend_pid()"
)


def lock(session: Session, *, alone: bool) -> None:
    """Prevent the lease from being taken over until this transaction ends.

    If `alone` is set, lock in exclusive mode, which waits for all transactions that hold the lock.

    The lock is an advisory lock, because such a lock is granted in the order of the requests. If
    rows were locked with `FOR SHARE`, new readers could delay a takeover indefinitely. On SQLite,
    no lock is needed, because no other process writes.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.connection().execute(_LOCK[alone])


def end_writes(session: Session) -> None:
    """Terminate the transactions that prevent the lease from being taken over (PostgreSQL only)."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(_END_WRITES, {"key": ADVISORY_LOCK})


def get(session: Session) -> Lease | None:
    """Return the committed lease. If this transaction has called `lock`, the lease does not change
    until the transaction ends."""
    row = session.connection().execute(_LEASE).one_or_none()
    return None if row is None else Lease(*row)


def compare_and_set(session: Session, seen: Lease, then: Lease, now: datetime) -> bool:
    """Renew the lease `seen`. Returns False if the lease was taken over or has expired."""
    values = {"by": seen.holder, "in_term": seen.term, "at": now, "until": then.expires_at}
    changed = session.connection().execute(_RENEW, values)
    return changed.scalar_one_or_none() is not None


def put(session: Session, lease: Lease) -> None:
    session.merge(
        LeaseRow(name=LOOPS, holder=lease.holder, term=lease.term, expires_at=lease.expires_at)
    )
