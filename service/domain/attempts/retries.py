"""Decides whether an attempt that has ended is retried, and to which budget the retry is
charged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from ray_workers.shared.contracts import Cause

USER_BACKOFF_S = 1.0
INFRA_BACKOFF_S = 1.0
FREE_BACKOFF_S = 2.0
MAX_BACKOFF_S = 60.0
MAX_FREE_BACKOFF_S = 15.0
MAX_ROLLBACKS = 3
ROLLBACK_FACTOR = 0.5
"""Factor by which each rollback multiplies the learning rate."""


class RetryBudget(StrEnum):
    """The budget to which a retry is charged."""

    USER = "user"
    INFRA = "infra"
    FREE = "free"


@dataclass(frozen=True)
class Budgets:
    """The retries that the job may use, and the retries that it had used before this attempt
    ended."""

    max_user_retries: int
    max_infra_retries: int
    user_failures: int = 0
    infra_failures: int = 0
    free_requeues: int = 0
    """Number of free retries since an attempt last completed a step. Affects only the delay."""
    runtime_left_s: float | None = None
    rolls_back: bool = False
    """Whether the document requests a rollback when training diverges."""
    rollbacks: int = 0
    fails_alike: bool = False
    """Whether the previous attempt had the same error at the same line of the user's code."""
    script_differs_again: bool = False
    """Whether both this attempt and the previous attempt ended because the ranks of a script were
    not equal after their group was re-formed."""


@dataclass(frozen=True)
class Retry:
    delay_s: float
    budget: RetryBudget


@dataclass(frozen=True)
class GiveUp:
    code: str
    budget: RetryBudget
    because: str
    """The reason why there is no further attempt, as the end of a sentence."""


_ERROR_OF_A_LINE = re.compile(r"\w[\w.]*(?:: .*)? \(.*\bline [0-9]+\)", re.DOTALL)
"""Matches `TypeName: message (file, line n)`, the form in which ranks report errors in the user's
code."""
_ROLE = re.compile(r" \(rank [0-9]+ is [^()]*\)$")


def is_same_error(message: str, before: str) -> bool:
    """Whether two attempts ended with exceptions of the same type, with the same message and line.
    The ranks may differ."""
    mine, theirs = _ROLE.sub("", message), _ROLE.sub("", before)
    return mine == theirs and _ERROR_OF_A_LINE.fullmatch(mine) is not None


def _backoff(first_s: float, before: int, cap_s: float) -> float:
    """Return `first_s` doubled for each earlier failure, up to `cap_s`."""
    return min(cap_s, first_s * 2.0 ** min(before, 30))


BY_DRILL = frozenset({Cause.USER_ERROR, Cause.WORKER_LOST, Cause.CORRUPTED})
"""Possible causes of a group's end if the group doesn't recover in place from an injected fault."""


BY_OVERLOAD = frozenset({Cause.WORKER_LOST, Cause.INFRASTRUCTURE, Cause.SUPERVISOR_LOST})
"""Possible causes of a group's end if the group starts or recovers too slowly, or if its supervisor
responds too slowly."""


def decide(
    cause: Cause, budgets: Budgets, *, by_drill: bool = False, by_overload: bool = False
) -> Retry | GiveUp:
    """Decide whether to retry. User errors, infrastructure faults and preemptions have separate
    budgets.

    cause: why an unsuccessful attempt ended. A stopped attempt counts as preempted. by_drill: the
    fault was injected on purpose, so the retry is not counted. by_overload: the machines were too
    slow; the number of retries is unlimited, with increasing delays, because it is unknown how long
    the overload will last.
    """
    if cause is Cause.CANNOT_RUN:
        return GiveUp(cause, RetryBudget.USER, "a retry would not fix the code")
    if cause is Cause.BAD_DATA:
        return GiveUp(cause, RetryBudget.USER, "a retry would not fix the data")
    if cause is Cause.RUNTIME_EXCEEDED:
        return GiveUp(cause, RetryBudget.USER, "max_runtime_s is used up")
    if budgets.runtime_left_s is not None and budgets.runtime_left_s <= 0:
        return GiveUp(Cause.RUNTIME_EXCEEDED, RetryBudget.USER, "max_runtime_s is used up")
    if by_drill and cause in BY_DRILL:
        delay_s = _backoff(FREE_BACKOFF_S, budgets.free_requeues, MAX_FREE_BACKOFF_S)
        return Retry(delay_s, RetryBudget.FREE)
    if cause is Cause.WORKER_LOST and budgets.script_differs_again:
        because = "the previous attempt ended in the same way"
        return GiveUp(Cause.USER_ERROR, RetryBudget.USER, because)
    if by_overload and cause in BY_OVERLOAD:
        return Retry(
            _backoff(FREE_BACKOFF_S, budgets.free_requeues, MAX_BACKOFF_S), RetryBudget.FREE
        )
    match cause:
        case Cause.USER_ERROR:
            if budgets.fails_alike and budgets.user_failures < budgets.max_user_retries:
                because = "the previous attempt failed with the same error at the same line"
                return GiveUp(cause, RetryBudget.USER, because)
            if budgets.user_failures >= budgets.max_user_retries:
                because = f"max_retries is {budgets.max_user_retries}"
                return GiveUp(cause, RetryBudget.USER, because)
            delay_s = _backoff(USER_BACKOFF_S, budgets.user_failures, MAX_BACKOFF_S)
            return Retry(delay_s, RetryBudget.USER)
        case Cause.DIVERGED:
            if not budgets.rolls_back:
                return GiveUp(cause, RetryBudget.USER, "a retry would diverge again")
            if budgets.rollbacks >= MAX_ROLLBACKS:
                because = f"{MAX_ROLLBACKS} rollbacks, each halving the learning rate, did not help"
                return GiveUp(cause, RetryBudget.USER, because)
            return Retry(0.0, RetryBudget.FREE)
        case Cause.WORKER_LOST | Cause.INFRASTRUCTURE | Cause.CORRUPTED | Cause.SUPERVISOR_LOST:
            return _charge_infra(cause, budgets, "faults of the cluster")
        case Cause.DATA_UNREACHABLE:
            return _charge_infra(cause, budgets, "faults of the cluster and of data sources")
        case Cause.SLOTS_UNAVAILABLE | Cause.NODE_LOST | Cause.PREEMPTED:
            delay_s = _backoff(FREE_BACKOFF_S, budgets.free_requeues, MAX_FREE_BACKOFF_S)
            return Retry(delay_s, RetryBudget.FREE)
        case Cause.SUCCEEDED | Cause.STOPPED:
            raise ValueError(f"an attempt that {cause} is not retried")
        case _:
            assert_never(cause)


def _charge_infra(cause: Cause, budgets: Budgets, faults: str) -> Retry | GiveUp:
    if budgets.infra_failures >= budgets.max_infra_retries:
        because = f"{budgets.max_infra_retries} retries for {faults} are used up"
        return GiveUp(cause, RetryBudget.INFRA, because)
    delay_s = _backoff(INFRA_BACKOFF_S, budgets.infra_failures, MAX_BACKOFF_S)
    return Retry(delay_s, RetryBudget.INFRA)
