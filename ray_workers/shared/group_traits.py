"""Traits of an attempt's group that follow from the job document: which ranks wait for others,
which hold a part of the state, and which can be replaced. `service.domain.attempts.group_traits`
has the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupTraits:
    """Created once, with the AttemptSpec, so that supervision does not read the document."""

    is_script: bool
    """Whether the ranks run a user's program, whose steps are known only if it reports them."""
    recovers_in_place: bool
    """Whether a lost rank is replaced while the others keep running. For a script this means that
    it can; its processes show whether they have called `train.prepare`."""
    goes_on_without_lost: bool
    """Whether the others continue immediately when ranks are lost, and add the replacements once
    they are ready. This requires that each rank has its own copy and does not depend on any
    particular other rank."""
    at_own_pace: bool
    """Whether a slow rank processes fewer shares of the batches, without delaying the others."""
    keeps_numbers: bool
    """Whether each rank's number determines its part, so that the group can't continue with fewer
    ranks."""
    is_tied_to_nodes: bool
    """Whether each rank's data is only on its node, so that slots on other nodes can't replace its
    own, and ranks are numbered in the order of the slices."""
    quorum: int | None
    """Minimum number of ranks with which such a group continues; None means that
    `AttemptSpec.min_workers` decides."""
    state_holders: frozenset[int]
    """Ranks of a recipe that are the only holders of their part of the state, apart from a replica
    on another of these ranks. The other ranks are not in a group with them, and continue on their
    own when one of the other ranks is lost."""
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
    """Seconds without progress after which a script counts as hung, if its document sets this."""
