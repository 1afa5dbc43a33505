"""The positions of a group's members, if the group divides a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.mesh_shape import MeshPosition
from ray_workers.supervision.member import Member
from ray_workers.supervision.rules.mesh_positions import has_all_parts
from ray_workers.supervision.slots import Slots


class GroupPositions:
    """The positions of the members in the latest announced round. A process that has replaced
    another one has no position until a round is announced to it."""

    def __init__(self, spec: AttemptSpec) -> None:
        self._mesh = spec.traits.mesh
        self._positions: dict[tuple[int, int], MeshPosition] = {}
        """The positions, keyed by the index and the incarnation of a member."""
        self.idle: Collection[int] = ()
        """Indices of members that wait without a rank, because they do not complete a replica."""
        self._num_rounds = 0
        self._since: dict[tuple[int, int], int] = {}
        """The announced round in which each of these members got its rank."""
        self._keep((index, 0) for index in range(spec.world_size))

    def _keep(self, keys: Iterable[tuple[int, int]]) -> None:
        """Record the positions of a round's members, given in rank order."""
        found = list(keys)
        if self._mesh.num_parts > 1:
            of_ranks = [self._mesh.position(rank, len(found)) for rank in range(len(found))]
            self._positions = dict(zip(found, of_ranks, strict=True))
            self._since = {key: self._since.get(key, self._num_rounds) for key in found}
            self._num_rounds += 1

    def announced(self, members: Sequence[Member]) -> None:
        """Record that a round was announced to these members, given in rank order."""
        self._keep((member.index, member.incarnation) for member in members)

    def of(self, member: Member) -> MeshPosition | None:
        return self._positions.get((member.index, member.incarnation))

    def since(self, member: Member) -> int:
        """Return the number of the announced round in which the member's process got its rank. A
        spare can get its rank long after its process was started."""
        return self._since.get((member.index, member.incarnation), self._num_rounds)

    def are_complete_without(self, slots: Collection[Slots], members: Sequence[Member]) -> bool:
        """Whether the members outside these slots have all parts of the model, and no more members
        than before would be idle. A spare that takes a rank counts as idle both before and after
        the change."""
        size = self._mesh.num_parts
        if size == 1:
            return True
        left = [member for member in members if member.slots not in slots]
        num_spares = sum(member.is_spare and member.is_ready for member in left)
        num_left = sum(not member.is_spare for member in left) + num_spares
        num_idle = sum(not member.is_spare for member in members) % size
        if num_left % size > num_idle + num_spares:
            return False
        running = (member for member in left if member.is_placed and member.is_running)
        return has_all_parts(map(self.of, running), self._mesh)
