"""Views of the usage of the cluster over time, and of idle GPUs."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import View


class UsageCost(View):
    currency: str
    amounts: list[float]
    """One number for each period."""


class UsageSeries(View):
    """The usage by the jobs of all users, of a user or of a queue. Each list has one number for
    each period."""

    name: str | None = None
    """The user or queue; null for the total, and for the sum of all users or queues that have no
    series of their own."""
    slot_hours: list[float]
    cpu_hours: list[float]
    gpu_hours: list[float]
    measured_gpu_hours: list[float]
    """GPU-hours for which system metrics show how much the GPUs were used. They are added about ten
    minutes after they were measured."""
    idle_gpu_hours: list[float]
    """The part of `measured_gpu_hours` in which a kernel ran for less than 5% of the time."""
    costs: list[UsageCost]
    """The cost in each currency; empty if slots had no price."""
    num_started: list[int]
    """Number of jobs whose first attempt began."""
    num_succeeded: list[int]
    num_failed: list[int]
    num_cancelled: list[int]
    """Includes jobs that never started."""


class CapacitySeries(View):
    """The resources of the cluster. Each list has one number for each period."""

    measured_s: list[float]
    """Seconds for which the capacity and the waiting jobs were recorded. The rest of a period has
    not come yet, or the service did not run, or ran a release without this record."""
    cpu_hours: list[float]
    gpu_hours: list[float]


class WaitSeries(View):
    """For how long jobs waited for a reason."""

    code: str
    """Code of the reason, as in `dray explain`."""
    job_hours: list[float]
    """The sum over the waiting jobs, for each period. Only recorded time counts."""


class UsageReport(View):
    """The usage of the cluster in consecutive hours or days."""

    since: datetime
    """Beginning of the first period."""
    until: datetime
    """End of the last period, which can be in the future."""
    per: str
    """`hour` or `day`."""
    by: str | None = None
    """`user` or `queue`, or null."""
    time_zone: str
    starts: list[datetime]
    """The beginning of each period. Days have 23 or 25 hours when the clocks change."""
    total: UsageSeries
    series: list[UsageSeries]
    """The users or queues with the most slot-hours, and last, without a name, the sum of all
    others. Callers who are not admins get their own series and the sum of all other users."""
    capacity: CapacitySeries
    waits: list[WaitSeries]
    """The longest waits first."""


class IdleGpus(View):
    """A running job with GPUs that it does not use."""

    job_id: str
    name: str
    owner: str
    queue: str
    ranks: list[int]
    """The ranks with idle GPUs."""
    num_idle: int
    """Number of GPUs that have been idle since `idle_since` or earlier."""
    num_measured: int
    """Number of the job's GPUs that are measured."""
    idle_since: datetime
    """When the last of these GPUs became idle, or the time of its oldest sample."""


class UnmeasuredGpus(View):
    """A running job without recent samples of its GPUs."""

    job_id: str
    name: str
    owner: str
    queue: str
    num_gpus: float
    """The number of GPUs that the job holds."""


class IdleGpuReport(View):
    """GPUs that running jobs hold, but have not used for a while."""

    min_idle_s: float
    items: list[IdleGpus]
    """Jobs with idle GPUs, most idle GPUs first."""
    unmeasured: list[UnmeasuredGpus]
    """Jobs whose GPUs are not measured, so that it is unknown whether they use them."""
