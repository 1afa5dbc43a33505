"""Which ranks keep and send shares of a state."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ray_workers.training.checkpoint.peer_memory import every_steps
from ray_workers.training.checkpoint.share_exchange import keepers, newest_whole, senders


@pytest.mark.parametrize("seed", range(200))
def test_each_rank_keeps_as_many_shares_as_it_has_copies(seed: int) -> None:
    draw = random.Random(seed)
    num = draw.randint(2, 12)
    nodes = [draw.choice("abcd") for _ in range(num)]
    copies = draw.randint(1, num - 1)
    found = keepers(nodes, copies)
    for rank, each in enumerate(found):
        assert len(set(each) - {rank}) == copies
    assert set(Counter(rank for each in found for rank in each).values()) == {copies}
    if 2 * max(Counter(nodes).values()) <= num:
        assert all(nodes[each[0]] != nodes[rank] for rank, each in enumerate(found))


@pytest.mark.parametrize("seed", range(200))
def test_the_ranks_go_back_to_the_newest_step_that_some_rank_holds_for_each(seed: int) -> None:
    draw = random.Random(seed)
    num = draw.randint(2, 4)
    held = [
        {(draw.randrange(num), draw.randrange(3)) for _ in range(draw.randint(0, 5))}
        for _ in range(num)
    ]
    best = None
    for step in range(3):
        has_all = True
        for rank in range(num):
            has_all = has_all and any((rank, step) in each for each in held)
        best = step if has_all else best
    assert newest_whole(held) == best
    if best is None:
        return
    by_receiver = senders(held, best)
    for rank in range(num):
        assert ((rank, best) in held[rank]) == (rank not in by_receiver)
    for rank, source in by_receiver.items():
        assert (rank, best) in held[source]


def test_copies_take_at_most_a_hundredth_of_the_time() -> None:
    assert every_steps([0.5, 0.2, 9.0], step_s=0.1) == 500
    assert every_steps([-0.5], step_s=0.1) == 1
