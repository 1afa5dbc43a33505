"""The positions of ranks in a group that divides a model.

A group has one or more replicas of the model. Each replica is divided into parts, and each rank has
one part of one replica. As in torch's device mesh, the pipeline stage is the outermost axis, then
the replica, then the axes that divide a stage. If the number of replicas changes, the ranks of a
pipeline therefore change too, even if each worker keeps its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dray.spec import Parallel


class MeshPosition(NamedTuple):
    replica: int
    part: int
    """Number of the part. Ranks with the same part have the same state."""


@dataclass(frozen=True)
class MeshShape:
    """The division of a model. Both numbers are 1 if each rank has a whole model."""

    num_parts: int
    """Number of ranks among which one replica is divided."""
    num_stages: int
    """Number of pipeline stages, a divisor of `num_parts`."""

    @classmethod
    def of(cls, parallel: Parallel) -> MeshShape:
        return cls(parallel.num_parts, parallel.pipeline)

    def position(self, rank: int, world_size: int) -> MeshPosition:
        """Return the position of a rank. `world_size` must be a multiple of `num_parts`."""
        per_stage, num_replicas = self.num_parts // self.num_stages, world_size // self.num_parts
        block, within = divmod(rank, per_stage)
        stage, replica = divmod(block, num_replicas)
        return MeshPosition(replica, stage * per_stage + within)

    def rank(self, position: MeshPosition, world_size: int) -> int:
        per_stage, num_replicas = self.num_parts // self.num_stages, world_size // self.num_parts
        stage, within = divmod(position.part, per_stage)
        return (stage * num_replicas + position.replica) * per_stage + within

    def with_same_part(self, rank: int, world_size: int) -> list[int]:
        """Return the ranks with the same part as `rank`, including `rank`, in order."""
        part = self.position(rank, world_size).part
        replicas = range(world_size // self.num_parts)
        return [self.rank(MeshPosition(each, part), world_size) for each in replicas]

    def with_same_replica(self, rank: int, world_size: int) -> list[int]:
        """Return the ranks of the replica that `rank` belongs to, in order."""
        replica = self.position(rank, world_size).replica
        parts = range(self.num_parts)
        return sorted(self.rank(MeshPosition(replica, each), world_size) for each in parts)
