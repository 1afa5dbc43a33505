"""Jobs that wait for others to end, and the limits of arrays: the rules, and their sentences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dray.views import JobState

MAX_NAMED = 3
"""Jobs that a sentence names."""


class Prospect(StrEnum):
    """How a dependency stands."""

    OPEN = "open"
    SATISFIED = "satisfied"
    NEVER = "never"
    """Not to be satisfied any more, whatever happens."""


def prospect(states: Collection[JobState], *, on_success: bool) -> Prospect:
    """How a dependency on jobs in these states stands: on one job, or on all of an array."""
    ended_badly = {JobState.FAILED, JobState.CANCELLED} & set(states)
    if on_success and ended_badly:
        return Prospect.NEVER
    if all(state.is_terminal for state in states):
        return Prospect.SATISFIED
    return Prospect.OPEN


@dataclass(frozen=True)
class Dependency:
    """A job or array that has not ended, for which another job waits."""

    id: str
    on_success: bool
    is_now: str
    """Its state; of an array, how many of its jobs have not ended."""


def waits_for(after: Sequence[Dependency]) -> str:
    """Why a job with these dependencies does not start."""
    shown = [
        f"the {'success' if one.on_success else 'end'} of {one.id} ({one.is_now})"
        for one in after[:MAX_NAMED]
    ]
    if len(after) > MAX_NAMED:
        shown.append(f"and of {len(after) - MAX_NAMED} more")
    return f"waits for {', '.join(shown)}"


def never_satisfied(after: str, culprit: str, state: JobState) -> str:
    """Why a job that was to start after the success of a job or array is cancelled."""
    ended = "failed" if state is JobState.FAILED else "was cancelled"
    which = "which" if after == culprit else f"of which {culprit}"
    return f"was to start after the success of {after}, {which} {ended}"


@dataclass(frozen=True)
class ArrayLimit:
    """The array that a job belongs to, where only so many of its jobs may run at a time."""

    array_id: str
    max_running: int

    def sentence(self, running: int, starting: int) -> str:
        """Why a job does not start while as many run, or start as soon as others have left."""
        verbs = ("job", "runs") if running == 1 else ("jobs", "run")
        soon = f", and {starting} {'starts' if starting == 1 else 'start'} next" if starting else ""
        return (
            f"{running} {verbs[0]} of {self.array_id} {verbs[1]}{soon}, "
            f"of at most {self.max_running} at once"
        )
