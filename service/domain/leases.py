"""The lease that decides which of several processes runs the loops.

A lease is valid for a limited time and is renewed well before it expires. Each time a process
acquires the lease, its term increases. The term is the fencing token for all writes by the loops:
if a process is suspended until its lease has expired, its next write is rejected. All times are
from the database's clock, so the processes' clocks don't matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta


@dataclass(frozen=True)
class Lease:
    """The right of one process to run the loops."""

    holder: str
    term: int
    """Number of times that the lease has been acquired."""
    expires_at: datetime

    def is_over(self, now: datetime) -> bool:
        return now >= self.expires_at


def taken(found: Lease | None, holder: str, now: datetime, held_for: timedelta) -> Lease | None:
    """Return the lease that `holder` acquires, always with a new term; None while another process
    has the lease.

    A process that already has the lease can acquire it again, because it might not have received
    the response to its first request.
    """
    if found is not None and found.holder != holder and not found.is_over(now):
        return None
    term = 1 if found is None else found.term + 1
    return Lease(holder, term, now + held_for)


def holds(found: Lease | None, holder: str, term: int, now: datetime) -> bool:
    """Whether `holder` may still write under `term`."""
    return (
        found is not None
        and (found.holder, found.term) == (holder, term)
        and not found.is_over(now)
    )


def renewed(lease: Lease, now: datetime, held_for: timedelta) -> Lease:
    return replace(lease, expires_at=now + held_for)


def released(lease: Lease, now: datetime) -> Lease:
    """Return the lease with `now` as its expiry, so that the next process doesn't have to wait. The
    term only changes when the next process acquires the lease."""
    return replace(lease, expires_at=now)
