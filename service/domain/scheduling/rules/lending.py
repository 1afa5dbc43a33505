"""The slots that queues keep for their own jobs although they are idle, because of their lending
limits.

A lending limit does not name slots. It bounds what the jobs of the other queues can hold together,
so a job for which too little is left can still take slots from running jobs. Only slots that the
jobs of every queue can use are counted, and the limit doesn't apply to jobs that run elsewhere:
jobs that are bound to a reservation, and gangs whose ranks are pinned to the nodes of silos.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.gangs import WorkerKind
from service.domain.scheduling.placement.phrases import spoken
from service.domain.scheduling.placement.slots import EPSILON, Holder, Node, amounts
from service.domain.scheduling.rules.queues import has_of
from service.domain.scheduling.rules.tree import Path, QueueTree


class _Held:
    """The resources that the jobs of the queues hold, and that the queues keep for themselves."""

    def __init__(
        self,
        tree: QueueTree,
        resources: Collection[str],
        held: Iterable[tuple[str, Mapping[str, float]]] = (),
    ) -> None:
        """`held` contains pairs of a queue and resources that a job of the queue holds."""
        self._tree = tree
        self.amounts: defaultdict[str | None, dict[str, float]] = defaultdict(dict)
        """The resources that the jobs of each queue hold, including the queues under it; of all
        queues for None."""
        self._kept: dict[str, dict[str, float]] = {resource: {} for resource in resources}
        """For each resource, the result of `tree.kept` for each queue that `tree.lenders`
        contains."""
        for queue, of_job in held:
            for resource in self._kept.keys() & of_job.keys():
                self._add(tree.path(queue), resource, of_job[resource])
        for resource in resources:
            self._keep(reversed(tree.lenders), resource)

    def copy(self) -> _Held:
        found = copy.copy(self)
        found.amounts = defaultdict(dict, {name: dict(has) for name, has in self.amounts.items()})
        found._kept = {resource: dict(kept) for resource, kept in self._kept.items()}
        return found

    def count(self, queue: str, held: Iterable[tuple[str, float]]) -> None:
        """Count additional resources that jobs of the queue hold."""
        path = self._tree.path(queue)
        for resource, amount in held:
            if resource in self._kept:
                self._add(path, resource, amount)
                upwards = (name for name in reversed(path) if name in self._tree.lenders)
                self._keep(upwards, resource)

    def _add(self, path: Path, resource: str, amount: float) -> None:
        for name in (None, *path):
            of_queue = self.amounts[name]
            of_queue[resource] = of_queue.get(resource, 0.0) + amount

    def _keep(self, upwards: Iterable[str], resource: str) -> None:
        """Compute what these queues keep, each queue before its parent."""
        for name in upwards:
            below = sum(self.reserved(name, resource).values())
            self._kept[resource][name] = self._tree.kept(name, resource, self.amounts, below)

    def reserved(self, name: str | None, resource: str, but: str = "") -> dict[str, float]:
        """Like `tree.reserved`, without the child `but`."""
        kept, children = self._kept[resource], self._tree.lending_children(name)
        return {n: kept[n] for n in children if n != but and kept[n] > EPSILON}


class Lending:
    """Tracks what the queues hold, and what they keep for themselves, while a plan is made."""

    def __init__(
        self, tree: QueueTree, nodes: Sequence[Node], holders: Iterable[Holder] = ()
    ) -> None:
        """`nodes` contains the nodes that the jobs of every queue can use (`Windows.lendable`)."""
        self._tree = tree
        self._nodes = frozenset(node.id for node in nodes)
        self._total = {name: has_of(name, nodes) for name in tree.lent}
        self._empty = _Held(tree, self._total)
        held = ((e.queue, amounts(e.request.mean_bundle, self._inside(e.slices))) for e in holders)
        self._now = _Held(tree, self._total, held)
        self._soon = self._now.copy()
        """The resources that the queues hold now, and once the jobs that were asked to release
        slots have released them."""
        self._found: dict[tuple[str, WorkerKind, bool], tuple[int, str] | None] = {}
        """The answers of `workers` since the uses have changed."""
        self._at_most: dict[tuple[str, WorkerKind], tuple[int, str] | None] = {}
        """Like `_found`, if no job held slots."""

    def take(self, queue: str, kind: WorkerKind, slices: Sequence[Slice]) -> None:
        """Count slots that a job of the queue gets."""
        number = self._inside(slices)
        self._count(self._now, queue, kind, number)
        self.expect(queue, kind, number)

    def leave(self, queue: str, kind: WorkerKind, slices: Sequence[Slice], sign: int = 1) -> None:
        """Count slots that a job of the queue was asked to release; with -1 as `sign`, slots that a
        job of the queue will get."""
        self.expect(queue, kind, -sign * self._inside(slices))

    def expect(self, queue: str, kind: WorkerKind, num_workers: int) -> None:
        """Count workers that a job of the queue will have."""
        self._count(self._soon, queue, kind, num_workers)

    def claim(self, queue: str, kind: WorkerKind, num_workers: int) -> None:
        """Count workers for which an overdue job waits, so that later jobs don't repeatedly borrow
        what the overdue job needs. If too little would be left for a job even if no job held slots,
        the job claims nothing."""
        if self.ever_allows(queue, kind, num_workers):
            self._count(self._now, queue, kind, num_workers)
            self.expect(queue, kind, num_workers)

    def ever_allows(self, queue: str, kind: WorkerKind, num_workers: int) -> bool:
        """Whether `num_workers` workers of a job of this queue fit if no job holds slots. A job
        within its queue's quota can start in any case."""
        if _runs_elsewhere(kind):
            return True
        if (queue, kind) not in self._at_most:
            self._at_most[queue, kind] = self._workers(queue, kind, self._empty)
        most = self._at_most[queue, kind]
        return most is None or most[0] >= num_workers

    def _inside(self, slices: Sequence[Slice]) -> int:
        return sum(part.num_workers for part in slices if part.node_id in self._nodes)

    def trial(self) -> Lending:
        """Return a copy in which jobs can leave as a trial."""
        found = copy.copy(self)
        found._found = {}
        found._soon = self._soon.copy()
        return found

    def workers(self, queue: str, kind: WorkerKind, *, soon: bool) -> tuple[int, str] | None:
        """Return how many workers of a job of this queue fit without the resources that other
        queues keep for themselves, and a message that names these resources; None if no queue keeps
        any of the kind's resources, or if the job runs on other nodes."""
        if _runs_elsewhere(kind):
            return None
        key = queue, kind, soon
        if key not in self._found:
            self._found[key] = self._workers(queue, kind, self._soon if soon else self._now)
        return self._found[key]

    def _workers(self, queue: str, kind: WorkerKind, uses: _Held) -> tuple[int, str] | None:
        found, path = None, self._tree.path(queue)
        for resource, each in kind.counted:
            if not each or resource not in self._total:
                continue
            keeping: dict[str, float] = {}
            for above, but in zip((None, *path), (*path, ""), strict=True):
                keeping |= uses.reserved(above, resource, but)
            if not keeping:
                continue
            kept = sum(keeping.values())
            idle = self._total[resource] - uses.amounts.get(None, {}).get(resource, 0.0)
            number = max(0, math.floor((idle - kept + EPSILON) / each))
            if found is None or number < found[0]:
                first = min(keeping, key=lambda name: (-keeping[name], name))
                shown = min(kept, idle) if idle > EPSILON else kept
                message = (
                    f"{spoken(resource, shown)} that are not in use are kept for the queue "
                    f"{first!r}{' and others' if len(keeping) > 1 else ''}, because of its lending "
                    "limit"
                )
                found = number, message
        return found

    def _count(self, uses: _Held, queue: str, kind: WorkerKind, num_workers: int) -> None:
        self._found.clear()
        uses.count(queue, [(name, num_workers * each) for name, each in kind.counted])


def _runs_elsewhere(kind: WorkerKind) -> bool:
    """Whether the workers run on nodes that only some jobs can use."""
    return bool(kind.homes) or (kind.fence is not None and kind.fence.own is not None)
