"""Queues: what the jobs of a queue and of its users may hold, and what is theirs by right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NamedTuple

from service.domain.scheduling.placement.slots import ACCELERATOR, EPSILON, Node, spoken

DEFAULT = "default"
"""The queue of a job that names none; it is always there."""

BOUNDS_OF_WAITING = ("max_queued", "max_queued_per_user")
"""Rules that bound how many jobs wait."""

MAX_NAMES = {"quota": 64, "limit": 64, "user_limit": 64, "user_weights": 1000}
"""Most resources, or users, in each: the scheduler reads all of them in each round."""


@dataclass(frozen=True)
class Queue:
    """One queue's rules. Resources are in Ray's names: `{"GPU": 8}`; one that is not named is not
    limited, and nothing of it is guaranteed. Of `accelerator_type:X` rules count the workers that
    ask for it: each has one such GPU, though Ray counts a thousandth."""

    name: str
    weight: float = 1.0
    """Its share of what all queues use, beside the weights of the others."""
    user_weights: Mapping[str, float] = field(default_factory=dict)
    """Each user's share of what the queue uses, beside those of the others; 1 if not named."""
    quota: Mapping[str, float] = field(default_factory=dict)
    """Guaranteed: what others borrow of it is given back when its own jobs need it."""
    limit: Mapping[str, float] = field(default_factory=dict)
    """The most that its running jobs hold together, also where more is idle."""
    user_limit: Mapping[str, float] = field(default_factory=dict)
    """The same of each of its users."""
    max_running: int | None = None
    max_running_per_user: int | None = None
    max_queued: int | None = None
    """Jobs that wait; one more is refused when it is submitted."""
    max_queued_per_user: int | None = None
    max_priority: int = 100
    """The highest that a user may give."""
    budget: float | None = None
    """The most that its jobs may cost, in the currency of the prices; then none of them starts."""
    monthly_budget: float | None = None
    """The same in each month, by UTC."""

    def weight_of(self, owner: str) -> float:
        return self.user_weights.get(owner, 1.0)


def changed(queue: Queue, changes: Mapping[str, Any]) -> Queue:
    """The queue after a merge patch (RFC 7396): null stands for the default, and within an object
    it removes a name."""
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
    """Why the rules of a queue can't be taken."""

    pointer: str
    message: str
    hint: str


def unfit(queue: Queue) -> Unfit | None:
    """The rule that is too long, or that another one makes impossible; None if all fit."""
    for rule, bound in MAX_NAMES.items():
        number = len(getattr(queue, rule))
        if number > bound:
            message = f"would have {number:,} names, and may have {bound:,}"
            return Unfit(f"/{rule}", message, "leave some out; null removes one that is there")
    for name, amount in queue.quota.items():
        most = queue.limit.get(name)
        if most is not None and most < amount:
            of_quota = f"below the quota of {spoken(name, amount)}"
            message = f"is {spoken(name, most)}, {of_quota}"
            return Unfit(f"/limit/{name}", message, "raise the limit or lower the quota")
    return None


def has_of(name: str, nodes: Iterable[Node]) -> float:
    """How much the accepted nodes have of a resource, as rules count it."""
    counted = "GPU" if name.startswith(ACCELERATOR) else name
    return sum(n.total.get(counted, 0.0) for n in nodes if n.accepted and name in n.total)


def unmet_quotas(
    queue: Queue, others: Iterable[Queue], nodes: Sequence[Node]
) -> list[tuple[str, str]]:
    """(code, sentence) for each quota that the cluster can't honour, alone or with all others."""
    others = list(others)
    found = []
    for name, amount in queue.quota.items():
        there = has_of(name, nodes)
        together = amount + sum(other.quota.get(name, 0.0) for other in others)
        has = f"the cluster has {spoken(name, there)}"
        if amount > there + EPSILON:
            sentence = f"its quota is {spoken(name, amount)}, but {has}"
            found.append(("quota_above_cluster", sentence))
        elif together > there + EPSILON and amount > 0:
            sentence = f"the quotas of all queues are {spoken(name, together)}, but {has}"
            found.append(("quotas_above_cluster", sentence))
    return found
