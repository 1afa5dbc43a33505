"""Views of job arrays and of sweeps, which are arrays of trials."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, Literal

from dray.views.base import Reason, View
from dray.views.jobs import JobState


class JobArray(View):
    """The jobs that were created from one document with `array`."""

    id: str
    name: str
    owner: str
    project: str
    queue: str
    size: int
    """Number of jobs that were created. `counts` does not include jobs that were deleted later."""
    max_running: int | None = None
    counts: dict[JobState, int]
    """Number of jobs in each state; states without jobs are omitted."""
    is_sweep: bool = False
    """Whether the jobs are the trials of a sweep."""
    stopped_early: int = 0
    """Number of trials that were stopped early because other trials were better. Their state is
    CANCELLED."""
    created_at: datetime

    @property
    def state(self) -> str:
        """The number of jobs in each state, such as `4 RUNNING, 96 QUEUED`."""
        return ", ".join(f"{n} {state}" for state in JobState if (n := self.counts.get(state)))

    @property
    def has_bad_ends(self) -> bool:
        """Whether any job failed or was cancelled, not counting trials that were stopped early."""
        bad = self.counts.get(JobState.FAILED, 0) + self.counts.get(JobState.CANCELLED, 0)
        return bad > self.stopped_early

    def is_settled(self, states: Collection[JobState] = ()) -> bool:
        """Whether every job has ended or is in one of the given states."""
        return all(state.is_terminal or state in states for state in self.counts)


class ArrayChange(View):
    """The effect of a change on the jobs of an array."""

    array: JobArray
    changed: int
    """Number of jobs that were changed."""
    unchanged: int
    """Number of jobs that already were as requested."""
    skipped: dict[str, int]
    """Number of jobs to which the change does not apply, by the code of the problem: for example,
    `job_finished` for jobs that have ended."""


class Trial(View):
    """A job of a sweep."""

    index: int
    job_id: str
    variant: str = ""
    """`Job.variant` of the trial's job, such as `#3 lr 0.01, width 32`."""
    colour: int | None = None
    """`Job.colour` of the trial's job."""
    state: JobState
    reason: Reason
    parameters: dict[str, Any] | None = None
    """Values of the parameters, keyed by name; null until the sampler has chosen them."""
    value: float | None = None
    """Value by which trials are compared; null until the trial has reported a finite number."""
    step: int | None = None
    """Step at which the value was reported."""
    last_step: int | None = None
    """Highest step at which the metric was reported."""
    is_best: bool = False
    """Whether this is the best trial. Failed and stopped trials are excluded."""


class TrialPage(View):
    items: list[Trial]
    next_cursor: str | None = None


class JobSweep(JobArray):
    """A sweep: the array of its trials, and the best trial."""

    metric: str
    mode: Literal["min", "max"]
    """Whether a lower or a higher value is better."""
    by: Literal["best", "last"]
    """Which reported value of a trial counts: the best or the last."""
    sampler: str
    sweep: dict[str, Any]
    """The field `sweep` of the job document."""
    best: Trial | None = None
    """The best trial so far; null if no trial has a value yet."""
