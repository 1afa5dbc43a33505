"""The meaning of a job document for the group of an attempt: which ranks wait for others, hold a
part of the state, and can be replaced. `service.domain.attempts.group_traits` has the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupTraits:
    """Made once, with the AttemptSpec, so that supervision does not read the document."""

    is_script: bool
    """Whether the ranks run a user's program, whose steps are seen only if it reports them."""
    recovers_in_place: bool
    """Whether a rank that is lost is replaced while the others go on. A script may do so; its
    processes show whether they have called `train.prepare`."""
    goes_on_without_lost: bool
    """Whether the others go on at once when ranks are lost, and take the replacements in when these
    are ready: each rank has a copy of its own and needs no other in particular."""
    at_own_pace: bool
    """Whether a slow rank takes fewer shares of the batches, and keeps no other waiting."""
    keeps_numbers: bool
    """Whether ranks have their parts by their numbers, so that the group can't go on smaller."""
    is_tied_to_nodes: bool
    """Whether each rank's data is on its node alone, so that no other node's slots replace its
    own, and ranks are numbered as the slices are."""
    quorum: int | None
    """The fewest ranks with which such a group goes on; None: `AttemptSpec.min_workers` decides."""
    state_holders: frozenset[int]
    """Ranks of a recipe that hold their part of the state alone, or with a replica on another of
    them. The others are in no group with them, and go on by themselves when one of their own number
    is lost."""
    replicas: Mapping[int, int]
    """The rank that holds the replica, by the rank whose state it is."""
    unawaited: frozenset[int]
    """Ranks whose end the job does not wait for."""
    restarted_alone: frozenset[int]
    """Ranks of a script that are started again alone when their process is killed."""
    role_names: tuple[str, ...]
    """The role of each rank, as `dray.ranks.role_names` returns them."""
    has_peer_ports: bool
    """Whether each rank reserves a port before any process starts (`Seat.peers`)."""
    hang_limit_s: float | None
    """After how long a script without progress hangs, where its document states it."""
