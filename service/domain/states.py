"""The life of a job as one table.

Every (state, trigger) pair that is not in `TRANSITIONS` is refused. Terminal states have no row, so
they are final. Each row names the reason codes that are allowed with the transition. They appear in
`Job.reason.code` and in the job's events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from dray.views import JobState as JobState
from service.domain.events import ANONYMOUS


class Trigger(StrEnum):
    """The causes of a job's transitions."""

    CLAIM = "claim"
    """The scheduler chose slots and a launch follows."""
    STEP = "step"
    """The first optimizer step was seen, or a script's process."""
    REFORM = "reform"
    """The running group lost workers and recovers in place."""
    SUCCEED = "succeed"
    """Every rank finished normally."""
    FAIL = "fail"
    """The attempt failed, and another one would not help or exceeds the retry budget."""
    RETRY = "retry"
    """The attempt ended and the job is tried again."""
    CANCEL = "cancel"
    """The user or the job's sweep cancels the job."""
    UNMET = "unmet"
    """A job whose success this job depends on did not succeed."""
    STOPPED = "stopped"
    """The attempt has ended after a request to stop."""
    IMPOSSIBLE = "impossible"
    """The cluster could not run the job even if it were empty."""


CANCELLED_BY_USER = "cancelled_by_user"
STOPPED_EARLY = "stopped_early"
"""Other trials of the sweep are better at the same step."""
TOO_MANY_FAILED = "too_many_failed"
"""More trials of the sweep failed than it allows, and this one has not started."""
STOP_CODES = frozenset({CANCELLED_BY_USER, STOPPED_EARLY})
"""Reasons for which a job that has had slots is cancelled."""

GIVE_UP_CODES = frozenset(
    {
        "user_error",
        "bad_data",
        "cannot_run",
        "diverged",
        "data_unreachable",
        "runtime_exceeded",
        "worker_lost",
        "infrastructure",
        "supervisor_lost",
    }
)
"""Reasons for which a job fails: its own error, or faults of the cluster or of a data source once
their retry budget is used up."""

UNFIT_CODES = frozenset({"document_refused", "runtime_exceeded", "cannot_run"})
"""Reasons for which a job that is due fails instead: this release refuses its document, its
`max_runtime_s` is used up, or its environment can't be installed."""

RETRY_CODES = frozenset(
    {
        "user_error",
        "diverged",
        "data_unreachable",
        "worker_lost",
        "infrastructure",
        "supervisor_lost",
        "slots_unavailable",
        "node_lost",
        "preempted",
    }
)
"""Reasons for which a job returns to the queue, with `not_before` set."""


@dataclass(frozen=True)
class Transition:
    to: JobState
    codes: frozenset[str]


def _table() -> Mapping[tuple[JobState, Trigger], Transition]:
    s, t = JobState, Trigger
    table = {
        (s.QUEUED, t.CLAIM): Transition(s.STARTING, frozenset({"claimed"})),
        (s.QUEUED, t.CANCEL): Transition(
            s.CANCELLED, frozenset({CANCELLED_BY_USER, TOO_MANY_FAILED})
        ),
        (s.QUEUED, t.UNMET): Transition(s.CANCELLED, frozenset({"dependency_never_satisfied"})),
        (s.QUEUED, t.IMPOSSIBLE): Transition(s.FAILED, frozenset({"unsatisfiable"})),
        (s.QUEUED, t.FAIL): Transition(s.FAILED, UNFIT_CODES),
        (s.STARTING, t.STEP): Transition(s.RUNNING, frozenset({"running"})),
        (s.RECOVERING, t.STEP): Transition(s.RUNNING, frozenset({"recovered"})),
        (s.RUNNING, t.REFORM): Transition(s.RECOVERING, frozenset({"group_lost"})),
        (s.CANCELLING, t.SUCCEED): Transition(s.SUCCEEDED, frozenset({"succeeded"})),
        (s.CANCELLING, t.STOPPED): Transition(s.CANCELLED, STOP_CODES),
    }
    for live in (s.STARTING, s.RUNNING, s.RECOVERING):
        table[live, t.SUCCEED] = Transition(s.SUCCEEDED, frozenset({"succeeded"}))
        table[live, t.FAIL] = Transition(s.FAILED, GIVE_UP_CODES)
        table[live, t.RETRY] = Transition(s.QUEUED, RETRY_CODES)
        table[live, t.CANCEL] = Transition(s.CANCELLING, STOP_CODES)
    return MappingProxyType(table)


TRANSITIONS = _table()


class IllegalTransition(Exception):
    """A transition that is not in the table, by an error in the caller or a lost race."""

    def __init__(self, state: JobState, trigger: Trigger, code: str | None = None):
        with_code = "" if code is None else f" with the reason {code!r}"
        super().__init__(f"a job that is {state} can't move by {trigger}{with_code}")
        self.state = state
        self.trigger = trigger


def transition(state: JobState, trigger: Trigger, code: str | None = None) -> JobState:
    """Return the state to which `trigger` leads. Raises IllegalTransition if the table lacks the
    pair or does not allow `code` with it."""
    rule = TRANSITIONS.get((state, trigger))
    if rule is None:
        raise IllegalTransition(state, trigger)
    if code is not None and code not in rule.codes:
        raise IllegalTransition(state, trigger, code)
    return rule.to


BEING_STOPPED = "; its processes are being stopped"


def cancelled_by(actor: str, owner: str) -> str:
    """Return the reason of a cancelled job. actor: the user or administrator who cancelled it."""
    return f"cancelled by {'the user' if actor in (owner, ANONYMOUS) else actor}"


def cancelled_while_queued(by: str, attempt: int) -> str:
    """Return the reason of a waiting job that was cancelled. by: `cancelled_by`. attempt: number of
    its last attempt, or 0."""
    if attempt:
        return f"{by} while it waited for attempt {attempt + 1}"
    return f"{by} before it started"


def once_stopped(message: str) -> str:
    """Return the reason of a cancelled job whose processes have ended. message: earlier reason."""
    return message.removesuffix(BEING_STOPPED)
