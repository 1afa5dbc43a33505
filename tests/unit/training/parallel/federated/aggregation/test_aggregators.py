"""Aggregating updates: sums that are exact in any order, and means that are robust against
malicious clients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dray.secure_aggregation.messages import MaskingPhase
from dray.spec.federated.parts import Aggregator
from ray_workers.training.devices import CPU
from ray_workers.training.parallel.federated.aggregation import aggregators as aggregation
from ray_workers.training.parallel.federated.aggregation.aggregators import FixedPointSum, robust
from ray_workers.training.parallel.federated.aggregation.received import (
    ReceivedUpdates,
    UpdateTable,
)
from ray_workers.training.parallel.federated.aggregation.update_checks import (
    Verdict,
    judged,
)
from ray_workers.training.parallel.federated.rounds import Participant, RoundPlan
from tests.unit.training.ranks import run_in_group

GENERATOR = torch.Generator().manual_seed(0)
UPDATES = torch.randn(12, 50, generator=GENERATOR) * torch.logspace(-6, 2, 50)
WEIGHTS = np.random.default_rng(0).dirichlet(np.ones(12)).tolist()


def summed(order: list[int]) -> Tensor:
    total = FixedPointSum(50, max_norm=1000.0, device=CPU)
    for at in order:
        total.add(UPDATES[at], WEIGHTS[at])
    return total.total(1)


def test_a_sum_is_the_same_in_any_order_and_as_near_as_float64() -> None:
    one, other = summed(list(range(12))), summed(list(reversed(range(12))))
    assert torch.equal(one, other)
    plain = (UPDATES.double() * torch.tensor(WEIGHTS, dtype=torch.float64)[:, None]).sum(dim=0)
    torch.testing.assert_close(one, plain, rtol=0, atol=1e-13)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_the_largest_updates_there_may_be_do_not_overflow(max_norm: float) -> None:
    total = FixedPointSum(1, max_norm, CPU)
    for _ in range(7):
        total.add(torch.tensor([-max_norm]), 1 / 7)
    assert total.total(1).item() == pytest.approx(-max_norm, rel=1e-6)


def test_all_ranks_get_all_updates_in_the_order_of_the_clients_and_none_where_none_came() -> None:
    run_in_group(_gather, 3)


def _gather(rank: int) -> None:
    nobody = RoundPlan(1, [], 4, 0, lost=dict.fromkeys(range(4), MaskingPhase.SHARE_KEYS))
    received = UpdateTable(nobody, CPU).of_all(3)
    assert received.accepted == []
    assert received.loss(0.5) == 0.5
    assert received.metrics(counts=False)["federated/dropped_out"] == 4
    owners = [2, 0, 2, 2, 0]
    mine = [UPDATES[at] for at, owner in enumerate(owners) if owner == rank]
    found = aggregation.rows_of_all(mine, owners, UPDATES[0])
    assert torch.equal(found, UPDATES[:5])
    assert aggregation.rows_of_all([], [], UPDATES[0]).shape == (0, 50)


@pytest.mark.parametrize("at_once", [aggregation.SORTED_AT_ONCE, 90, 1])
def test_medians_and_trimmed_means_are_numpys(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregation, "SORTED_AT_ONCE", at_once)
    for count in (11, 12):
        rows = UPDATES[:count]
        median = robust(Aggregator(name="median"), rows)
        assert median.numpy() == pytest.approx(np.median(rows.double().numpy(), axis=0))
    trimmed = robust(Aggregator(name="trimmed_mean", trim=0.25), UPDATES)
    ordered = np.sort(UPDATES.double().numpy(), axis=0)[3:9]
    assert trimmed.numpy() == pytest.approx(ordered.mean(axis=0))
    hundred = torch.cat([torch.zeros(29, 1), torch.ones(42, 1), torch.full((29, 1), 7.0)])
    of_decimals = robust(Aggregator(name="trimmed_mean", trim=0.29), hundred)  # 0.29 * 100 < 29
    assert of_decimals.item() == 1.0
    of_few = robust(Aggregator(name="trimmed_mean", trim=1 / 161), UPDATES)
    ordered = np.sort(UPDATES.double().numpy(), axis=0)[1:-1]
    assert of_few.numpy() == pytest.approx(ordered.mean(axis=0)), "one at each end at least"


def test_krum_takes_the_update_that_lies_nearest_to_its_neighbours() -> None:
    honest = torch.ones(8, 5) + 0.1 * torch.randn(8, 5, generator=GENERATOR)
    rows = torch.cat([torch.full((2, 5), 50.0), honest, torch.full((1, 5), -50.0)])
    options = Aggregator(name="krum", malicious=3)
    scores = []
    for one in rows:
        nearest = sorted(float((one - other).square().sum()) for other in rows)[1:]
        scores.append(sum(nearest[: len(rows) - 3 - 2]))
    assert torch.equal(robust(options, rows).float(), rows[int(np.argmin(scores))])
    several = robust(options.model_copy(update={"keep": 5}), rows)
    assert several.numpy() == pytest.approx(np.ones(5), abs=0.2)


def test_updates_that_are_no_updates_are_refused_with_the_reason() -> None:
    good = torch.tensor([3.0, 4.0])
    assert judged(good, 2, max_norm=5.0) == (Verdict.ACCEPTED, 5.0)
    assert judged(good, 2, max_norm=4.9) == (Verdict.TOO_LARGE, 5.0)
    assert judged(good, 3, max_norm=5.0)[0] is Verdict.WRONG_SHAPE
    for bad in (math.nan, math.inf, 1e38):
        rotten = torch.tensor([1.0, bad])
        wanted = Verdict.TOO_LARGE if bad == 1e38 else Verdict.NOT_FINITE
        assert judged(rotten, 2, max_norm=5.0)[0] is wanted


def test_the_clients_of_refused_updates_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    participants = [Participant(client, 10, 1, attacks=False) for client in (3, 17, 40)]
    plan = RoundPlan(5, participants, num_chosen=3, num_stragglers=0, lost={})
    verdicts = [Verdict.ACCEPTED, Verdict.NOT_FINITE, Verdict.TOO_LARGE]
    received = ReceivedUpdates(plan, verdicts, [1.0, math.nan, 2e3], [0.5, math.nan, 9.0])
    received.name_refused(1000.0)
    assert capsys.readouterr().out.splitlines() == [
        "dray: round 5: the update of client 17 is refused: the update contains values that are "
        "not finite",
        "dray: round 5: the update of client 40 is refused: the update's norm of 2000 exceeds "
        "federated.max_update_norm, which is 1000",
    ]
    assert received.loss(0.0) == 0.5
    assert received.metrics(counts=True)["federated/refused"] == 2


@pytest.mark.parametrize(("norms", "median"), [([1.0, 2.0, 3.0, 10.0], 2.5), ([1.0, 2.0, 9.0], 2)])
def test_the_norm_of_a_rounds_updates_is_their_median(norms: list[float], median: float) -> None:
    plan = RoundPlan(1, [Participant(at, 1, 1) for at in range(len(norms))], len(norms), 0, {})
    table = UpdateTable(plan, CPU)
    for index, norm in enumerate(norms):
        table.note(index, Verdict.ACCEPTED, norm, loss=1.0)
    assert table.of_all(1).metrics(counts=True)["federated/update_norm"] == median
