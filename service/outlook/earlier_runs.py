"""How long finished jobs took, by which the time of a waiting job is expected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy.orm import Session

from service.db.repositories import jobs as repository

FRESH_FOR = timedelta(seconds=30)
"""How old the answer may be: a run more changes little."""
MAX_RUNS = 2000
"""The newest runs that are looked at."""


class Kind(NamedTuple):
    """Jobs of one kind take about as long as each other."""

    owner: str
    name: str
    num_workers: int


Runs = Mapping[Kind, Sequence[float]]
"""Seconds that each succeeded job of a kind ran, newest last."""


class EarlierRuns:
    """Read now and then; belongs to one loop."""

    def __init__(self) -> None:
        self._read_at: datetime | None = None
        self._runs: Runs = {}

    def get(self, session: Session, now: datetime) -> Runs:
        if self._read_at is None or not now - self._read_at < FRESH_FOR:
            self._runs, self._read_at = _read(session), now
        return self._runs


def _read(session: Session) -> Runs:
    runs: defaultdict[Kind, list[float]] = defaultdict(list)
    for owner, name, num_workers, ran_s in reversed(repository.run_times(session, MAX_RUNS)):
        runs[Kind(owner, name, num_workers)].append(ran_s)
    return dict(runs)
