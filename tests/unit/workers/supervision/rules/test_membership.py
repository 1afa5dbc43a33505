"""The members of a group's next round, and the steps before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_workers.supervision.rules.membership import (
    GroupRoster,
    NextRound,
    Worker,
    WorkerState,
    next_round,
)
from tests.wire import traits

RECIPE: dict[str, Any] = {"recipe": "image_classification", "resources": {"num_workers": 4}}
REPLICAS = traits(RECIPE)
GOSSIP = traits({**RECIPE, "sync": {"kind": "gossip"}})
SERVED = traits({**RECIPE, "sync": {"kind": "parameter_server", "servers": 1}})
SILOS = replace(REPLICAS, is_tied_to_nodes=True)
A, E, L, S, R = (
    WorkerState.ACTIVE,
    WorkerState.ENDED,
    WorkerState.LOST,
    WorkerState.STARTING,
    WorkerState.READY,
)
NOTHING = NextRound((), (), (), 0, is_whole=True)


def roster(*states: WorkerState, least: int = 1, **fields: Any) -> GroupRoster:
    """Workers with these states: worker i has seat i, rank i and its own node `ni`."""
    workers = [Worker(index, index, f"n{index}", each) for index, each in enumerate(states)]
    return GroupRoster(workers, least, **fields)


def test_lost_ranks_of_replicas_get_another_process_and_keep_their_ranks() -> None:
    assert next_round(roster(A, L, A, L), REPLICAS) == replace(
        NOTHING, members=(0, 1, 2, 3), restarted=(1, 3)
    )


def test_of_gossip_the_others_go_on_and_the_lost_rejoin_in_a_later_round() -> None:
    assert next_round(roster(L, A, A, least=3), GOSSIP) == replace(
        NOTHING, members=(1, 2), rejoining=(0,)
    )


def test_a_round_follows_without_a_loss_too() -> None:
    """Ranks that lost their connections, or get another batch, meet again."""
    assert next_round(roster(A, A), REPLICAS) == replace(NOTHING, members=(0, 1))


@pytest.mark.parametrize("group", [REPLICAS, GOSSIP])
def test_ready_workers_are_the_last_ranks_and_starting_ones_have_none(group: Any) -> None:
    """This includes the replacement of rank 0: another process reports and saves by then."""
    assert next_round(roster(R, A, S, A, R), group) == replace(NOTHING, members=(1, 3, 0, 4))


def test_workers_on_dead_nodes_are_removed_and_not_restarted() -> None:
    found = next_round(roster(A, L, L, S, dead_nodes={"n1", "n3"}), REPLICAS)
    assert found == replace(NOTHING, members=(0, 2), restarted=(2,))
    found = next_round(roster(A, L, L, A, dead_nodes={"n1", "n3"}), GOSSIP)
    assert found == replace(NOTHING, members=(0,), rejoining=(2,))


def test_replicas_wait_for_workers_below_their_least_number_and_gossip_does_not() -> None:
    few = roster(A, L, A, S, least=3, dead_nodes={"n2"})
    assert next_round(few, REPLICAS) == replace(
        NOTHING, members=(0, 1), restarted=(1,), num_awaited=1, is_whole=False
    )
    assert next_round(few, GOSSIP) == replace(NOTHING, members=(0,), rejoining=(1,))
    assert next_round(roster(A, A, R, least=3), REPLICAS) == replace(NOTHING, members=(0, 1, 2))


@pytest.mark.parametrize("group", [REPLICAS, GOSSIP])
def test_a_round_is_not_announced_before_an_ended_member_is_replaced(group: Any) -> None:
    """It still has its slot, so no other worker is awaited instead."""
    found = next_round(roster(A, E, least=2), group)
    assert found == replace(NOTHING, members=(0, 1), is_whole=False)


def test_workers_whose_slots_are_recalled_are_not_in_the_round() -> None:
    found = next_round(roster(A, A, A, leaving={0}), REPLICAS)
    assert found == replace(NOTHING, members=(1, 2))


def test_no_round_follows_if_no_rank_is_left() -> None:
    assert next_round(roster(A, L, dead_nodes={"n0", "n1"}), REPLICAS) == "there are no ranks left"
    assert next_round(roster(L, E), GOSSIP) == "there are no ranks left"


def test_ranks_whose_numbers_are_their_roles_do_not_go_on_without_a_node() -> None:
    """They would be renumbered, and a worker would be taken for a server."""
    assert next_round(roster(A, L, A), SERVED) == replace(
        NOTHING, members=(0, 1, 2), restarted=(1,)
    )
    assert "the numbers and roles of the other ranks" in str(
        next_round(roster(A, L, dead_nodes={"n1"}), SERVED)
    )


def test_silos_go_on_without_a_lost_node_as_long_as_they_are_a_quorum() -> None:
    left = roster(A, L, A, dead_nodes={"n1"}, least=2)
    assert next_round(left, SILOS) == replace(NOTHING, members=(0, 2))
    assert "no other node holds the data" in str(next_round(replace(left, least=3), SILOS))


P = WorkerState.SPARE


def test_a_spare_gets_the_rank_of_a_lost_worker_and_no_process_is_awaited() -> None:
    found = next_round(roster(A, L, A, P), REPLICAS)
    assert found == replace(NOTHING, members=(0, 3, 2), takeovers=((3, 1),))
    dead = next_round(roster(A, L, A, P, dead_nodes={"n1"}), REPLICAS)
    assert dead == replace(NOTHING, members=(0, 3, 2), takeovers=((3, 1),))


def test_a_spare_gets_the_rank_of_a_worker_whose_slot_is_recalled() -> None:
    found = next_round(roster(A, A, P, leaving={0}), REPLICAS)
    assert found == replace(NOTHING, members=(2, 1), takeovers=((2, 0),))


def test_lost_workers_beyond_the_spares_get_another_process() -> None:
    found = next_round(roster(L, L, A, P), REPLICAS)
    assert found == replace(NOTHING, members=(3, 1, 2), restarted=(1,), takeovers=((3, 0),))


def test_a_spare_is_neither_used_for_growth_nor_if_its_own_slot_goes() -> None:
    assert next_round(roster(A, A, P, R), REPLICAS) == replace(NOTHING, members=(0, 1, 3))
    assert next_round(roster(A, A, P), REPLICAS) == replace(NOTHING, members=(0, 1))
    for gone in ({"dead_nodes": {"n2"}}, {"leaving": {2}}):
        found = next_round(roster(A, L, P, **gone), REPLICAS)
        assert found == replace(NOTHING, members=(0, 1), restarted=(1,))
