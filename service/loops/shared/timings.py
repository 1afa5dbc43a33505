"""Waits and limits of the loops, and the rest that they leave to others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta

REST = 4.0
"""As a multiple of the time that a round took: all threads of a process share one interpreter, and
what a loop takes of it, submits and answers wait for."""
MAX_REST_S = 0.2


@dataclass(frozen=True)
class LoopTimings:
    """The values of a deployment, unless `service.runtime` is given others."""

    watch_period_s: float = 1.0
    """Between two snapshots of the cluster."""
    joining_period_s: float = 0.2
    """The same while a node is about to be accepted, or the cluster is about to answer."""
    refresh_s: float = 10.0
    """An unchanged snapshot is stored again after this time, so that its age says it is current."""
    impossible_grace_s: float = 60.0
    """How long a job that nothing could ever run is kept waiting before it fails: a node of the
    cluster may just be starting again."""
    reply_period_s: float = 0.2
    """Between two replies with data, so that a fast job's steps are stored in batches."""
    unavailable_pause_s: float = 0.5
    """Before a call that the cluster did not answer is made again."""
    request_period_s: float = 10.0
    """After which what was asked of Ray's autoscaler is asked again: a new Ray has not heard it."""
    unowned_period_s: float = 30.0
    """Between two searches for attempts that nobody owns."""
    deleted_period_s: float = 15.0
    """Between two comparisons of the nodes' files with the jobs that exist."""
    launch_grace_s: float = 40.0
    """How long after its claim an attempt may still be launched by another process: longer than
    the gateway waits for an answer."""
    last_launches_s: float = 5.0
    """How long a service that is told to stop waits for the launches that are under way. One that
    is cut off is in doubt, and the next leader would wait `launch_grace_s` for it."""
    storage_limit_s: float = 20.0
    """How long the end of an attempt waits for the storage to list its checkpoints."""
    lease_held_for: timedelta = timedelta(seconds=7)
    """With `lease_retry_s`, a holder that was stopped is replaced within 10 s."""
    lease_renewal_s: float = 2.0
    """Between two renewals, of which two may be lost."""
    lease_retry_s: float = 1.0
    """Between two requests for the lease, at least, also where it is about to end."""
    forecast_pause_s: float = 3.0
    """Between two forecasts, at least."""
    forecast_rest: float = 4.0
    """How long the forecaster rests after each step, as a multiple of the processor's time that the
    step took."""
    forecast_period_s: float = 15.0
    """The same where nothing has changed in the queue."""
    record_rest: float = 4.0
    """How long the recorder of decisions rests after each that it keeps, as a multiple of the
    processor's time that this took."""
    record_period_s: float = 0.2
    """The same, at least: the rounds of meanwhile share a transaction."""
    export_period_s: float = 2.0
    """Between two rounds of the export to MLflow."""
    metering_period_s: float = 5.0
    """Between two times that a process adds what it measured to the sums of all."""
    webhook_period_s: float = 10.0
    """Between two looks for messages of webhooks, at most."""
    webhook_sweep_s: float = 600.0
    """Between two deletions of old messages."""
    retention_period_s: float = 10.0
    """Between two rounds of the retention loop."""
    expiry_period_s: float = 60.0
    """Between two searches for jobs that are no longer kept, unless the last one found some."""
    most_between_measurements_s: float = 300.0
    """Between two measurements of the storage, however long one took: the database may have been
    away."""
    deletion_grace: timedelta = timedelta(minutes=1)
    """A deletion that began longer ago was cut off: the process that began it is gone."""


async def rest_after(began: float) -> None:
    """Rest for `REST` times as long as the round took that began at this time of the loop, and for
    `MAX_REST_S` at most. The next round finds what comes meanwhile."""
    took_s = asyncio.get_running_loop().time() - began
    await asyncio.sleep(min(REST * took_s, MAX_REST_S))
