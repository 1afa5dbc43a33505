"""A round is the same each time it is run, and dropouts and stragglers occur as often as
requested."""

from __future__ import annotations

from typing import Any

import pytest

from dray.secure_aggregation.messages import MaskingPhase
from dray.spec import Federated
from ray_workers.training.parallel.federated.rounds import (
    AFTER_THE_UPDATE,
    PHASES,
    Participant,
    Rounds,
    assign,
)

SIZES = [1 + client % 50 for client in range(400)]


def rounds(seed: int = 0, **options: Any) -> Rounds:
    default = {"clients": 400, "clients_per_round": 100, "rounds": 50, "batch_size": 10}
    return Rounds(Federated.model_validate({**default, **options}), SIZES, seed)


def test_each_round_has_the_requested_number_of_clients_and_each_client_is_drawn() -> None:
    plans = [rounds().plan(number) for number in range(1, 51)]
    assert {len(plan.participants) for plan in plans} == {100}
    clients = [[one.client for one in plan.participants] for plan in plans]
    assert all(one == sorted(set(one)) for one in clients)
    assert len({client for one in clients for client in one}) == 400
    assert clients[0] != clients[1]
    assert rounds().plan(7) == plans[6]
    assert rounds(seed=1).plan(7) != plans[6]


def test_a_client_takes_a_step_for_each_batch_of_each_epoch() -> None:
    plan = rounds(local_epochs=3).plan(1)
    for one in plan.participants:
        assert one.num_samples == SIZES[one.client]
        assert one.num_steps == 3 * -(-one.num_samples // 10)


def test_clients_drop_out_and_straggle_as_often_as_asked() -> None:
    some = rounds(dropout_rate=0.3, stragglers={"rate": 0.5}, local_epochs=10)
    plans = [some.plan(number) for number in range(1, 51)]
    assert sum(len(plan.lost) for plan in plans) / 5000 == pytest.approx(0.3, abs=0.03)
    came = [one for plan in plans for one in plan.participants]
    assert sum(plan.num_stragglers for plan in plans) / len(came) == pytest.approx(0.5, abs=0.03)
    parts = [one.num_steps / (10 * -(-one.num_samples // 10)) for one in came]
    short = [part for part in parts if part < 1]
    assert 0.45 < sum(short) / len(short) < 0.55
    assert min(one.num_steps for one in came) >= 1
    without = rounds(stragglers={"rate": 0.5, "updates": "drop"}).plan(1)
    assert len(without.lost) == without.num_stragglers > 30


def test_a_straggler_has_done_each_part_of_its_steps_equally_often() -> None:
    """All of 1 to n - 1 out of n steps are equally likely; a client with one step can't have done
    part of it."""
    sizes = [5] * 200 + [1] * 200
    options = {"clients": 400, "clients_per_round": 400, "rounds": 50, "batch_size": 1}
    stragglers = {"stragglers": {"rate": 0.5, "updates": "keep"}}
    some = Rounds(Federated.model_validate({**options, **stragglers}), sizes, 0)
    plans = [some.plan(number) for number in range(1, 51)]
    steps = [one.num_steps for plan in plans for one in plan.participants if one.client < 200]
    counts = [steps.count(number) / len(steps) for number in range(1, 6)]
    assert counts == pytest.approx([0.125] * 4 + [0.5], abs=0.01)
    assert sum(plan.num_stragglers for plan in plans) == sum(number < 5 for number in steps)
    stragglers["stragglers"]["updates"] = "drop"
    without = Rounds(Federated.model_validate({**options, **stragglers}), sizes, 0).plan(1)
    assert max(without.lost) < 200


def test_attackers_are_the_same_in_every_round() -> None:
    some = rounds(attack={"rate": 0.2})
    attacks: dict[int, set[bool]] = {}
    for number in range(1, 51):
        for one in some.plan(number).participants:
            attacks.setdefault(one.client, set()).add(one.attacks)
    assert all(len(seen) == 1 for seen in attacks.values())
    assert sum(seen == {True} for seen in attacks.values()) == 80
    few = rounds(clients_per_round=400, attack={"rate": 1e-6}).plan(1)
    assert sum(one.attacks for one in few.participants) == 1


def test_with_privacy_each_client_comes_by_a_chance_of_its_own() -> None:
    private = rounds(privacy={"noise_multiplier": 1.0, "epsilon": 1.0, "delta": 1e-3})
    counts = [len(private.plan(number).participants) for number in range(1, 51)]
    assert len(set(counts)) > 10
    assert sum(counts) / 50 == pytest.approx(100, abs=5)


def test_ranks_get_equally_many_steps() -> None:
    participants = [Participant(at, 1, 1 + at % 7, attacks=False) for at in range(100)]
    owners = assign(participants, 3)
    steps = [
        sum(p.num_steps for p, r in zip(participants, owners, strict=True) if r == rank)
        for rank in range(3)
    ]
    assert max(steps) - min(steps) <= 7
    assert assign(participants, 1) == [0] * 100
    assert assign([], 2) == []


def test_secure_aggregation_loses_clients_in_each_of_its_phases() -> None:
    """Clients that are lost after their update train like the others."""
    plans = [rounds(dropout_rate=0.4, secure_aggregation={}).plan(at) for at in range(1, 51)]
    without = [rounds(dropout_rate=0.4).plan(at) for at in range(1, 51)]
    phases = [phase for plan in plans for phase in plan.lost.values()]
    phases += [one.lost_in for plan in plans for one in plan.participants if one.lost_in]
    for phase in PHASES:
        assert phases.count(phase) / len(phases) == pytest.approx(0.2, abs=0.03)
    for plan, other in zip(plans, without, strict=True):
        stay = [one for one in plan.participants if one.lost_in is None]
        assert stay == other.participants
        assert {*plan.lost} <= {*other.lost}
        assert {one.lost_in for one in plan.participants} <= {None, *AFTER_THE_UPDATE}


def test_stragglers_that_are_dropped_have_exchanged_their_keys() -> None:
    plan = rounds(stragglers={"rate": 0.2, "updates": "drop"}, secure_aggregation={}).plan(1)
    assert {*plan.lost.values()} == {MaskingPhase.MASKED_INPUT}
