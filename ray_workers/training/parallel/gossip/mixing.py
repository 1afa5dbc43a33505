"""A rank's copy of the weights, which it exchanges with its neighbours in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ray_workers.training.elastic import process_group
from ray_workers.training.parallel.gossip.graphs import Complete, Graph

ROUNDING = 1e-6
"""Smaller relative deviations of the sum of push weights are not corrected, so that a resumed job
is bitwise equal to an uninterrupted job."""


class FlatCopy:
    """Tensors flattened into one row of numbers per dtype. Each row can be sent as one message."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
        self._groups = [[t for t in tensors if t.dtype == dtype] for dtype in dtypes]

    def empty(self) -> list[Tensor]:
        """Allocate memory for a copy."""
        return [group[0].new_empty(sum(t.numel() for t in group)) for group in self._groups]

    @torch.no_grad()
    def read(self, rows: list[Tensor] | None = None) -> list[Tensor]:
        """Copy the tensors into `rows`, or into new memory."""
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
    """Mixes this rank's copy with its neighbours' copies, in one exchange per step.

    A copy is `push_weight` times the model's weights. In Assran et al. 2019, algorithm 1, the copy
    is x, the push weight is w, and the model's weights are z = x / w. If the rows of the graph sum
    to 1, the push weight of every rank is 1.

    An interrupted exchange changes nothing: `begin` sends the copy, `finish` waits for the
    neighbours' copies, and only `apply` modifies the model.
    """

    def __init__(self, copy: FlatCopy, *, pushes: bool) -> None:
        self.pushes = pushes
        self.push_weight = 1.0
        self.next_step = 1
        """The step whose graph will be used next."""
        self.leaves_after: int | None = None
        """The step after which all ranks leave; None if this rank is not aware of one."""
        self._copy = copy
        self.own = copy.empty()
        """The copy that is sent. `apply` mixes this copy with the received copies in place."""
        self._others: list[list[Tensor]] = []
        """Memory for received copies, large enough for every step so far."""
        self._graph: Graph | None = None

    def form(self, graph: Graph | None, rank: int, next_step: int) -> None:
        """Join a newly formed group. graph: None if this rank is the only rank."""
        self._graph, self._rank, self.next_step = graph, rank, next_step
        self.leaves_after = None
        # Allocate new memory, because delayed copies from an earlier group might still be written
        # to the old memory.
        self.own, self._others = self._copy.empty(), []
        self._works: list[Any] = []

    def make_whole(self, num_ranks: int) -> None:
        """Scale the push weights of all ranks so that they sum to the number of ranks. A
        collective.

        The sum can differ from the number of ranks after ranks have died or joined, or if only some
        ranks had applied a mixture when a group broke. Scaling doesn't change the models' weights,
        so the mean changes only because of lost copies.
        """
        if not self.pushes:
            return  # the push weight of each rank is 1
        total = self.own[0].new_tensor(self.push_weight, dtype=torch.float64)
        process_group.add_up(total, num_ranks)
        factor = num_ranks / total.item()
        if abs(factor - 1.0) > ROUNDING:
            self.push_weight *= factor

    @torch.no_grad()
    def begin(self) -> None:
        """Start sending this rank's copy and receiving its neighbours' copies."""
        graph, step = self._graph, self.next_step
        if graph is None:
            return
        self._copy.read(self.own)
        if self.push_weight != 1.0:
            torch._foreach_mul_(self.own, self.push_weight)
        # The note contains the push weight, and the number of steps until all ranks leave (0 if
        # they are not leaving).
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
        self._sent = note  # keep the note alive until it has been sent
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def finish(self) -> None:
        """Wait until the exchange is complete."""
        process_group.wait(self._works)

    @torch.no_grad()
    def apply(self) -> None:
        """Load the mixture into the model."""
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
