"""Periods and limits of the loops, and their rest after each round."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta

REST = 4.0
"""The rest after a round, as a multiple of the time that the round took: all threads of a process
share one interpreter, so requests wait while a loop uses it."""
MAX_REST_S = 0.2


@dataclass(frozen=True)
class LoopTimings:
    """The timings of the loops. `service.runtime` uses these values unless it gets others."""

    watch_period_s: float = 1.0
    """Seconds between two snapshots of the cluster."""
    joining_period_s: float = 0.2
    """Seconds between two snapshots while a node is about to be accepted, or the cluster does not
    answer."""
    refresh_s: float = 10.0
    """An unchanged snapshot is stored again after this time, so that its age shows that it is
    current."""
    impossible_grace_s: float = 60.0
    """How long a job that the cluster could never run waits before it fails: a node may be
    restarting."""
    reply_period_s: float = 0.2
    """Seconds between two replies with data, so that a fast job's steps are stored in batches."""
    unavailable_pause_s: float = 0.5
    """Seconds before a call that the cluster did not answer is repeated."""
    request_period_s: float = 10.0
    """Seconds after which the request to Ray's autoscaler is repeated: a new Ray lacks it."""
    unowned_period_s: float = 30.0
    """Seconds between two searches for attempts that no job owns."""
    deleted_period_s: float = 15.0
    """Seconds between two comparisons of the nodes' files with the existing jobs."""
    launch_grace_s: float = 40.0
    """Seconds after its claim in which another process may still launch an attempt: longer than the
    gateway waits for an answer."""
    last_launches_s: float = 5.0
    """How long a stopping service waits for its current launches. If it cancelled one, the next
    leader would not know its result, and would wait `launch_grace_s` for it."""
    storage_limit_s: float = 20.0
    """How long the end of an attempt waits for the storage to list its checkpoints."""
    lease_held_for: timedelta = timedelta(seconds=7)
    """With `lease_retry_s`, a holder that was stopped is replaced within 10 s."""
    lease_renewal_s: float = 2.0
    """Seconds between two renewals; two in a row may fail."""
    lease_retry_s: float = 1.0
    """Least seconds between two requests for the lease, even if it is about to expire."""
    forecast_pause_s: float = 3.0
    """Least seconds between two forecasts."""
    forecast_rest: float = 4.0
    """Rest of the forecaster after each step, as a multiple of the step's CPU time."""
    forecast_period_s: float = 15.0
    """Seconds between two forecasts while the queue does not change."""
    record_rest: float = 4.0
    """Rest of the decision recorder after each batch, as a multiple of the batch's CPU time."""
    record_period_s: float = 0.2
    """Least seconds between two batches: the rounds in between share a transaction."""
    export_period_s: float = 2.0
    """Seconds between two rounds of the export to MLflow."""
    metering_period_s: float = 5.0
    """Seconds between two times that a process adds its measurements to the sums of all."""
    webhook_period_s: float = 10.0
    """Most seconds between two searches for due webhook messages."""
    webhook_sweep_s: float = 600.0
    """Seconds between two deletions of old webhook messages."""
    retention_period_s: float = 10.0
    """Seconds between two rounds of the retention loop."""
    expiry_period_s: float = 60.0
    """Seconds between two searches for jobs to delete, unless the last search found some."""
    most_between_measurements_s: float = 300.0
    """Most seconds between two measurements of the storage, however long one took: the database
    may have been away."""
    deletion_grace: timedelta = timedelta(minutes=1)
    """A deletion that began longer ago was interrupted: its process is gone."""


async def rest_after(began: float) -> None:
    """Sleep for `REST` times the duration of the round, at most `MAX_REST_S`.

    `began` is the start of the round by the event loop's clock. The next round finds all changes of
    the meantime.
    """
    took_s = asyncio.get_running_loop().time() - began
    await asyncio.sleep(min(REST * took_s, MAX_REST_S))
