"""Shares are assigned to free ranks, each share once, and all ranks leave after the same step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch.distributed as dist

from ray_workers.training.data.prefetcher import Share
from ray_workers.training.parallel.dynamic_shares import DynamicShares

NUM_RANKS, FIRST, LAST = 4, 6, 20
"""Steps 1 to 5 were completed before the group was formed."""


class Numbered(Sequence[Share]):
    """Shares of which only the numbers matter."""

    def __len__(self) -> int:
        return NUM_RANKS

    def __getitem__(self, number: object) -> object:  # type: ignore[override]
        return number


def steps_of(shares: DynamicShares, taken: list[tuple[int, object]]) -> Iterator[int]:
    """Yield the rank's current step after each share that it takes, and after each step."""
    for step in range(FIRST, LAST + 1):
        for (number,) in shares.of_step(step, Numbered()):
            taken.append((step, number))
            yield step
        yield step
        if shares.leaves_after == step:
            return


@pytest.mark.parametrize("asked_at", [None, 9])
def test_each_share_comes_to_one_rank_and_all_leave_after_the_same_step(
    asked_at: int | None,
) -> None:
    for seed in range(20):
        store, taken = dist.HashStore(), list[tuple[int, object]]()
        ranks = [DynamicShares(store, rank, NUM_RANKS, FIRST - 1) for rank in range(NUM_RANKS)]
        running = {rank: steps_of(shares, taken) for rank, shares in enumerate(ranks)}
        draw, passed = random.Random(seed), dict.fromkeys(range(NUM_RANKS), 0)
        while running:
            # Rank 1 seldom gets a turn.
            rank = draw.choice([rank for rank in running for _ in range(1 if rank == 1 else 10)])
            if (step := next(running[rank], None)) is None:
                del running[rank]
            else:
                passed[rank] = step
                if rank == 0 and step == asked_at:
                    ranks[0].leave()
        last = LAST if asked_at is None else ranks[0].leaves_after
        assert last is not None
        assert set(passed.values()) == {last}
        assert asked_at is None or asked_at <= last <= asked_at + 1
        every = {(step, share) for step in range(FIRST, last + 1) for share in range(NUM_RANKS)}
        assert set(taken) == every
        assert len(taken) == len(every)
