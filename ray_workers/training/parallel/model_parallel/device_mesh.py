"""The place of each rank when the world is divided along several axes.

Neighbouring ranks differ in the innermost axis, so those that exchange the most are mostly on one
node: tensor, then context, shard, data, and pipeline.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dray import spec
from ray_workers.training.core.faultpoints import FaultPoint, faultpoint
from ray_workers.training.elastic import process_group

AXES = ("pipeline", "data", "shard", "context", "tensor")


class Mesh:
    """The axes of one rank: `sizes`, and at which place of each it is: `at`."""

    def __init__(
        self, options: spec.Parallel, rank: int, world_size: int, device: torch.device
    ) -> None:
        """A collective: it makes the groups along the axes."""
        self.sizes: dict[str, int] = {
            axis: getattr(options, axis) for axis in AXES if axis != "data"
        }
        self.sizes["data"] = world_size // math.prod(self.sizes.values())
        self.at: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, self.at[axis] = divmod(rank, self.sizes[axis])
        # Ranks that compute other places of the same samples hold parts of the model as well.
        self.num_holders = self.sizes["shard"] * self.sizes["context"]
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
        # FSDP wants to know within whom it shards, also where that is nobody else.
        needed = ("data", "held") if self.sizes["data"] > 1 else ()
        names = tuple(name for name, size in shape.items() if size > 1 or name in needed)
        return init_device_mesh(
            device.type, tuple(shape[name] for name in names), mesh_dim_names=names
        )

    def _make_context(self) -> dist.ProcessGroup:
        shape = (-1, self.sizes["context"], self.sizes["tensor"])
        groups = torch.arange(dist.get_world_size()).view(shape).transpose(1, 2).flatten(0, 1)
        made = dist.new_subgroups_by_enumeration(groups.tolist())  # type: ignore[no-untyped-call]
        mine: dist.ProcessGroup = made[0]
        return mine

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same parts."""
        return self.sizes["data"]

    @property
    def exchanging(self) -> DeviceMesh | None:
        """The ranks that exchange gradients, as FSDP wants them: (data, held), or held alone."""
        if self.num_replicas > 1:
            return self._whole["data", "held"]
        return self._whole["held"] if self.num_holders > 1 else None

    @property
    def num_exchanging(self) -> int:
        return self.num_replicas * self.num_holders

    @property
    def tensor(self) -> DeviceMesh | None:
        return self._whole["tensor"] if self.sizes["tensor"] > 1 else None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in this axis alone; None if there are none."""
        return self._whole.get_group(axis) if self.sizes[axis] > 1 else None

    @property
    def holders(self) -> dist.ProcessGroup | None:
        """The ranks that `shard` and `context` make hold something together."""
        return self._whole.get_group("held") if self.num_holders > 1 else None

    @property
    def is_first_but_for_stages(self) -> bool:
        """Whether this rank speaks for all that hold the same stage of the model."""
        return all(place == 0 for axis, place in self.at.items() if axis != "pipeline")
