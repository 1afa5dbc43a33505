"""Views of what ran in a period."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import View
from dray.views.jobs import Cost, JobState


class AccountingRow(View):
    """An attempt, or all attempts of a job, in a period.

    `elapsed_s`, the seconds of resources, and `cost` only include the part that lies in the
    period, up to the attempt's latest report. All other fields describe the attempt as it is now.
    """

    job_id: str
    attempt: int
    """Number of the attempt; with `per=job`, of the job's last attempt in the period."""
    num_attempts: int
    """Always 1, except with `per=job`."""
    name: str
    owner: str
    queue: str
    """The queue in which the attempt started."""
    project: str
    labels: dict[str, str]
    array_id: str | None = None
    array_index: int | None = None
    state: JobState
    """The current state of the job."""
    is_deleted: bool
    """Whether the job has been deleted since."""
    reason: str | None = None
    """Code of the reason why the attempt ended, such as `succeeded` or `preempted`; null while it
    lives."""
    exit_code: int | None = None
    submitted_at: datetime
    eligible_at: datetime | None = None
    """Since when the job could have started before this attempt, if there had been slots: not
    counting holds, dependencies, begin times, and pauses before retries. Null for attempts from
    before dray recorded this time."""
    began_at: datetime
    """When the scheduler chose the attempt's slots."""
    started_at: datetime | None = None
    """When the attempt got its slots; null if it has not got them."""
    finished_at: datetime | None = None
    waited_s: float | None = None
    """Time from `eligible_at` to `began_at`."""
    elapsed_s: float
    """Time for which the attempt held slots."""
    num_workers: int
    """Current or last number of workers."""
    resources: dict[str, float]
    """Resources of all slots that the attempt holds or last held: `CPU`, `GPU`, `memory` in bytes,
    and custom resources."""
    slot_seconds: float
    cpu_seconds: float
    gpu_seconds: float
    max_runtime_s: int | None = None
    schedule_id: str | None = None
    """The schedule that submitted the job."""
    reservation: str | None = None
    """The reservation that the job names."""
    """The job's current limit."""
    nodes: list[str]
    """Host names of the nodes on which the attempt has held slots, or ids of nodes that dray no
    longer knows."""
    cost: Cost | None = None
    """Null if slots had no price. With `per=job`, only attempts in the currency of the last one
    count."""


class AccountingPage(View):
    """Attempts or jobs, in the order in which the jobs were submitted."""

    since: datetime
    until: datetime
    items: list[AccountingRow]
    next_cursor: str | None = None
