"""Mixing matrices preserve the mean of the copies, and propagate every copy to every rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dray.spec import Gossip
from ray_workers.training.parallel.gossip.graphs import (
    Graph,
    all_have_heard,
    graph_of,
    sides_of,
    without_missing,
)

KINDS = [
    {"graph": graph, "mode": mode}
    for mode in ("d_psgd", "sgp")
    for graph in ("ring", "exponential", "random", "complete")
]
NUM_STEPS = 24


def matrix(graph: Graph, step: int) -> Tensor:
    found = torch.zeros(graph.num_ranks, graph.num_ranks, dtype=torch.float64)
    for rank in range(graph.num_ranks):
        for other, weight in graph.row(rank, step).items():
            found[rank, other] = weight
    return found


def check_matrices(graph: Graph, *, are_rows_of_one: bool) -> None:
    """Check that columns (and if requested, rows) sum to 1, that senders know that they send, and
    that all copies converge."""
    ones, product = torch.ones(graph.num_ranks, dtype=torch.float64), None
    for step in range(1, NUM_STEPS + 1):
        mixed = matrix(graph, step)
        assert bool((mixed >= 0).all())
        assert bool((mixed.diagonal() > 0).all())
        torch.testing.assert_close(mixed.sum(dim=0), ones)
        if are_rows_of_one:
            torch.testing.assert_close(mixed.sum(dim=1), ones)
        for rank in range(graph.num_ranks):
            takers = mixed[:, rank].nonzero().flatten().tolist()
            assert graph.receivers(rank, step) == [taker for taker in takers if taker != rank]
        product = mixed if product is None else mixed @ product
    assert product is not None
    consensus = product / product.sum(dim=1, keepdim=True)  # push weights, if rows do not sum to 1
    spread = consensus.max(dim=0).values - consensus.min(dim=0).values
    assert spread.max() < 0.9, "copies do not come closer"
    assert bool((product > 0).all()), "some copy never comes to some rank"


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("options", KINDS, ids=lambda one: f"{one['mode']}-{one['graph']}")
def test_matrices_keep_the_mean_and_reach_everyone(options: dict[str, str], num_ranks: int) -> None:
    graph = graph_of(Gossip.model_validate(options), num_ranks, seed=3)
    check_matrices(graph, are_rows_of_one=True)


@settings(max_examples=20)
@given(st.data())
def test_any_connected_graph_has_such_matrices_also_without_some_ranks(
    data: st.DataObject,
) -> None:
    num_ranks = data.draw(st.integers(2, 5))
    pushes = data.draw(st.booleans())
    order = data.draw(st.permutations(range(num_ranks)))
    # A path through all ranks, and a way back if edges are directed.
    edges = [list(pair) for pair in itertools.pairwise([*order, order[0]] if pushes else order)]
    pairs = [[a, b] for a in range(num_ranks) for b in range(num_ranks) if a != b]
    edges += data.draw(st.lists(st.sampled_from(pairs), max_size=6))
    options = Gossip(graph="custom", mode="sgp" if pushes else "d_psgd", edges=edges)
    options.check(num_ranks)
    check_matrices(graph_of(options, num_ranks, 0), are_rows_of_one=not pushes)
    worker_indices = data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=2, unique=True))
    left = without_missing(options, worker_indices, num_ranks)
    check_matrices(graph_of(left, len(worker_indices), 0), are_rows_of_one=not pushes)


def test_a_rank_keeps_its_position_and_a_later_rank_takes_a_free_position() -> None:
    options = Gossip(graph="custom", edges=[[0, 1], [1, 2], [2, 3]])
    assert without_missing(options, [0, 1, 2, 3], 4) is options
    # Rank 1 was lost and returned as the last rank; then rank 2 was lost permanently.
    assert without_missing(options, [0, 2, 3, 1], 4).edges == [[0, 3], [1, 2], [3, 1]]
    assert without_missing(options, [0, 3, 1], 4).edges == [[0, 2], [1, 2], [2, 1]]
    assert without_missing(options, [0, 3, 1, 7], 4).edges == [[0, 2], [2, 3], [3, 1]]


SIDES: list[tuple[dict[str, Any], int]] = [
    ({"graph": "ring"}, 3),
    ({"graph": "complete"}, 3),
    ({"graph": "random"}, 5),
    ({"graph": "custom", "edges": [[0, 1], [0, 2], [0, 3], [4, 1]]}, 5),
]


@pytest.mark.parametrize(("options", "num_ranks"), SIDES, ids=lambda one: str(one)[:20])
def test_no_rank_of_ad_psgd_asks_one_that_asks_also_where_some_are_missing(
    options: dict[str, Any], num_ranks: int
) -> None:
    whole = Gossip(mode="ad_psgd", **options)
    for worker_indices in ([*range(num_ranks)], [*range(1, num_ranks)], [0, *range(2, num_ranks)]):
        left, size = without_missing(whole, worker_indices, num_ranks), len(worker_indices)
        asked, asking = zip(*(sides_of(left, rank, size) for rank in range(size)), strict=True)
        assert {(a, b) for a in range(size) for b in asked[a]} == {
            (a, b) for b in range(size) for a in asking[b]
        }
        assert not any(asked[a] and asking[a] for a in range(size))
        reached = {0}
        for _ in range(size):
            reached |= {b for a in reached for b in (*asked[a], *asking[a])}
        assert len(reached) == size, "some copy never comes to some rank"


def test_one_cycle_of_the_exponential_graph_averages_exactly() -> None:
    graph = graph_of(Gossip(graph="exponential"), 8, seed=0)
    product = matrix(graph, 3) @ matrix(graph, 2) @ matrix(graph, 1)
    assert torch.equal(product, torch.full((8, 8), 1 / 8, dtype=torch.float64))


@pytest.mark.parametrize("options", KINDS, ids=lambda one: f"{one['mode']}-{one['graph']}")
def test_what_one_rank_knows_all_have_heard_by_then_and_not_before(options: dict[str, str]) -> None:
    graph = graph_of(Gossip.model_validate(options), 7, seed=1)
    for rank, step in [(0, 1), (0, 5), (3, 2)]:
        last = all_have_heard(graph, rank, step)
        knows = torch.zeros(7, dtype=torch.float64)
        knows[rank] = 1
        for at in range(step, last + 1):
            assert not bool((knows > 0).all()), f"all know it before step {at}"
            knows = matrix(graph, at) @ knows
        assert bool((knows > 0).all())
