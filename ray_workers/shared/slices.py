"""The slots of a gang, by node and by the role of their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """The part of a gang on one node."""

    node_id: str
    num_workers: int


@dataclass(frozen=True)
class RoleSlots:
    """Consecutive ranks of a gang whose resources differ from the common bundle. The slices of a
    gang are in rank order, and all ranks of a slice have the same role."""

    role: str
    first_rank: int
    number: int
    bundle: Mapping[str, float]
    """Ray resources of one rank."""


def role_at(rank: int, roles: Sequence[RoleSlots]) -> RoleSlots | None:
    """Return the role of a rank; None if the rank has the resources of the common bundle."""
    of_rank = (role for role in roles if 0 <= rank - role.first_rank < role.number)
    return next(of_rank, None)


def by_role(
    slices: Sequence[Slice], roles: Sequence[RoleSlots]
) -> list[tuple[Slice, RoleSlots | None]]:
    """Return all slices of a gang, each with the role of its ranks (`role_at`)."""
    found, rank = [], 0
    for part in slices:
        found.append((part, role_at(rank, roles)))
        rank += part.num_workers
    return found


def by_bundle(
    slices: Sequence[Slice], bundle: Mapping[str, float], roles: Sequence[RoleSlots]
) -> list[tuple[Slice, Mapping[str, float]]]:
    """Return all slices of a gang with their ranks' bundles: `bundle` for ranks without a role."""
    if not roles:  # this function is called very often
        return [(part, bundle) for part in slices]
    found = by_role(slices, roles)
    return [(part, bundle if role is None else role.bundle) for part, role in found]
