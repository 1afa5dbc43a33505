"""The free resources of the nodes.

Nodes of the same kind with the same free resources form a group. Even a large cluster has few
groups, because there are few kinds of nodes, and most nodes are either empty or full.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from enum import IntEnum

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.gangs import Gangs, WorkerKind
from service.domain.scheduling.placement.node_kinds import Amounts, NodeKinds
from service.domain.scheduling.placement.shared_gpus import (
    Fractions,
    Parts,
    SharedGpus,
    asked_to_leave,
    parts_on,
    sharing,
    with_more,
)
from service.domain.scheduling.placement.slots import (
    EPSILON,
    WHOLE_GPUS,
    Holder,
    Node,
    is_part_of_gpu,
)
from service.domain.scheduling.placement.topology import Topology


class When(IntEnum):
    """The definition of free resources."""

    FREE = 0
    """Resources that no job holds."""
    NOW = 1
    """FREE, minus resources that are promised to a job."""
    SOON = 2
    """NOW, after all jobs that were asked to leave have left."""
    LATER = 3
    """SOON, as of the start of the first blocked job (`Stock.reserve`), minus the slots that this
    job will use."""
    NOW_AND_LATER = 4
    """The smaller of NOW and LATER: for jobs that may not have ended when the blocked job starts.
    """
    SOON_AND_LATER = 5
    """The smaller of SOON and LATER."""


_BOTH = {
    When.NOW: (When.NOW, When.SOON),
    When.NOW_AND_LATER: (When.NOW, When.SOON, When.LATER),
    When.SOON_AND_LATER: (When.SOON, When.LATER),
}


class NodeGroup:
    """Nodes of the same kind with the same free resources."""

    __slots__ = ("amounts", "kind", "nodes")

    def __init__(self, kind: int, amounts: Amounts) -> None:
        self.kind = kind
        """Kind of the nodes (`NodeKinds.of_node`)."""
        self.amounts = amounts
        """Free resources of each node; negative if more resources are promised than the node
        has."""
        self.nodes: set[str] = set()


class Free:
    """The free resources of all nodes, for one value of `When`."""

    def __init__(
        self, nodes: Iterable[tuple[str, int, Amounts]], totals: Sequence[Amounts]
    ) -> None:
        """`nodes` contains the id, kind and free resources of each node; `totals` contains the
        resources of an empty node by kind."""
        self._totals = totals
        self.exceeds_total = False
        """Whether the free resources of a node might exceed its total, which can happen with the
        counts of shared GPUs."""
        self.groups: dict[tuple[int, Amounts], NodeGroup] = {}
        self.group_of: dict[str, NodeGroup] = {}
        self.moves: list[tuple[str, NodeGroup, NodeGroup]] = []
        """(node id, old group, new group) of each change."""
        self.num_grown = 0
        """Number of times that resources were added."""
        for node_id, kind, amounts in nodes:
            self._join(node_id, kind, amounts)

    def set(self, node_id: str, amounts: Amounts) -> None:
        left = self.group_of[node_id]
        if left.amounts == amounts:
            return
        left.nodes.remove(node_id)
        if not left.nodes:
            del self.groups[left.kind, left.amounts]
        self.moves.append((node_id, left, self._join(node_id, left.kind, amounts)))

    def _join(self, node_id: str, kind: int, amounts: Amounts) -> NodeGroup:
        group = self.groups.get((kind, amounts))
        if group is None:
            group = self.groups[kind, amounts] = NodeGroup(kind, amounts)
            total = self._totals[kind]
            if any(most + EPSILON < each for most, each in zip(total, amounts, strict=True)):
                self.exceeds_total = True
        group.nodes.add(node_id)
        self.group_of[node_id] = group
        return group


class Stock:
    """The resources of all nodes during one plan."""

    def __init__(
        self,
        nodes: Sequence[Node],
        gangs: Gangs,
        topology: Topology,
        holders: Sequence[Holder] = (),
    ) -> None:
        """`gangs` must contain all gangs whose jobs will request slots. `topology` can contain
        additional nodes. `holders` are jobs that hold slots and could release them."""
        self._shared = SharedGpus(gangs.names, gangs.parts) if WHOLE_GPUS in gangs.names else None
        """Counts of shared GPUs; None if no GPU is shared."""
        self._sharing = sharing(holders if self._shared else ())
        self._parts: dict[tuple[When, str], list[Fractions]] = {}
        """Fractions of GPUs that jobs have (or will have, for SOON) on each node."""
        self.kinds = NodeKinds(nodes, gangs, topology)
        free = [(n.id, self.kinds.of_node[n.id], self._free_on(n, gangs)) for n in nodes]
        self.by_when = {w: Free(free, self.kinds.totals) for w in (When.FREE, When.NOW, When.SOON)}
        self._now, self._soon = self.by_when[When.NOW], self.by_when[When.SOON]
        self._ended: set[str] = set()
        """Jobs that will have ended when the first blocked job starts (LATER)."""

    def _free_on(self, node: Node, gangs: Gangs) -> Amounts:
        free = gangs.vector(node.available_to_us)
        if self._shared is None or WHOLE_GPUS not in node.available_to_us:
            return free
        return self._shared.exact(free, self.parts(When.FREE, node.id))

    def parts(self, when: When, node_id: str) -> list[Fractions]:
        """Return the fractions of GPUs that jobs hold on a node or, for `SOON`, that they will
        hold."""
        if self._shared is None:
            return []
        found = self._parts.get((when, node_id))
        if found is None:
            found = self._parts[when, node_id] = parts_on(node_id, self._sharing.get(node_id, ()))
        return found

    def left(
        self,
        job_id: str,
        amounts: Amounts,
        vector: Amounts,
        part: Slice,
        parts: Parts,
        sign: int = 1,
    ) -> tuple[Amounts, list[Fractions]]:
        """Return a node's amounts and fractions of GPUs for `SOON` after a job was asked to release
        the slots of `part` or, if `sign` is -1, after that request was withdrawn. `vector` is the
        vector of one worker, and `parts` are the fractions before the change."""
        number = sign * part.num_workers
        after = asked_to_leave(parts, job_id, number) if self._part_of(vector) else list(parts)
        return self._changed(amounts, vector, number, parts, after), after

    def _part_of(self, vector: Amounts) -> float:
        """Return the fraction of a GPU that the worker requests; 0 if it requests no fraction."""
        size = 0.0 if self._shared is None else vector[self._shared.gpu_at]
        return size if size < 1 else 0.0

    def _changed(
        self, amounts: Amounts, vector: Amounts, number: int, before: Parts, after: Parts
    ) -> Amounts:
        """Return a node's free amounts after the resources of `number` workers were added."""
        found = plus(amounts, vector, number)
        if self._shared is None or before == after:
            return found
        plain = [
            was if at in self._shared.indices else each
            for at, (was, each) in enumerate(zip(amounts, found, strict=True))
        ]
        return self._shared.changed(plain, before, after)

    def take(
        self, job_id: str, kind: WorkerKind, slices: Sequence[Slice], *, ends_before: bool = False
    ) -> None:
        """Give these slots to a job. ends_before: whether the job ends before `When.LATER`."""
        for part, vector in kind.vectors(slices):
            if part.node_id in self.kinds.of_node:
                for when in (When.FREE, When.NOW, When.SOON):
                    self._occupy(job_id, when, part, vector)
                if self._shared is not None:
                    self._cap(part.node_id, self.by_when[When.FREE])
                    self._cap(part.node_id, self._soon)
                if When.LATER in self.by_when:
                    if not ends_before:
                        self._occupy(job_id, When.LATER, part, vector)
                    self._derive(part.node_id)

    def _occupy(
        self, job_id: str, when: When, part: Slice, vector: Amounts, is_later: bool = False
    ) -> None:
        """Take slots on one node. No amount increases, even if the fractions of GPUs are packed
        differently afterwards."""
        free = self.by_when[when]
        before = free.group_of[part.node_id].amounts
        if self._shared is None:
            free.set(part.node_id, plus(before, vector, -part.num_workers))
            return
        parts = self.parts(when, part.node_id)
        after = parts
        if size := self._part_of(vector):
            more = Fractions(size, part.num_workers, is_later=is_later, job_id=job_id)
            after = with_more(parts, more)
        less = self._changed(before, vector, -part.num_workers, parts, after)
        self._parts[when, part.node_id] = after
        free.set(part.node_id, tuple(map(min, before, less)))

    def expect(self, job_id: str, kind: WorkerKind, slices: Sequence[Slice]) -> None:
        """Count these slots as slots that become free soon (`SOON`)."""
        self._soon.num_grown += 1
        for part, vector in kind.vectors(slices):
            group = self._soon.group_of.get(part.node_id)
            if group is not None:
                parts = self.parts(When.SOON, part.node_id)
                amounts, after = self.left(job_id, group.amounts, vector, part, parts)
                self._parts[When.SOON, part.node_id] = after
                self._soon.set(part.node_id, amounts)
                if When.LATER in self.by_when:
                    if job_id not in self._ended:
                        self._release(job_id, part, vector)
                    self._derive(part.node_id)

    def _release(self, job_id: str, part: Slice, vector: Amounts) -> None:
        """Add a job's slots on a node to the resources that are free `LATER`."""
        later = self.by_when[When.LATER]
        group, parts = later.group_of[part.node_id], self.parts(When.LATER, part.node_id)
        amounts, after = self.left(job_id, group.amounts, vector, part, parts)
        self._parts[When.LATER, part.node_id] = after
        later.set(part.node_id, amounts)

    def look_ahead(self, ending: Iterable[tuple[str, WorkerKind, Sequence[Slice]]]) -> None:
        """Begin to track LATER: the free resources after these jobs have left these slots."""
        soon = [(name, g.kind, g.amounts) for name, g in self._soon.group_of.items()]
        now = [(name, g.kind, g.amounts) for name, g in self._now.group_of.items()]
        self.by_when[When.LATER] = Free(soon, self.kinds.totals)
        for (when, node_id), parts in list(self._parts.items()):
            if when is When.SOON:
                self._parts[When.LATER, node_id] = list(parts)
        for job_id, kind, slices in ending:
            self._ended.add(job_id)
            for part, vector in kind.vectors(slices):
                if part.node_id in self.kinds.of_node:
                    self._release(job_id, part, vector)
        self.by_when[When.NOW_AND_LATER] = Free(now, self.kinds.totals)
        self.by_when[When.SOON_AND_LATER] = Free(soon, self.kinds.totals)

    def reserve(self, job_id: str, kind: WorkerKind, slices: Sequence[Slice]) -> None:
        """Keep these slots for a job that starts LATER."""
        for part, vector in kind.vectors(slices):
            self._occupy(job_id, When.LATER, part, vector, is_later=True)
            self._derive(part.node_id)

    def _derive(self, node_id: str) -> None:
        later = self.by_when[When.LATER].group_of[node_id].amounts
        for when, both in (
            (When.NOW, When.NOW_AND_LATER),
            (When.SOON, When.SOON_AND_LATER),
        ):
            free = self.by_when[both]
            before = free.group_of[node_id].amounts
            after = tuple(map(min, self.by_when[when].group_of[node_id].amounts, later))
            if after == before:
                continue
            if any(map(operator.gt, after, before)):
                free.num_grown += 1
            free.set(node_id, after)

    @property
    def ended(self) -> frozenset[str]:
        """Jobs that will have ended when the first blocked job starts (LATER)."""
        return frozenset(self._ended)

    def promise(self, job_id: str, kind: WorkerKind, slices: Sequence[Slice]) -> None:
        """Keep these slots for a job, although some of them are not free yet."""
        for part, vector in kind.vectors(slices):
            self._occupy(job_id, When.SOON, part, vector, is_later=True)
            self._cap(part.node_id, self._soon)
            if When.LATER in self.by_when:
                self._occupy(job_id, When.LATER, part, vector, is_later=True)
                self._derive(part.node_id)

    def most_more(
        self, when: When, job_id: str, kind: WorkerKind, held: Sequence[Slice]
    ) -> dict[str, int]:
        """Return, for each node on which a group has workers with fractions of GPUs, how many more
        workers fit on GPUs that the group does not use yet. If `when` is NOW, these workers must
        also fit at SOON, in addition to the fractions that are promised to jobs."""
        found: dict[str, int] = {}
        if self._shared is None or not is_part_of_gpu(kind.bundle):
            return found
        size = kind.bundle["GPU"]
        for node_id in {part.node_id for part in held}:
            for each in _BOTH.get(when, (when,)):
                if each not in self.by_when:
                    continue
                group = self.by_when[each].group_of.get(node_id)
                if group is not None:
                    parts = self.parts(each, node_id)
                    more = self._shared.capacity_to_grow(group.amounts, parts, size, job_id)
                    found[node_id] = min(more, found.get(node_id, more))
        return found

    def _cap(self, node_id: str, most: Free) -> None:
        """Limit the amounts that are free on the node now (`NOW`) to the amounts in `most`."""
        now, limit = self._now.group_of[node_id], most.group_of[node_id]
        self._now.set(node_id, tuple(map(min, now.amounts, limit.amounts)))


def plus(some: Amounts, vector: Amounts, times: int) -> Amounts:
    return tuple([amount + times * each for amount, each in zip(some, vector, strict=True)])
