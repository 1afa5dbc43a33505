"""Arrays of jobs, and sweeps, which are arrays of trials."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, Literal

from dray.views.base import Reason, View
from dray.views.jobs import JobState


class JobArray(View):
    """The jobs that one document with `array` made."""

    id: str
    name: str
    owner: str
    project: str
    queue: str
    size: int
    """Number of jobs that were made; those that were deleted since are in no count."""
    max_running: int | None = None
    counts: dict[JobState, int]
    """Number of jobs in each state that a job of the array is in."""
    is_sweep: bool = False
    """Whether its jobs are the trials of a sweep."""
    stopped_early: int = 0
    """Of those that are CANCELLED, the trials that were stopped because others are better."""
    created_at: datetime

    @property
    def state(self) -> str:
        """The number of its jobs in each state, as a sentence: `4 RUNNING, 96 QUEUED`."""
        return ", ".join(f"{n} {state}" for state in JobState if (n := self.counts.get(state)))

    @property
    def has_bad_ends(self) -> bool:
        """Whether a job failed or was cancelled, other than a trial that was stopped early."""
        bad = self.counts.get(JobState.FAILED, 0) + self.counts.get(JobState.CANCELLED, 0)
        return bad > self.stopped_early

    def is_settled(self, states: Collection[JobState] = ()) -> bool:
        """Whether each job is over, or in one of these states."""
        return all(state.is_terminal or state in states for state in self.counts)


class Trial(View):
    """A job of a sweep."""

    index: int
    job_id: str
    state: JobState
    reason: Reason
    parameters: dict[str, Any] | None = None
    """Values by name; null until the sampler has been asked for them."""
    value: float | None = None
    """Value by which the trial is compared; null while no finite number was reported."""
    step: int | None = None
    """Step at which the value was reported."""
    last_step: int | None = None
    """Highest step at which the metric was reported."""
    is_best: bool = False
    """Whether no trial that has neither failed nor been stopped early has a better value."""


class TrialPage(View):
    items: list[Trial]
    next_cursor: str | None = None


class JobSweep(JobArray):
    """The trials of a sweep, as an array, and the best of them."""

    metric: str
    mode: Literal["min", "max"]
    """Whether a lower or a higher value is better."""
    by: Literal["best", "last"]
    """The value of a trial: the best that it has reported, or the last."""
    sampler: str
    sweep: dict[str, Any]
    """The part `sweep` of the document."""
    best: Trial | None = None
    """The best trial so far; null while no trial has a value."""
