"""The tree of queues: a queue may have a parent, whose rules bind all queues under it together.

As in Slurm's tree of accounts and Kueue's cohorts, jobs wait only in queues without children. The
path of a queue starts at the top of the tree and ends with the queue. A list of queues without
parents is a tree of depth 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from service.domain.scheduling.placement.phrases import spoken
from service.domain.scheduling.placement.slots import EPSILON, Node
from service.domain.scheduling.rules.queues import DEFAULT, Queue, Unfit, has_of

MAX_DEPTH = 8
"""Maximum number of queues on a path."""

Path = tuple[str, ...]
Uses = Mapping[str | None, Mapping[str, float]]
"""The resources in use, by queue and resource; of all queues for None."""


class QueueTree:
    """The queues by name, with their paths, children and quotas."""

    def __init__(self, queues: Iterable[Queue]) -> None:
        self.queues = {queue.name: queue for queue in queues}
        self.children: defaultdict[str | None, list[str]] = defaultdict(list)
        """The names of the children of each queue, and of the queues without a parent for None."""
        for queue in self.queues.values():
            self.children[self._parent(queue)].append(queue.name)
        self._paths: dict[str, Path] = {}
        self._lending_children: dict[str | None, list[str]] = {}
        is_flat = len(self.children) <= 1
        self.depth = 1 if is_flat else max(len(self.path(name)) for name in self.queues)

    def queue(self, name: str) -> Queue:
        """Return the queue. Queues that were created by a release without queue rules have no row
        in the table."""
        return self.queues.get(name) or Queue(name)

    def path(self, name: str) -> Path:
        """Return the names of the queues from the top of the tree down to this queue."""
        found = self._paths.get(name)
        if found is None:
            upwards = [name]
            above = self._parent(self.queue(name))
            while above is not None and above not in upwards:  # the database contains no circle
                upwards.append(above)
                above = self._parent(self.queues[above])
            found = self._paths[name] = tuple(reversed(upwards))
        return found

    def upwards(self, name: str) -> list[Queue]:
        """Return the queue, its parent, the parent's parent, and so on."""
        return [self.queue(each) for each in reversed(self.path(name))]

    def under(self, name: str) -> list[str]:
        """Return the names of the queue and of all queues under it."""
        found, at = {name: None}, 0
        while at < len(found):
            names = list(found)[at:]
            at = len(found)
            found |= dict.fromkeys(child for each in names for child in self.children.get(each, ()))
        return list(found)

    def _parent(self, queue: Queue) -> str | None:
        return queue.parent if queue.parent in self.queues else None

    @cached_property
    def quotas(self) -> dict[str, Mapping[str, float]]:
        """The guaranteed resources of each queue that has any. For resources that its own quota
        doesn't name, these are the sum of the quotas of its children."""
        found: dict[str, Mapping[str, float]] = {}
        for name in sorted(self.queues, key=lambda name: -len(self.path(name))):
            quota = {**self._of_children(name, found), **self.queues[name].quota}
            if quota:
                found[name] = quota
        return found

    def _of_children(
        self, name: str, quotas: Mapping[str, Mapping[str, float]]
    ) -> dict[str, float]:
        total: dict[str, float] = {}
        for child in self.children.get(name, ()):
            for resource, amount in quotas.get(child, {}).items():
                total[resource] = total.get(resource, 0.0) + amount
        return total

    @cached_property
    def lent(self) -> frozenset[str]:
        """The resources that the lending limit of any queue names."""
        return frozenset(name for queue in self.queues.values() for name in queue.lending_limit)

    @cached_property
    def lenders(self) -> dict[str, None]:
        """The queues with lending limits, and the queues above them, each after its parent."""
        lenders = [queue.name for queue in self.queues.values() if queue.lending_limit]
        return {above: None for name in lenders for above in self.path(name)}

    def lending_children(self, name: str | None) -> list[str]:
        """Return the children of a queue that have lending limits, or queues with such limits under
        them."""
        found = self._lending_children.get(name)
        if found is None:
            children = self.children.get(name, ())
            found = [child for child in children if child in self.lenders]
            self._lending_children[name] = found
        return found

    def reserved(self, name: str | None, resource: str, used: Uses) -> dict[str, float]:
        """Return the amounts that the children of a queue keep for themselves although they don't
        use them, keyed by child."""
        found = {}
        for child in self.lending_children(name):
            below = sum(self.reserved(child, resource, used).values())
            if (kept := self.kept(child, resource, used, below)) > EPSILON:
                found[child] = kept
        return found

    def kept(self, name: str, resource: str, used: Uses, below: float) -> float:
        """Return the amount that a queue keeps for itself and the queues under it although they
        don't use it. `below` is the amount that the queues under it keep."""
        lends = self.queues[name].lending_limit.get(resource)
        if lends is None:
            return max(0.0, below)
        quota = self.quotas.get(name, {}).get(resource, 0.0)
        return max(quota - lends - used.get(name, {}).get(resource, 0.0), below)

    def combined(self, name: str) -> Queue:
        """Return the queue with the rules for a job's priority and running time that result from
        its own rules and the rules of all queues above it."""
        line = self.upwards(name)
        longest = [queue.max_runtime_s for queue in line if queue.max_runtime_s is not None]
        defaults = (queue.default_max_runtime_s for queue in line)
        default_s = next((each for each in defaults if each is not None), None)
        most_s = min(longest, default=None)
        if default_s is not None and most_s is not None:
            default_s = min(default_s, most_s)
        return replace(
            line[0],
            max_priority=min(queue.max_priority for queue in line),
            max_runtime_s=most_s,
            default_max_runtime_s=default_s,
        )

    def misplaced(self, name: str) -> Unfit | None:
        """Return the error in the position of a queue in the tree; None if there is none."""
        queue = self.queues[name]
        if queue.parent is None:
            return None
        if queue.parent == DEFAULT:
            hint = "choose another parent"
            return Unfit("/parent", f"{DEFAULT!r} holds jobs, so it can't be a parent", hint)
        if queue.parent not in self.queues:
            hint = f"create it first with `dray queue set {queue.parent}`"
            return Unfit("/parent", f"there is no queue {queue.parent!r}", hint)
        if queue.parent in self.under(name):
            message = f"{queue.parent!r} is the queue itself or is under it, which forms a cycle"
            hint = f"choose a parent that is not under {name!r}"
            return Unfit("/parent", message, hint)
        deepest = max(len(self.path(each)) for each in self.under(name))
        if deepest > MAX_DEPTH:
            message = f"the tree would have {deepest} levels, but at most {MAX_DEPTH} are allowed"
            return Unfit("/parent", message, "choose a parent closer to the top of the tree")
        return None

    def overcommitted(self, name: str) -> Unfit | None:
        """Return an error if the quotas of the children of this queue or of a queue above it add up
        to more than their parent's quota or limit; None if they don't."""
        for above in self.upwards(name):
            rule = "quota"
            for resource, amount in self._of_children(above.name, self.quotas).items():
                most = above.quota.get(resource)
                if most is None:
                    rule, most = "limit", above.most.get(resource)
                if most is None or amount <= most + EPSILON:
                    continue
                added, has = spoken(resource, amount), spoken(resource, most)
                message = (
                    f"the quotas of the queues under {above.name!r} would add up to {added}, "
                    f"but its {rule} is {has}"
                )
                hint = f"lower their quotas, or raise the {rule} of {above.name!r} to {added}"
                pointer = f"/{rule}/{resource}" if above.name == name else f"/quota/{resource}"
                if resource not in self.quotas.get(name, {}):
                    pointer = "/parent"
                return Unfit(pointer, message, hint)
        return None


def unmet_quotas(tree: QueueTree, name: str, nodes: Sequence[Node]) -> list[tuple[str, str]]:
    """Return (code, sentence) for each quota of the queue that exceeds the cluster's resources,
    alone or together with the quotas of all other queues."""
    found = []
    for resource, amount in tree.queues[name].quota.items():
        there = has_of(resource, nodes)
        tops = (tree.quotas.get(top, {}) for top in tree.children[None])
        together = sum(quota.get(resource, 0.0) for quota in tops)
        has = f"the cluster has {spoken(resource, there)}"
        if amount > there + EPSILON:
            sentence = f"the queue's quota is {spoken(resource, amount)}, but {has}"
            found.append(("quota_above_cluster", sentence))
        elif together > there + EPSILON and amount > 0:
            sentence = f"the quotas of all queues add up to {spoken(resource, together)}, but {has}"
            found.append(("quotas_above_cluster", sentence))
    return found
