"""A rank's copy of the weights, and its exchange with the neighbours of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ray_workers.training.elastic import process_group
from ray_workers.training.parallel.gossip.graphs import Complete, Graph

ROUNDING = 1e-6
"""Push weights whose sum is off by this part are not touched, so that a job that resumes is equal
to the bit to one that went on."""


class FlatCopy:
    """Tensors as one row of numbers for each dtype, which travels as one message."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
        self._groups = [[t for t in tensors if t.dtype == dtype] for dtype in dtypes]

    def empty(self) -> list[Tensor]:
        """Memory for a copy."""
        return [group[0].new_empty(sum(t.numel() for t in group)) for group in self._groups]

    @torch.no_grad()
    def read(self, rows: list[Tensor] | None = None) -> list[Tensor]:
        """Copy the tensors into `rows`, or into memory of its own."""
        rows = self.empty() if rows is None else rows
        for group, row in zip(self._groups, rows, strict=True):
            torch._foreach_copy_(_views(group, row), group)
        return rows

    @torch.no_grad()
    def write(self, rows: Sequence[Tensor]) -> None:
        """Copy `rows` into the tensors."""
        for group, row in zip(self._groups, rows, strict=True):
            torch._foreach_copy_(group, _views(group, row))


def _views(group: Sequence[Tensor], row: Tensor) -> list[Tensor]:
    parts = torch.split(row, [tensor.numel() for tensor in group])
    return [part.view(tensor.shape) for part, tensor in zip(parts, group, strict=True)]


class Mixing:
    """Mixes this rank's copy with those of its neighbours, one exchange a step.

    A copy is `push_weight` times the weights that the model has (Assran et al. 2019, algorithm 1:
    x, w and z = x / w). It is 1 on every rank where the rows of the graph sum to 1.

    An exchange that breaks off has changed nothing: `begin` sends, `finish` waits for what comes,
    and only `apply` writes to the model.
    """

    def __init__(self, copy: FlatCopy, *, pushes: bool) -> None:
        self.pushes = pushes
        self.push_weight = 1.0
        self.next_step = 1
        """The step whose graph is used next."""
        self.leaves_after: int | None = None
        """The step after which all ranks leave, once this rank has heard of one."""
        self._copy = copy
        self.own = copy.empty()
        """The copy as it is sent, and the mixture until `apply`."""
        self._others: list[list[Tensor]] = []
        """Memory for the copies that come, for as many as ever came in one step."""
        self._graph: Graph | None = None

    def form(self, graph: Graph | None, rank: int, next_step: int) -> None:
        """Take part in a group that was just formed. graph: None for a rank that is alone."""
        self._graph, self._rank, self.next_step = graph, rank, next_step
        self.leaves_after = None
        # Copies of an older group that come late are still written to the memory that it had.
        self.own, self._others = self._copy.empty(), []
        self._works: list[Any] = []

    def make_whole(self, num_ranks: int) -> None:
        """Have the push weights of all ranks sum to their number again. A collective.

        They don't where ranks died or came, or where a mixture was done on one side only when a
        group broke. The weights of the model stay, so the mean moves only by what is gone.
        """
        if not self.pushes:
            return  # each has 1
        total = self.own[0].new_tensor(self.push_weight, dtype=torch.float64)
        process_group.add_up(total, num_ranks)
        factor = num_ranks / total.item()
        if abs(factor - 1.0) > ROUNDING:
            self.push_weight *= factor

    @torch.no_grad()
    def begin(self) -> None:
        """Send this rank's copy, and have those of its neighbours come."""
        graph, step = self._graph, self.next_step
        if graph is None:
            return
        self._copy.read(self.own)
        if self.push_weight != 1.0:
            torch._foreach_mul_(self.own, self.push_weight)
        # With it travel its push weight, and the steps until all leave: 0 for no such step.
        steps_left = 0 if self.leaves_after is None else self.leaves_after - step + 1
        note = self.own[0].new_tensor([self.push_weight, steps_left], dtype=torch.float64)
        self._row = graph.row(self._rank, step)
        if isinstance(graph, Complete):
            self._notes = [torch.empty_like(note) for _ in range(graph.num_ranks)]
            self._works = [dist.all_gather(self._notes, note, async_op=True)]
            self._works += [dist.all_reduce(own, async_op=True) for own in self.own]
            return
        senders = [rank for rank in self._row if rank != self._rank]
        while len(self._others) < len(senders):
            self._others.append(self._copy.empty())
        self._notes = [torch.empty_like(note) for _ in senders]
        operations = [
            dist.P2POp(dist.isend, message, receiver)
            for receiver in graph.receivers(self._rank, step)
            for message in (note, *self.own)
        ] + [
            dist.P2POp(dist.irecv, message, sender)
            for sender, others, notes in zip(senders, self._others, self._notes, strict=False)
            for message in (notes, *others)
        ]
        self._sent = note  # it must live until it is sent
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def finish(self) -> None:
        """Wait until all that was begun is done."""
        while self._works:
            self._works.pop().wait()

    @torch.no_grad()
    def apply(self) -> None:
        """Have the model go on with the mixture."""
        if self._graph is None:
            return
        notes = [each.tolist() for each in self._notes]
        if isinstance(self._graph, Complete):
            own_weight, weights = 0.0, [1 / self._graph.num_ranks] * self._graph.num_ranks
            torch._foreach_mul_(self.own, weights[0])
        else:
            own_weight = self._row[self._rank]
            weights = [weight for rank, weight in self._row.items() if rank != self._rank]
            torch._foreach_mul_(self.own, own_weight)
            for weight, others in zip(weights, self._others, strict=False):
                torch._foreach_add_(self.own, others, alpha=weight)
        if self.pushes:
            received = (weight * note[0] for weight, note in zip(weights, notes, strict=True))
            self.push_weight = own_weight * self.push_weight + sum(received)
            if self.push_weight != 1.0:
                torch._foreach_div_(self.own, self.push_weight)
        self._copy.write(self.own)
        heard = [self.next_step + int(left) - 1 for _, left in notes if left]
        if heard and self.leaves_after is None:
            self.leaves_after = min(heard)
