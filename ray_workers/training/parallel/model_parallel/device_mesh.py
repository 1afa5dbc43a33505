"""The positions of ranks along the axes of a device mesh. From the innermost to the outermost, the
axes are tensor, context, shard, data and pipeline. Neighbouring ranks differ in the innermost axis,
so the ranks that communicate the most are usually on the same node.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dray import spec
from ray_workers.shared.mesh_shape import MeshShape
from ray_workers.training.core import compat_torch
from ray_workers.training.core.faultpoints import FaultPoint, faultpoint
from ray_workers.training.elastic import process_group

AXES = ("pipeline", "data", "shard", "context", "tensor")
_numbers = itertools.count()


class Mesh:
    """A rank's position in the mesh. `sizes` maps each axis to its size, and `at` maps each axis to
    the rank's index along the axis."""

    def __init__(
        self, options: spec.Parallel, rank: int, world_size: int, device: torch.device
    ) -> None:
        """Create the groups along the axes. A collective."""
        self.sizes: dict[str, int] = {
            axis: getattr(options, axis) for axis in AXES if axis != "data"
        }
        self.sizes["data"] = world_size // math.prod(self.sizes.values())
        self.shape = MeshShape.of(options)
        self.part = self.shape.position(rank, world_size).part
        """Number of the part of the model that this rank has."""
        self.at: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, self.at[axis] = divmod(rank, self.sizes[axis])
        # Ranks that process different positions of the same samples also divide the model among
        # themselves.
        self.num_holders = self.sizes["shard"] * self.sizes["context"]
        # torch caches what it derives from a mesh, and compares meshes by their shapes and names,
        # not by this rank's position. Therefore, the meshes of a process have different names.
        self._number = next(_numbers)
        faultpoint(FaultPoint.BEFORE_MESH)
        self._whole = self._make(device)
        self.context_group = self._make_context() if self.sizes["context"] > 1 else None
        process_group.keep_all()

    def _make(self, device: torch.device) -> DeviceMesh:
        shape = {
            "pipeline": self.sizes["pipeline"],
            "data": self.sizes["data"],
            "held": self.num_holders,
            "tensor": self.sizes["tensor"],
        }
        # FSDP requires a shard group, even if the group has only one rank.
        needed = ("data", "held") if self.sizes["data"] > 1 else ()
        names = tuple(name for name, size in shape.items() if size > 1 or name in needed)
        return init_device_mesh(
            device.type,
            tuple(shape[name] for name in names),
            mesh_dim_names=tuple(map(self.named, names)),
        )

    def named(self, axis: str) -> str:
        """Return the name of an axis of torch's mesh in this group."""
        return f"{axis}_{self._number}"

    def _make_context(self) -> dist.ProcessGroup:
        shape = (-1, self.sizes["context"], self.sizes["tensor"])
        groups = torch.arange(dist.get_world_size()).view(shape).transpose(1, 2).flatten(0, 1)
        made = dist.new_subgroups_by_enumeration(groups.tolist())  # type: ignore[no-untyped-call]
        mine: dist.ProcessGroup = made[0]
        return mine

    @property
    def num_replicas(self) -> int:
        """Number of ranks that have the same parts of the model."""
        return self.sizes["data"]

    @property
    def positions(self) -> dict[str, tuple[int, int]]:
        """This rank's position within its pipeline stage: for each axis of torch's mesh, (number of
        ranks, index)."""
        held = self.at["shard"] * self.sizes["context"] + self.at["context"]
        return {
            self.named("data"): (self.sizes["data"], self.at["data"]),
            self.named("held"): (self.num_holders, held),
            self.named("tensor"): (self.sizes["tensor"], self.at["tensor"]),
        }

    @property
    def exchanging(self) -> DeviceMesh | None:
        """The mesh of ranks that exchange gradients, in the form that FSDP requires: (data, held),
        or only held."""
        if self.num_replicas > 1:
            return self._whole[self.named("data"), self.named("held")]
        return self._whole[self.named("held")] if self.num_holders > 1 else None

    @property
    def num_exchanging(self) -> int:
        return self.num_replicas * self.num_holders

    @property
    def tensor(self) -> DeviceMesh | None:
        return self._whole[self.named("tensor")] if self.sizes["tensor"] > 1 else None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ from this rank only along the given axis; None if
        there are none."""
        return self._whole.get_group(self.named(axis)) if self.sizes[axis] > 1 else None

    @property
    def holders(self) -> dist.ProcessGroup | None:
        """The ranks among which `shard` and `context` divide the model."""
        return self._whole.get_group(self.named("held")) if self.num_holders > 1 else None

    @property
    def is_first_but_for_stages(self) -> bool:
        """Whether this rank is the first rank of its pipeline stage."""
        return all(index == 0 for axis, index in self.at.items() if axis != "pipeline")


class Context:
    """Attention over all positions of a sample, if each rank has only a part of the positions.

    Before attention, the ranks redistribute the vectors, so that each rank has all positions of
    some heads. After attention, they reverse this redistribution (DeepSpeed-Ulysses, Jacobs et al.
    2023, arXiv:2309.14509). The results are the same as on a single rank, both on CPU and on GPU.
    torch's own ring attention is not used, because it has no CPU kernel.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def part(self, samples: Tensor) -> Tensor:
        """Map (N, T, ...) to (N, T / size, ...)."""
        return samples.chunk(self.size, dim=1)[self.rank]

    def to_heads(self, vectors: Tensor) -> Tensor:
        """Map (N, heads, T / size, d) to (N, heads / size, T, d)."""
        num, heads, length, size = vectors.shape
        parts = vectors.view(num, self.size, heads // self.size, length, size).transpose(0, 1)
        received = self._exchange(parts)  # (position part, N, heads / size, T / size, d)
        return received.permute(1, 2, 0, 3, 4).reshape(num, -1, self.size * length, size)

    def to_sequence(self, vectors: Tensor) -> Tensor:
        """Map (N, heads / size, T, d) to (N, heads, T / size, d)."""
        num, heads, length, size = vectors.shape
        parts = vectors.view(num, heads, self.size, length // self.size, size)
        received = self._exchange(parts.permute(2, 0, 1, 3, 4))  # (heads' part, N, ...)
        return received.transpose(0, 1).reshape(num, self.size * heads, -1, size)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i to rank i, and receive this rank's part from each rank."""
        flat = parts.contiguous().flatten()
        return compat_torch.exchange_parts(flat, self._group).view(parts.shape)
