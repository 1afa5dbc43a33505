"""Computes a gradient that is bitwise independent of the number of ranks.

A global batch is always divided into as many shares as the group can have ranks, and each share is
computed separately, with the same samples, shapes and random numbers on any rank. The gradients are
added element by element in the order of the shares; in a ring all-reduce, the order would depend on
the ranks. Each rank sums one slice of the elements, and all ranks receive every slice.

With one share per rank, the exchange sends as much data as a ring all-reduce; with fewer ranks, it
sends more. The exchange doesn't overlap with the backward pass.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ray_workers.training.data.prefetcher import Feed, Share
from ray_workers.training.data.sampler import share
from ray_workers.training.elastic import process_group
from ray_workers.training.parallel.data_parallel.ddp import Replicas
from ray_workers.training.parallel.gradients import EngineParts, GradientEngine, Pass
from ray_workers.training.parallel.strategy import StrategyContext


class DeterministicGradientEngine(GradientEngine):
    """Divides a batch into `num_shares` shares. Each rank computes a contiguous range of shares."""

    uses_ddp = False

    def __init__(self, parts: EngineParts, num_shares: int) -> None:
        super().__init__(parts)
        self._num_shares = num_shares
        self._slot = self._objective.slot
        """A slot for the loss, which is summed together with the gradients and in the same
        order."""
        self._sizes = [p.numel() for p in (*self._parameters, self._slot)]

    def form(self, world_size: int) -> None:
        super().form(world_size)
        # One slice per rank; the last slice is padded with zeros.
        self._slice = -(-sum(self._sizes) // world_size)

    def backward(self, work: Pass) -> None:
        self.keep_buffers()
        shares = work.shares
        terms = self._slot.new_zeros(len(shares), self._slice * self._world_size)
        # Iterate in reverse order, so that rank 0 keeps the buffers that the first share produced.
        for row in reversed(range(len(shares))):
            self.restore_buffers()
            self._compute(shares[row], work)
            self._take_gradients(terms[row])
        work.before_exchange()
        total = self._add_up(terms)
        parts = torch.split(total[: sum(self._sizes)], self._sizes)
        for parameter, part in zip((*self._parameters, self._slot), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        if self._world_size > 1:
            process_group.have_rank_0s(self._buffers)

    def _compute(self, mine: Share, work: Pass) -> None:
        work.prepare(mine.batch.number)
        root = torch.full((), mine.batch.weight, device=self._slot.device)
        if work.scale is not None:
            root *= work.scale
        for inputs, targets in mine.micro_batches:
            torch.autograd.backward(self._objective(inputs, targets), root)

    def _take_gradients(self, row: Tensor) -> None:
        """Move the gradients into a flat row, with zeros for parameters without a gradient."""
        parts = torch.split(row[: sum(self._sizes)], self._sizes)
        for parameter, part in zip((*self._parameters, self._slot), parts, strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad.view(-1))
                parameter.grad = None

    def _add_up(self, terms: Tensor) -> Tensor:
        """Sum the rows of all ranks, each element in the order of the shares.

        terms: (own shares, elements). The number of elements is a multiple of the world size.
        """
        if self._world_size == 1:
            return _in_order(terms)
        world_size, size = self._world_size, self._slice
        sends = terms.view(len(terms), world_size, size).transpose(0, 1).contiguous()
        counts = [
            stop - start
            for start, stop in (share(self._num_shares, r, world_size) for r in range(world_size))
        ]
        received = terms.new_empty(self._num_shares * size)
        dist.all_to_all_single(
            received,
            sends.view(-1),
            output_split_sizes=[count * size for count in counts],
            input_split_sizes=[len(terms) * size] * world_size,
        )
        total = terms.new_empty(world_size * size)
        dist.all_gather_into_tensor(total, _in_order(received.view(self._num_shares, size)))
        return total


class DeterministicDdp(Replicas):
    """Replicas whose results are the same at any world size."""

    def __init__(self, given: StrategyContext) -> None:
        self.num_shares = num_shares = given.spec.resources.num_workers
        super().__init__(given, DeterministicGradientEngine(given.engine_parts(), num_shares))

    def prepare(self, feed: Feed, step: int) -> None:
        super().prepare(feed, step)
        self._begin_alike()


def _in_order(rows: Tensor) -> Tensor:
    """Sum the rows in order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
