"""Traits of an attempt's group that follow from the job document: which ranks wait for other ranks,
which ranks hold a part of the state, and which ranks can be replaced.
`service.domain.attempts.group_traits` has the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_workers.shared.mesh_shape import MeshShape


@dataclass(frozen=True)
class GroupTraits:
    """The traits of one group, created once with the AttemptSpec, so that supervision does not read
    the document."""

    is_script: bool
    """Whether the ranks run a user's program. The steps of such a program are known only if it
    reports them."""
    recovers_in_place: bool
    """Whether a lost rank is replaced while the other ranks keep running. For a script, this also
    requires that its processes have called `train.prepare`. Their heartbeat pages record this
    call."""
    goes_on_without_lost: bool
    """Whether the remaining ranks continue immediately when ranks are lost, and add the
    replacements once they are ready. This requires that each rank has its own copy of the model and
    does not depend on a particular other rank."""
    goes_back: bool
    """Whether the group loses steps when it recovers in place: if a rank is lost, all ranks go back
    to the newest state of which the ranks have copies in memory."""
    at_own_pace: bool
    """Whether a slow rank processes fewer shares of the batches, without delaying the other
    ranks."""
    keeps_numbers: bool
    """Whether each rank's number determines its part of the work, so that the group can't continue
    with fewer ranks."""
    is_tied_to_nodes: bool
    """Whether each rank's data exist only on its node. Such a rank's slot can't be replaced with a
    slot on another node, and ranks are numbered in the order of the slices."""
    quorum: int | None
    """Minimum number of ranks with which a group that is tied to nodes continues; if None,
    `AttemptSpec.min_workers` is the minimum."""
    state_holders: frozenset[int]
    """A recipe's parameter servers, or the aggregator of its silos. Each of these ranks holds a
    part of the state that no other rank has, except for a possible replica on another of these
    ranks. The remaining ranks form no process group, and continue if one of them is lost."""
    replicas: Mapping[int, int]
    """Maps each rank to the rank that holds a replica of its state."""
    unawaited: frozenset[int]
    """Ranks whose exits the job does not wait for."""
    restarted_alone: frozenset[int]
    """Ranks of a script whose processes are restarted individually when they are killed."""
    role_names: tuple[str, ...]
    """The role of each rank, as returned by `dray.ranks.role_names`."""
    has_peer_ports: bool
    """Whether each rank reserves a port before any process is started (`ProcessSpec.peers`)."""
    most_ranks: int | None
    """Number of ranks of a complete group if the job has spares, which are the workers in further
    slots; None if it has none."""
    hang_limit_s: float | None
    """Number of seconds without progress after which a script counts as hung; None if its document
    does not set a limit."""
    mesh: MeshShape
    """How a replica of the model is divided among ranks. The number of ranks that train is a
    multiple of `mesh.num_parts`."""
