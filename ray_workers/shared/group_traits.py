"""Traits of an attempt's group that follow from the job document: which ranks wait for other ranks,
which ranks hold a part of the state, and which ranks can be replaced.
`service.domain.attempts.group_traits` has the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupTraits:
    """The traits of one group, created once with the AttemptSpec, so that supervision does not read
    the document."""

    is_script: bool
    """Whether the ranks run a user's program. The steps of such a program are known only if it
    reports them."""
    recovers_in_place: bool
    """Whether a lost rank is replaced while the other ranks keep running. For a script, this is
    only a possibility, which requires that its processes have called `train.prepare`; their
    heartbeat pages show this."""
    goes_on_without_lost: bool
    """Whether the remaining ranks continue immediately when ranks are lost, and add the
    replacements once they are ready. This requires that each rank has its own copy and does not
    depend on any particular other rank."""
    at_own_pace: bool
    """Whether a slow rank processes fewer shares of the batches, without delaying the other
    ranks."""
    keeps_numbers: bool
    """Whether each rank's number determines its part of the work, so that the group can't continue
    with fewer ranks."""
    is_tied_to_nodes: bool
    """Whether each rank's data is only on its node. Slots on other nodes can then not replace the
    rank's slot, and ranks are numbered in the order of the slices."""
    quorum: int | None
    """Minimum number of ranks with which such a group continues; None means that
    `AttemptSpec.min_workers` decides."""
    state_holders: frozenset[int]
    """Ranks of a recipe, each of which is the only holder of its part of the state, except for a
    possible replica on another of these ranks. The remaining ranks are not in a group with them,
    and continue when one of the remaining ranks is lost."""
    replicas: Mapping[int, int]
    """Maps each rank to the rank that holds a replica of its state."""
    unawaited: frozenset[int]
    """Ranks for whose end the job does not wait."""
    restarted_alone: frozenset[int]
    """Ranks of a script that are restarted individually when their process is killed."""
    role_names: tuple[str, ...]
    """The role of each rank, as returned by `dray.ranks.role_names`."""
    has_peer_ports: bool
    """Whether each rank reserves a port before any process is started (`ProcessSpec.peers`)."""
    hang_limit_s: float | None
    """Number of seconds without progress after which a script counts as hung; None if its document
    does not set a limit."""
