"""The loops' periods and limits, and their pause after each round."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta

REST = 4.0
"""The pause after a round, as a multiple of the round's duration. All threads of a process share
one interpreter, so requests have to wait while a loop uses the interpreter."""
MAX_REST_S = 0.2


@dataclass(frozen=True)
class LoopTimings:
    """The timings of the loops. `service.runtime` uses the defaults unless other values are
    passed."""

    watch_period_s: float = 1.0
    """Seconds between two snapshots of the cluster."""
    joining_period_s: float = 0.2
    """Seconds between two snapshots while a node is about to be accepted, or while the cluster
    doesn't respond."""
    refresh_s: float = 10.0
    """Seconds after which an unchanged snapshot is stored again, so that its age shows that it is
    current."""
    impossible_grace_s: float = 60.0
    """Seconds to wait before failing a job that the cluster could never run, because a missing node
    might be restarting."""
    reply_period_s: float = 0.2
    """Minimum number of seconds between two replies with data, so that the steps of a fast job are
    stored in batches."""
    unavailable_pause_s: float = 0.5
    """Seconds to wait before retrying a call to which the cluster did not respond."""
    request_period_s: float = 10.0
    """Seconds between two requests to Ray's autoscaler, which are repeated because Ray forgets them
    when it restarts."""
    unowned_period_s: float = 30.0
    """Seconds between two searches for attempts that no job owns."""
    deleted_period_s: float = 15.0
    """Seconds between two comparisons of the nodes' files with the existing jobs."""
    launch_grace_s: float = 40.0
    """Seconds after an attempt is claimed during which another process might still launch it.
    Longer than the time for which the gateway waits for a response."""
    last_launches_s: float = 5.0
    """Seconds for which a stopping service waits until its current launches have finished. If the
    service cancelled a launch, the next leader could not determine whether the attempt was
    launched, and would have to wait for `launch_grace_s`."""
    storage_limit_s: float = 20.0
    """Maximum time in seconds to wait, at the end of an attempt, until the storage has listed the
    attempt's checkpoints."""
    lease_held_for: timedelta = timedelta(seconds=7)
    """Time for which the lease is valid. Together with `lease_retry_s`, this time ensures that a
    suspended holder is replaced within 10 s."""
    lease_renewal_s: float = 2.0
    """Seconds between two renewals of the lease. The lease is kept even if two renewals in a row
    fail."""
    lease_retry_s: float = 1.0
    """Minimum number of seconds between two requests for the lease, even if the lease is about to
    expire."""
    forecast_pause_s: float = 3.0
    """Minimum number of seconds between two forecasts."""
    forecast_rest: float = 4.0
    """The forecaster's pause after each step, as a multiple of the step's CPU time."""
    forecast_period_s: float = 15.0
    """Seconds between two forecasts while the queue doesn't change."""
    record_rest: float = 4.0
    """The decision recorder's pause after each batch, as a multiple of the batch's CPU time."""
    record_period_s: float = 0.2
    """Minimum number of seconds between two batches. All rounds in this interval are stored in one
    transaction."""
    export_period_s: float = 2.0
    """Seconds between two rounds of the export to MLflow."""
    metering_period_s: float = 5.0
    """Interval in seconds at which each process adds its measurements to the totals of all
    processes."""
    webhook_period_s: float = 10.0
    """Maximum number of seconds between two searches for due webhook messages."""
    webhook_sweep_s: float = 600.0
    """Seconds between two deletions of old webhook messages."""
    schedule_period_s: float = 10.0
    """Maximum number of seconds between two searches for schedules whose next time has come."""
    schedule_retry_s: float = 10.0
    """Seconds after which a run is tried again if the storage did not respond."""
    check_period_s: float = 0.5
    """Seconds between two requests for the state of a node's self-test."""
    retention_period_s: float = 10.0
    """Seconds between two rounds of the retention loop."""
    expiry_period_s: float = 60.0
    """Seconds between two searches for jobs to delete, unless the last search found some."""
    most_between_measurements_s: float = 300.0
    """Maximum number of seconds between two measurements of the storage, even if the last
    measurement was very slow, which may only have been because the database was unavailable."""
    deletion_grace: timedelta = timedelta(minutes=1)
    """Age after which an unfinished deletion counts as interrupted, because its process no longer
    exists."""


async def rest_after(began: float) -> None:
    """Sleep for `REST` times the duration of the round, but at most for `MAX_REST_S`.

    `began` is the start time of the round on the event loop's clock. The next round handles the
    changes that happen during the sleep.
    """
    took_s = asyncio.get_running_loop().time() - began
    await asyncio.sleep(min(REST * took_s, MAX_REST_S))
