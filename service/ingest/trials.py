"""Stores the metric values of sweeps' trials, and stops trials that are worse than others."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy.orm import Session

from dray.spec import Sweep
from service.db.models import JobRow, TrialRow
from service.db.repositories.submission import sweeps as repository
from service.domain.series import Points
from service.domain.states import STOPPED_EARLY, Trigger
from service.domain.sweeps import halving
from service.domain.sweeps.halving import Ranked, Reached, TrialStanding
from service.lifecycle.preemption import HOLDING
from service.lifecycle.transitions import move


def follow(
    session: Session,
    job: JobRow,
    stored: Mapping[tuple[str, int], Points],
    now: datetime,
    *,
    may_stop: bool,
) -> None:
    """Store the points of a trial's metric, and stop the trial if it is worse than others.

    `stored` contains points by metric and rank. `may_stop` is False if the trial has already ended.
    """
    if job.array_id is None or not stored:
        return
    row = repository.get(session, job.array_id)
    trial = repository.trial(session, job.id)
    if row is None or trial is None:
        return
    sweep = Sweep.model_validate(row.sweep)
    if (points := stored.get((sweep.metric, 0))) is None:
        return
    standing = TrialStanding(trial.value, trial.value_step, trial.last_step, trial.rung)
    standing, reached = halving.follow(sweep, standing, zip(*points, strict=True))
    trial.value, trial.value_step = standing.value, standing.value_step
    trial.last_step, trial.rung = standing.last_step, standing.rung
    for one in reached:
        if job.state not in HOLDING or not _goes_on(session, sweep, job, trial, one, now, may_stop):
            return


def _goes_on(
    session: Session,
    sweep: Sweep,
    job: JobRow,
    trial: TrialRow,
    reached: Reached,
    now: datetime,
    may_stop: bool,
) -> bool:
    """Judge the trial at a rung. Return False if the trial is stopped."""
    assert sweep.early_stopping is not None
    eta = sweep.early_stopping.eta
    repository.lock(session, trial.array_id)  # trials are judged one at a time
    repository.add_rung(session, trial.array_id, reached.rung, job.id, reached.value)
    found = repository.rank_on_rung(
        session, trial.array_id, reached.rung, reached.value, maximises=sweep.maximises
    )
    ranked = Ranked(*found)
    if ranked.goes_on(eta, reached.value) or not may_stop:
        return True
    value = "no number" if reached.value is None else f"{reached.value:.6g}"
    message = (
        f"stopped early at step {reached.step}: {ranked.num_better} of {ranked.num_judged - 1} "
        f"trials that reached this step earlier had a better {sweep.metric} than {value}, and only "
        f"the best 1 in {eta} continues"
    )
    data = {"step": reached.step, "rung": reached.rung, "value": reached.value}
    move(session, job, Trigger.CANCEL, code=STOPPED_EARLY, message=message, now=now, data=data)
    return False
