"""Rules and messages for jobs that wait for other jobs, and for the limits of arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dray.spec.ordering import Condition
from dray.views import JobState

MAX_NAMED = 3
"""Maximum number of jobs that a message names."""


class Prospect(StrEnum):
    """The state of a dependency."""

    OPEN = "open"
    SATISFIED = "satisfied"
    NEVER = "never"
    """The dependency can no longer be satisfied."""


class Prerequisite(NamedTuple):
    """A job or array for which another job or array waits."""

    id: str
    on: Condition
    each: bool = False
    """Whether each job of an array waits only for the job with the same index."""


BAD = frozenset({JobState.FAILED, JobState.CANCELLED})


def prospect(states: Collection[JobState], on: Condition) -> Prospect:
    """Return the state of a dependency on jobs with these states: one job, or all jobs of an
    array."""
    ended_badly = BAD & set(states)
    if on == "success" and ended_badly:
        return Prospect.NEVER
    if not all(state.is_terminal for state in states):
        return Prospect.OPEN
    return Prospect.NEVER if on == "failure" and not ended_badly else Prospect.SATISFIED


def is_against(state: JobState, on: Condition) -> bool:
    """Whether a job that ended in this state rules out the condition."""
    return state in BAD if on == "success" else on == "failure" and state not in BAD


def each_prospect(states: Collection[JobState], on: Condition) -> Prospect:
    """Like `prospect`, for an array in which each job waits for the job with the same index in
    another array. Returns NEVER only if none of the waiting jobs can ever start. If only some of
    them can never start, returns OPEN."""
    if not all(state.is_terminal for state in states):
        return Prospect.OPEN
    against = [is_against(state, on) for state in states]
    if all(against):
        return Prospect.NEVER
    return Prospect.OPEN if any(against) else Prospect.SATISFIED


@dataclass(frozen=True)
class Dependency:
    """An unfinished job or array for which another job waits."""

    id: str
    on: Condition
    is_now: str
    """The state of the job. For an array, the number of its jobs that have not ended."""


def waits_for(after: Sequence[Dependency]) -> str:
    """Return why a job with these dependencies does not start."""
    shown = [f"the {one.on} of {one.id} ({one.is_now})" for one in after[:MAX_NAMED]]
    if len(after) > MAX_NAMED:
        shown.append(f"and {len(after) - MAX_NAMED} more")
    return f"waits for {', '.join(shown)}"


def never_satisfied(after: str, failed: str, state: JobState) -> str:
    """Return why a job that depends on the success of a job or array is cancelled. If `state` is
    SUCCEEDED, the job depends on the failure instead."""
    if state is JobState.SUCCEEDED:
        which = "which" if after == failed else "all jobs of which"
        return f"depends on the failure of {after}, {which} succeeded"
    ended = "failed" if state is JobState.FAILED else "was cancelled"
    which = "which" if after == failed else f"of which {failed}"
    return f"depends on the success of {after}, {which} {ended}"


def never_satisfied_each(after: str, state: JobState) -> str:
    """Return why a job of an array is cancelled if it depends on the job with the same index in the
    array `after`."""
    on = "failure" if state is JobState.SUCCEEDED else "success"
    ended = "was cancelled" if state is JobState.CANCELLED else str(state).lower()
    return f"depends on the {on} of the job with the same index in {after}, which {ended}"


@dataclass(frozen=True)
class ArrayLimit:
    """A job's array, in which at most `max_running` jobs can run at the same time."""

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


class ArrayCounts:
    """Counts the jobs of arrays while a plan is made."""

    def __init__(self, running: Mapping[str, int]) -> None:
        """`running` contains the number of jobs that hold slots, keyed by array."""
        self._running = Counter(running)
        self._promised: Counter[str] = Counter()
        """Number of jobs for which other jobs are releasing slots, keyed by array."""

    def start(self, array: ArrayLimit | None) -> None:
        if array is not None:
            self._running[array.array_id] += 1

    def promise(self, array: ArrayLimit | None) -> None:
        if array is not None:
            self._promised[array.array_id] += 1

    def why_full(self, array: ArrayLimit | None) -> str | None:
        """Return why no other job of the array starts; None if one can start."""
        if array is None:
            return None
        running, promised = self._running[array.array_id], self._promised[array.array_id]
        is_full = running + promised >= array.max_running
        return array.sentence(running, promised) if is_full else None
