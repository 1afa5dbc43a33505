"""Use cases of sweeps: the sweep with its best trial, and pages of its trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray import views
from dray.spec import Sweep
from service.db.models import SweepRow
from service.db.repositories.submission import sweeps as repository
from service.db.session import Database
from service.db.types import storable
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import ArrayNotFound, BadCursor, SweepNotFound
from service.domain.sweeps import naming
from service.jobs import arrays

MAX_TRIALS = 500
"""Maximum number of trials on one page."""


class Sweeps:
    """The use cases. Each raises SweepNotFound if the sweep does not exist. Sweeps are cancelled
    and deleted in the same way as arrays."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, sweep_id: str) -> views.JobSweep:
        return await self._database.read(lambda session: _view(session, sweep_id))

    async def trials(self, sweep_id: str, *, limit: int, cursor: str | None) -> views.TrialPage:
        """Return at most `limit` (1 to 500) trials, in the order of their indices. Raises BadCursor
        for a cursor from another listing."""
        limit = max(1, min(limit, MAX_TRIALS))
        after = _position(sweep_id, cursor)
        return await self._database.read(lambda session: _page(session, sweep_id, after, limit))


def _position(sweep_id: str, cursor: str | None) -> int:
    if cursor is None:
        return -1
    index = decode_cursor(_scope(sweep_id), cursor)
    if not isinstance(index, int) or not 0 <= index < 2**63:
        raise BadCursor("the cursor does not belong to this listing")
    return index


def _scope(sweep_id: str) -> str:
    return f"trials:{sweep_id}"


def _found(session: Session, sweep_id: str) -> SweepRow:
    row = repository.get(session, sweep_id) if storable(sweep_id) else None
    if row is None:
        raise SweepNotFound(
            f"there is no sweep {sweep_id}", hint="`dray ls` lists the existing jobs and sweeps"
        )
    return row


def _view(session: Session, sweep_id: str) -> views.JobSweep:
    row = _found(session, sweep_id)
    try:
        array = arrays.view(session, sweep_id)
    except ArrayNotFound:  # its last trial is just being deleted
        raise SweepNotFound(f"there is no sweep {sweep_id}") from None
    sweep = Sweep.model_validate(row.sweep)
    best = repository.best(session, sweep_id, maximises=sweep.maximises)
    names = naming.varied(row.sweep["parameters"])
    return views.JobSweep(
        **array.model_dump(),
        metric=sweep.metric,
        mode="max" if sweep.maximises else "min",
        by=sweep.by,
        sampler=sweep.sampler,
        sweep=row.sweep,
        best=None if best is None else _trial(best, names, is_best=True),
    )


def _page(session: Session, sweep_id: str, after: int, limit: int) -> views.TrialPage:
    row = _found(session, sweep_id)
    maximises = Sweep.model_validate(row.sweep).maximises
    best = repository.best(session, sweep_id, maximises=maximises)
    best_id = None if best is None else best.job_id
    rows = repository.page(session, sweep_id, after, limit + 1)
    shown = rows[:limit]
    more = encode_cursor(_scope(sweep_id), shown[-1].array_index) if len(rows) > limit else None
    names = naming.varied(row.sweep["parameters"])
    items = [_trial(one, names, is_best=one.job_id == best_id) for one in shown]
    return views.TrialPage(items=items, next_cursor=more)


def _trial(row: Row[Any], names: Mapping[str, str], *, is_best: bool) -> views.Trial:
    return views.Trial(
        index=row.array_index,
        variant=naming.variant(row.array_index, row.parameters, names),
        colour=row.colour,
        job_id=row.job_id,
        state=row.state,
        reason=views.Reason(code=row.reason_code, message=row.reason_message),
        parameters=row.parameters,
        value=row.value,
        step=row.value_step,
        last_step=row.last_step,
        is_best=is_best,
    )
