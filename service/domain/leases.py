"""The lease of the loops: which of several processes may run them.

A lease is held for a while and renewed well before it ends. Its term increases each time a process
takes it. The term is the fencing token of everything that the loops write, so a process that was
stopped until after the end of its lease is refused at its next write. All times here are the
database's, so the processes' clocks don't matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta


@dataclass(frozen=True)
class Lease:
    """The right of one process to run the loops."""

    holder: str
    term: int
    """Number of times that the lease was taken so far."""
    expires_at: datetime

    def is_over(self, now: datetime) -> bool:
        return now >= self.expires_at


def taken(found: Lease | None, holder: str, now: datetime, held_for: timedelta) -> Lease | None:
    """Return the lease that `holder` gets, always in a new term; None while another process has it.

    A `holder` that already has the lease takes it again if the answer was lost or it has doubts.
    """
    if found is not None and found.holder != holder and not found.is_over(now):
        return None
    term = 1 if found is None else found.term + 1
    return Lease(holder, term, now + held_for)


def holds(found: Lease | None, holder: str, term: int, now: datetime) -> bool:
    """Whether a write by `holder` under `term` may still be made."""
    return (
        found is not None
        and (found.holder, found.term) == (holder, term)
        and not found.is_over(now)
    )


def renewed(lease: Lease, now: datetime, held_for: timedelta) -> Lease:
    return replace(lease, expires_at=now + held_for)


def released(lease: Lease, now: datetime) -> Lease:
    """End the lease at once, so that the next process need not wait. The term stays used."""
    return replace(lease, expires_at=now)
