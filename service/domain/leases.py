"""Who may run the service's loops where several processes could.

A lease is held for a while and renewed well before it ends. Each time it is taken its term rises:
the term is the fencing token of everything that the loops write, so that a process which was
stopped past the end of its lease and let go again finds out at its next write. Every time here is
the database's, so nobody's own clock matters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

HELD_FOR = timedelta(seconds=7)
"""With the pause between two questions of those that stand by, a holder that was stopped is
replaced within 10 s."""
RENEW_AFTER_S = 2.0
"""Two renewals may be lost."""


@dataclass(frozen=True)
class Lease:
    """Whose it is, since how many changes of hands, and until when."""

    holder: str
    term: int
    expires_at: datetime

    def is_over(self, now: datetime) -> bool:
        return now >= self.expires_at


def taken(found: Lease | None, holder: str, now: datetime) -> Lease | None:
    """The lease that `holder` gets, always in a term of its own; None while it is another's.

    One that it has already is one whose answer was lost, or that it no longer trusts.
    """
    if found is not None and found.holder != holder and not found.is_over(now):
        return None
    term = 1 if found is None else found.term + 1
    return Lease(holder, term, now + HELD_FOR)


def holds(found: Lease | None, holder: str, term: int, now: datetime) -> bool:
    """Whether a write by `holder` under `term` may still be made."""
    return (
        found is not None
        and (found.holder, found.term) == (holder, term)
        and not found.is_over(now)
    )


def renewed(lease: Lease, now: datetime) -> Lease:
    return replace(lease, expires_at=now + HELD_FOR)


def released(lease: Lease, now: datetime) -> Lease:
    """Over at once, so that the next one need not wait; the term stays used."""
    return replace(lease, expires_at=now)
