from __future__ import annotations

import pytest
import torch

from ray_workers.training.data.sampler import (
    DistributedBatchSampler,
    derive_seed,
    epoch_order,
    share,
    steps_per_epoch,
)


def test_an_order_holds_every_sample_once_and_differs_by_epoch_and_seed() -> None:
    order = epoch_order(101, seed=3, epoch=2)
    assert sorted(order.tolist()) == list(range(101))
    assert torch.equal(order, epoch_order(101, seed=3, epoch=2))
    assert not torch.equal(order, epoch_order(101, seed=3, epoch=3))
    assert not torch.equal(order, epoch_order(101, seed=4, epoch=2))


@pytest.mark.parametrize("num_items", [0, 1, 7, 8, 9, 256])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_cover_everything_in_order_and_differ_by_one_at_most(
    num_items: int, world_size: int
) -> None:
    shares = [share(num_items, rank, world_size) for rank in range(world_size)]
    assert [i for start, stop in shares for i in range(start, stop)] == list(range(num_items))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_sample_is_computed_once_an_epoch_and_the_global_batches_hold_at_any_world_size(
    world_size: int,
) -> None:
    num_samples, size = 103, 10  # the last batch has 3 samples, fewer than the five ranks

    def loader(rank: int, ranks: int) -> DistributedBatchSampler:
        return DistributedBatchSampler(
            num_samples, samples_per_step=size, seed=1, shares=[rank], num_shares=ranks
        )

    alone = loader(0, 1)
    ranks = [loader(rank, world_size) for rank in range(world_size)]
    for epoch in range(2):
        seen: list[int] = []
        for number in range(1, alone.steps_per_epoch + 1):
            step = epoch * alone.steps_per_epoch + number
            batches = [batch for batches in ranks for batch in batches.at(step, step)]
            together = [i for b in batches if not b.is_empty for i in b.indices.tolist()]
            (whole,) = alone.at(step, step)
            assert together == whole.indices.tolist()
            assert all(b.num_global == whole.num_global == len(together) for b in batches)
            assert all(len(b.indices) > 0 for b in batches)
            seen += together
        assert sorted(seen) == list(range(num_samples))


def test_a_batch_depends_on_the_step_alone_not_on_what_was_read_before() -> None:
    def fresh() -> DistributedBatchSampler:
        return DistributedBatchSampler(50, samples_per_step=8, seed=0, shares=[1], num_shares=2)

    walked = fresh()
    for step in range(1, 20):
        (batch,) = walked.at(step, step)
    assert torch.equal(batch.indices, fresh().at(19, 19)[0].indices)


def test_the_last_batch_of_an_epoch_is_kept_however_short() -> None:
    assert steps_per_epoch(100, 50) == 2
    assert steps_per_epoch(101, 50) == 3


def test_seeds_are_told_apart_by_every_part_and_fit_torch() -> None:
    seeds = {derive_seed("step", 0, step, rank) for step in range(50) for rank in range(4)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("a", 12, 3) != derive_seed("a", 1, 23)


def test_the_weights_of_all_terms_in_a_batch_sum_to_one() -> None:
    """However the batch is divided, and also if there are fewer samples than shares."""
    terms = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
    for num_shares in (1, 2, 3, 5):
        for step in range(1, 7):
            sampler = DistributedBatchSampler(
                len(terms),
                samples_per_step=4,
                seed=1,
                shares=range(num_shares),
                num_shares=num_shares,
                num_terms=terms,
            )
            batches = sampler.at(step, step)
            total = sum(batch.weight * int(terms[batch.indices].sum()) for batch in batches)
            assert total == pytest.approx(1.0)
            assert len({batch.weight for batch in batches if not batch.is_empty}) == 1
