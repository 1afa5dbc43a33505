"""The states of a job and the transitions between them, as one table.

A (state, trigger) pair that is not in `TRANSITIONS` is rejected. Terminal states have no rows, so
they are final. Each row lists the reason codes that are allowed for the transition. The codes
appear in `Job.reason.code` and in the job's events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from dray.views import JobState as JobState
from service.domain.events import ANONYMOUS

UNFINISHED = tuple(state for state in JobState if not state.is_terminal)


class Trigger(StrEnum):
    """The causes of a job's transitions."""

    CLAIM = "claim"
    """The scheduler has chosen slots for the job, which is launched next."""
    STEP = "step"
    """The first optimizer step, or the process of a script, was observed."""
    REFORM = "reform"
    """The running group has lost workers and is recovering in place."""
    SUCCEED = "succeed"
    """Every rank finished normally."""
    FAIL = "fail"
    """The attempt failed, and a retry is pointless or would exceed the retry budget."""
    RETRY = "retry"
    """The attempt ended, and the job is retried."""
    CANCEL = "cancel"
    """The user, or the job's sweep or schedule, cancelled the job."""
    UNMET = "unmet"
    """A job on whose success this job depends did not succeed."""
    STOPPED = "stopped"
    """The attempt ended after a request to stop."""
    EXPIRE = "expire"
    """The job's deadline has passed, or can no longer be met."""
    IMPOSSIBLE = "impossible"
    """The job would not fit in the cluster even if the cluster were idle."""


CANCELLED_BY_USER = "cancelled_by_user"
STOPPED_EARLY = "stopped_early"
"""Other trials of the sweep were better at the same step."""
TOO_MANY_FAILED = "too_many_failed"
"""The sweep exceeded its limit of failed trials before this trial started."""
RESERVATION_MISSED = "reservation_missed"
"""The job of a schedule did not start before its reservation ended or was deleted."""
DEADLINE_PASSED = "deadline_passed"
RESERVATION_BEGINS = "reservation_begins"
"""The job ran on reserved nodes, and the reservation cancels such jobs."""
STOP_CODES = frozenset({CANCELLED_BY_USER, STOPPED_EARLY, RESERVATION_BEGINS})
"""Reasons for cancelling a job that has slots."""

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
        "corrupted",
        "supervisor_lost",
    }
)
"""Reasons for failing a job: an error of the job itself, or failures of the cluster or of a data
source after their retry budget is exhausted."""

UNFIT_CODES = frozenset({"document_refused", "runtime_exceeded", "cannot_run"})
"""Reasons for failing a waiting job instead of starting it: this release rejects its document, its
`max_runtime_s` is exhausted, or its environment can't be installed."""

RETRY_CODES = frozenset(
    {
        "user_error",
        "diverged",
        "data_unreachable",
        "worker_lost",
        "infrastructure",
        "corrupted",
        "supervisor_lost",
        "slots_unavailable",
        "node_lost",
        "preempted",
    }
)
"""Reasons for returning a job to the queue until the time `not_before`."""


@dataclass(frozen=True)
class Transition:
    to: JobState
    codes: frozenset[str]


def _table() -> Mapping[tuple[JobState, Trigger], Transition]:
    s, t = JobState, Trigger
    table = {
        (s.QUEUED, t.CLAIM): Transition(s.STARTING, frozenset({"claimed"})),
        (s.QUEUED, t.CANCEL): Transition(
            s.CANCELLED, frozenset({CANCELLED_BY_USER, TOO_MANY_FAILED, RESERVATION_MISSED})
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
    expired = Transition(s.CANCELLED, frozenset({DEADLINE_PASSED}))
    table[s.QUEUED, t.EXPIRE] = expired
    for live in (s.STARTING, s.RUNNING, s.RECOVERING):
        table[live, t.SUCCEED] = Transition(s.SUCCEEDED, frozenset({"succeeded"}))
        table[live, t.FAIL] = Transition(s.FAILED, GIVE_UP_CODES)
        table[live, t.RETRY] = Transition(s.QUEUED, RETRY_CODES)
        table[live, t.CANCEL] = Transition(s.CANCELLING, STOP_CODES)
        table[live, t.EXPIRE] = expired
    return MappingProxyType(table)


TRANSITIONS = _table()


class IllegalTransition(Exception):
    """A transition that is not in the table, caused by a bug in the caller or by a lost race."""

    def __init__(self, state: JobState, trigger: Trigger, code: str | None = None):
        with_code = "" if code is None else f" with the reason {code!r}"
        super().__init__(f"a job in state {state} has no transition {trigger}{with_code}")
        self.state = state
        self.trigger = trigger


def transition(state: JobState, trigger: Trigger, code: str | None = None) -> JobState:
    """Return the state to which `trigger` leads. Raises IllegalTransition if the pair is not in the
    table, or if the row does not allow `code`."""
    rule = TRANSITIONS.get((state, trigger))
    if rule is None:
        raise IllegalTransition(state, trigger)
    if code is not None and code not in rule.codes:
        raise IllegalTransition(state, trigger, code)
    return rule.to


BEING_STOPPED = "; its processes are being stopped"


def cancelled_by(actor: str, owner: str) -> str:
    """Return the reason message of a cancelled job. `actor` is the user or admin who cancelled the
    job."""
    return f"cancelled by {'the user' if actor in (owner, ANONYMOUS) else actor}"


def cancelled_while_queued(by: str, attempt: int) -> str:
    """Return the reason message of a job that was cancelled while it was waiting. `by` is the
    result of `cancelled_by`, and `attempt` is the number of the job's last attempt, or 0."""
    if attempt:
        return f"{by} while the job waited for attempt {attempt + 1}"
    return f"{by} before the job started"


def once_stopped(message: str) -> str:
    """Return the reason message of a cancelled job after its processes have ended. `message` is the
    previous message."""
    return message.removesuffix(BEING_STOPPED)
