"""Rules and messages for jobs that wait for other jobs, and for the limits of arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dray.views import JobState

MAX_NAMED = 3
"""Maximum number of jobs that a message names."""


class Prospect(StrEnum):
    """The state of a dependency."""

    OPEN = "open"
    SATISFIED = "satisfied"
    NEVER = "never"
    """The dependency can no longer be satisfied."""


def prospect(states: Collection[JobState], *, on_success: bool) -> Prospect:
    """Return the state of a dependency on jobs with these states: one job, or all jobs of an
    array."""
    ended_badly = {JobState.FAILED, JobState.CANCELLED} & set(states)
    if on_success and ended_badly:
        return Prospect.NEVER
    if all(state.is_terminal for state in states):
        return Prospect.SATISFIED
    return Prospect.OPEN


@dataclass(frozen=True)
class Dependency:
    """An unfinished job or array for which another job waits."""

    id: str
    on_success: bool
    is_now: str
    """The state of the job. For an array, the number of its jobs that have not ended."""


def waits_for(after: Sequence[Dependency]) -> str:
    """Return why a job with these dependencies does not start."""
    shown = [
        f"the {'success' if one.on_success else 'end'} of {one.id} ({one.is_now})"
        for one in after[:MAX_NAMED]
    ]
    if len(after) > MAX_NAMED:
        shown.append(f"and {len(after) - MAX_NAMED} more")
    return f"waits for {', '.join(shown)}"


def never_satisfied(after: str, failed: str, state: JobState) -> str:
    """Return why a job that depends on the success of a job or array is cancelled."""
    ended = "failed" if state is JobState.FAILED else "was cancelled"
    which = "which" if after == failed else f"of which {failed}"
    return f"depends on the success of {after}, {which} {ended}"


@dataclass(frozen=True)
class ArrayLimit:
    """A job's array, of which at most `max_running` jobs can run at the same time."""

    array_id: str
    max_running: int

    def sentence(self, running: int, starting: int) -> str:
        """Return why a job does not start. `starting` is the number of jobs of the array that will
        start once other jobs have released slots."""
        verbs = ("job", "runs") if running == 1 else ("jobs", "run")
        soon = f", and {starting} {'starts' if starting == 1 else 'start'} next" if starting else ""
        return (
            f"{running} {verbs[0]} of {self.array_id} {verbs[1]}{soon}; "
            f"at most {self.max_running} can run at once"
        )
