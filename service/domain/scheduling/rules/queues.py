"""The rules of queues: guaranteed resources, and limits on the resources that the jobs of a queue
or of its users hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from service.domain.scheduling.placement.phrases import spoken
from service.domain.scheduling.placement.slots import ACCELERATOR, Node

DEFAULT = "default"
"""The queue of jobs that don't name a queue. It always exists."""

BOUNDS_OF_WAITING = ("max_queued", "max_queued_per_user")
"""Rules that limit the number of waiting jobs."""

MAX_NAMES = {
    **dict.fromkeys(("quota", "limit", "user_limit", "borrowing_limit", "lending_limit"), 64),
    "user_weights": 1000,
}
"""Maximum number of resources or users in each rule. The number is limited because the scheduler
reads all names in each round."""


@dataclass(frozen=True)
class Queue:
    """The rules of one queue. Resources have Ray's names: `{"GPU": 8}`. A resource that is not
    named is neither limited nor guaranteed. The amount of `accelerator_type:X` is the number of
    workers that request this type: each worker has one such GPU, although Ray counts only a
    thousandth."""

    name: str
    weight: float = 1.0
    """The queue's share of the total usage, relative to the queues with the same parent."""
    user_weights: Mapping[str, float] = field(default_factory=dict)
    """Each user's share of the queue's usage, relative to the other users; 1 for users not
    listed."""
    quota: Mapping[str, float] = field(default_factory=dict)
    """Guaranteed resources. Other queues may borrow these resources until the queue's jobs need
    them."""
    borrowing_limit: Mapping[str, float] = field(default_factory=dict)
    """Maximum resources that all running jobs of the queue can hold in addition to its quota."""
    lending_limit: Mapping[str, float] = field(default_factory=dict)
    """Maximum part of the quota that other queues may borrow. The rest stays free for the queue's
    jobs."""
    limit: Mapping[str, float] = field(default_factory=dict)
    """Maximum resources that all running jobs of the queue can hold in total, even if more
    resources are idle."""
    user_limit: Mapping[str, float] = field(default_factory=dict)
    """Maximum resources that all running jobs of a user can hold in total."""
    max_running: int | None = None
    max_running_per_user: int | None = None
    max_queued: int | None = None
    """Maximum number of waiting jobs; further submissions are refused."""
    max_queued_per_user: int | None = None
    max_priority: int = 100
    """The highest priority that users can set."""
    default_max_runtime_s: int | None = None
    """The limit in seconds of jobs whose documents have no limit. See `default_limit_s`."""
    max_runtime_s: int | None = None
    """The highest limit in seconds that a job can have."""
    budget: float | None = None
    """Maximum total cost of the queue's jobs, in the currency of the prices. Once the budget is
    used up, no job starts."""
    monthly_budget: float | None = None
    """Maximum cost of the queue's jobs per month (UTC)."""
    parent: str | None = None
    """The queue whose rules also apply to this queue, together with its other children: see
    `tree`."""

    @cached_property
    def most(self) -> Mapping[str, float]:
        """Maximum resources that all running jobs of the queue can hold under its `limit` and its
        `borrowing_limit`."""
        return {**self.limit, **{name: self._borrowed(name) for name in self.bound_by_borrowing}}

    @cached_property
    def bound_by_borrowing(self) -> list[str]:
        """The resources for which the borrowing limit allows less than the limit."""
        inf = math.inf
        return [n for n in self.borrowing_limit if self._borrowed(n) < self.limit.get(n, inf)]

    def _borrowed(self, name: str) -> float:
        return self.quota.get(name, 0.0) + self.borrowing_limit[name]

    @property
    def default_limit_s(self) -> int | None:
        """The limit in seconds of jobs whose documents have no limit."""
        default = self.default_max_runtime_s
        return self.max_runtime_s if default is None else default

    def weight_of(self, owner: str) -> float:
        return self.user_weights.get(owner, 1.0)


def changed(queue: Queue, changes: Mapping[str, Any]) -> Queue:
    """Return the queue after a merge patch (RFC 7396). null resets a rule to its default, and
    removes a name from an object."""
    given: dict[str, Any] = {}
    for rule in fields(Queue):
        if rule.name not in changes:
            continue
        before, value = getattr(queue, rule.name), changes[rule.name]
        if value is None:
            factory = rule.default_factory
            given[rule.name] = rule.default if factory is MISSING else factory()
        elif isinstance(before, Mapping):
            merged = {**before, **value}
            given[rule.name] = {name: most for name, most in merged.items() if most is not None}
        else:
            given[rule.name] = value
    return replace(queue, **given)


class Unfit(NamedTuple):
    """An error in a queue's rules."""

    pointer: str
    message: str
    hint: str


def unfit(queue: Queue) -> Unfit | None:
    """Return an error for the first rule that is too long or conflicts with another rule; None if
    there is none."""
    for rule, bound in MAX_NAMES.items():
        number = len(getattr(queue, rule))
        if number > bound:
            message = f"would have {number:,} names, but at most {bound:,} are allowed"
            return Unfit(f"/{rule}", message, "remove some names by setting them to null")
    for name, amount in queue.quota.items():
        most = queue.limit.get(name)
        if most is not None and most < amount:
            of_quota = f"which is less than the quota of {spoken(name, amount)}"
            message = f"is {spoken(name, most)}, {of_quota}"
            return Unfit(f"/limit/{name}", message, "raise the limit or lower the quota")
    for rule in ("borrowing_limit", "lending_limit"):
        for name in getattr(queue, rule):
            if name not in queue.quota:
                hint = f"also set a quota of {name}; it may be 0"
                return Unfit(f"/{rule}/{name}", "the queue has no quota of this resource", hint)
    default_s, most_s = queue.default_max_runtime_s, queue.max_runtime_s
    if default_s is not None and most_s is not None and default_s > most_s:
        message = f"is {default_s} s, which is more than max_runtime_s, {most_s} s"
        hint = "lower default_max_runtime_s or raise max_runtime_s"
        return Unfit("/default_max_runtime_s", message, hint)
    return None


def has_of(name: str, nodes: Iterable[Node]) -> float:
    """Return the amount of a resource on the accepted nodes, as the rules count it."""
    counted = "GPU" if name.startswith(ACCELERATOR) else name
    return sum(n.total.get(counted, 0.0) for n in nodes if n.accepted and name in n.total)
