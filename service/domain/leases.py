"""The lease of the loops: which process may run them where several could.

A lease is held for a while and renewed well before it ends. Each time it is taken its term rises:
the term is the fencing token of everything that the loops write, so that a process which was
stopped past the end of its lease and continued finds out at its next write. Every time here is the
database's, so nobody's own clock matters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta


@dataclass(frozen=True)
class Lease:
    """The right of one process to run the loops."""

    holder: str
    term: int
    """How often the lease was taken so far."""
    expires_at: datetime

    def is_over(self, now: datetime) -> bool:
        return now >= self.expires_at


def taken(found: Lease | None, holder: str, now: datetime, held_for: timedelta) -> Lease | None:
    """The lease that `holder` gets, always in a new term; None while another process has it.

    If `holder` has it already, the answer was lost, or `holder` no longer trusts it.
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
    """Over at once, so that the next one need not wait; the term stays used."""
    return replace(lease, expires_at=now)
