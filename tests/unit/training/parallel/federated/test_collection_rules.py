"""When a round of clients outside the cluster ends."""

from __future__ import annotations

from collections.abc import Set

import pytest

from ray_workers.training.parallel.federated.rounds import Collection, Next, next_of


def after(
    accepted: set[int], refused: Set[int] = frozenset(), *, late: bool = False, all_: bool = False
) -> Next:
    """Clients 0 to 3 of eight are asked, and two are a quorum."""
    asked = set(range(8 if all_ else 4))
    return next_of(Collection(asked, all_, 2, accepted, set(refused)), is_late=late)


@pytest.mark.parametrize(
    ("state", "step"),
    [
        (after({0, 1, 2}), Next.WAIT),
        (after({0, 1, 2, 3}), Next.END),
        (after({0, 1}, {2, 3}), Next.END),
        (after({0, 1}, late=True), Next.END),
        (after({0}, late=True), Next.ASK_ALL),
        (after({0}, {1, 2, 3}), Next.ASK_ALL),
        (after({0}, late=True, all_=True), Next.WAIT),
        (after({0, 7}, late=True, all_=True), Next.END),
        (after({0}, {1, 2, 3, 4, 5, 6, 7}, all_=True), Next.END),
    ],
)
def test_a_round_ends_with_all_or_at_its_deadline_with_a_quorum(state: Next, step: Next) -> None:
    assert state is step
