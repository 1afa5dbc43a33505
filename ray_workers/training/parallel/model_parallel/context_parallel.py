"""Attention over samples whose places are cut into parts, one on each rank of a group.

Before the attention the ranks exchange places for heads, so that each has all places of some of the
heads, and back after it (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509). The numbers are
those of attention on one rank, on CPU as on GPU; torch's own ring attention has no CPU kernel.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ray_workers.training.core import compat_torch


class Context:
    """This rank's part of the places."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def part(self, samples: Tensor) -> Tensor:
        """(N, T, ...) -> (N, T / size, ...)."""
        return samples.chunk(self.size, dim=1)[self.rank]

    def to_heads(self, vectors: Tensor) -> Tensor:
        """(N, heads, T / size, d) -> (N, heads / size, T, d)."""
        num, heads, length, size = vectors.shape
        parts = vectors.view(num, self.size, heads // self.size, length, size).transpose(0, 1)
        received = self._exchange(parts)  # (place, N, heads / size, T / size, d)
        return received.permute(1, 2, 0, 3, 4).reshape(num, -1, self.size * length, size)

    def to_places(self, vectors: Tensor) -> Tensor:
        """(N, heads / size, T, d) -> (N, heads, T / size, d)."""
        num, heads, length, size = vectors.shape
        parts = vectors.view(num, heads, self.size, length // self.size, size)
        received = self._exchange(parts.permute(2, 0, 1, 3, 4))  # (heads' part, N, ...)
        return received.transpose(0, 1).reshape(num, self.size * heads, -1, size)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part i of this rank for part `rank` of rank i."""
        flat = parts.contiguous().flatten()
        return compat_torch.exchange_parts(flat, self._group).view(parts.shape)
