"""The division of a model's parameters among the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ray_workers.training.data.sampler import share


class Sizes(NamedTuple):
    """Number of elements in the three segments of a vector."""

    decayed: int
    """Elements of parameters with weight decay, according to `optimizers.parameter_groups`."""
    plain: int
    """Elements of parameters without weight decay."""
    buffers: int
    """Elements of buffers that change in training, such as running means. Buffers have no
    gradient."""

    @property
    def num_trained(self) -> int:
        return self.decayed + self.plain


class FlatLayout:
    """A model's parameters and buffers as one fp32 vector, of which each server has a part.

    The vector has the three segments of `Sizes`, and each server has an equal part of each segment,
    regardless of tensor boundaries. The optimizers are elementwise, so a step on the parts has the
    same result as a step on the tensors.
    """

    def __init__(self, model: nn.Module, num_servers: int) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        decayed = [(name, p) for name, p in trained if p.ndim >= 2]
        plain = [(name, p) for name, p in trained if p.ndim < 2]
        buffers = [(n, b) for n, b in model.named_buffers() if b.is_floating_point()]
        self.num_servers = num_servers
        self.trained = [*decayed, *plain]
        """Pairs (name, parameter), in the order of the vector."""
        self.num_decayed = len(decayed)
        """Number of parameters with weight decay. These parameters come first in `trained`."""
        self.buffers = [buffer for _, buffer in buffers]
        self.sizes = Sizes(*(sum(t.numel() for _, t in some) for some in (decayed, plain, buffers)))

    @property
    def tensors(self) -> list[Tensor]:
        """The model's tensors, in the order of the vector."""
        return [*(parameter.detach() for _, parameter in self.trained), *self.buffers]

    def sizes_of(self, server: int) -> Sizes:
        """Return the segment sizes of a server's part."""
        return Sizes(*(stop - start for start, stop in self._bounds(server)))

    def part(self, vector: Tensor, server: int) -> list[Tensor]:
        """Return views of a server's pieces of the vector. The vector might not contain the segment
        of buffers."""
        return [vector[start:stop] for start, stop in self._bounds(server)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the servers' parts into a vector. The parts may lack the segment of buffers."""
        vector = torch.empty(sum(map(len, parts)), dtype=parts[0].dtype)
        for server, part in enumerate(parts):
            pieces = self.part(vector, server)
            for piece, own in zip(pieces, torch.split(part, [len(p) for p in pieces]), strict=True):
                piece.copy_(own)
        return vector

    def write(self, vector: Tensor) -> None:
        """Copy the values of the vector to the model's tensors."""
        tensors = self.tensors
        parts = torch.split(vector, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _bounds(self, server: int) -> list[tuple[int, int]]:
        found, first = [], 0
        for size in self.sizes:
            start, stop = share(size, server, self.num_servers)
            found.append((first + start, first + stop))
            first += size
        return found


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the concatenated elements of the tensors."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
