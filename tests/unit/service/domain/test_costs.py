"""Slot prices, costs of attempts, and budgets."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from dray.input.units import money
from ray_workers.shared.slices import Slice
from service.domain.costs.budgets import QueueSpending, month_of, next_month, used_up, with_budget
from service.domain.costs.prices import HeldOnNode, PriceRule, Prices, cost_of, unreachable
from service.domain.costs.slot_history import SlotHistory
from service.domain.costs.usage import quarter_bounds
from service.domain.scheduling.policy import Grow, Node, Snapshot, Start, Stay, Wait, plan
from service.domain.scheduling.rules.queues import Queue
from tests.unit.service.domain.scheduling.policy.test_growth import group
from tests.unit.service.domain.scheduling.rules.test_limits import NOW, job

SPOT = {"ray.io/market-type": "spot"}


def prices(*rules: tuple[Any, ...]) -> Prices:
    """For each rule, the resource, the price, and optional labels."""
    made = (PriceRule(name, price, dict(*labels)) for name, price, *labels in rules)
    return Prices("EUR", tuple(made))


def test_an_attempt_that_held_nothing_has_no_shares() -> None:
    at = datetime(2026, 1, 1, 12, 7, tzinfo=UTC)
    assert SlotHistory(at, at, None).shares(quarter_bounds(at, at)) == {}


def test_a_slot_costs_the_sum_over_its_resources() -> None:
    some = prices(("slot", 0.1), ("CPU", 0.05), ("GPU", 2.0), ("memory", 0.01))
    bundle = {"CPU": 4.0, "GPU": 0.5, "memory": 8.0 * 2**30, "accelerator_type:H100": 0.001}
    assert some.slot_hour(bundle, {}) == pytest.approx(0.1 + 0.2 + 1.0 + 0.08)
    assert prices().slot_hour(bundle, {}) == 0.0


def test_the_first_rule_whose_labels_the_node_has_holds() -> None:
    some = prices(("GPU", 0.9, SPOT), ("GPU", 4.0, {"type": "p5"}), ("GPU", 2.0))
    labels: dict[str, float] = {}
    for name, on in (("spot", SPOT), ("both", {**SPOT, "type": "p5"}), ("p5", {"type": "p5"})):
        labels[name] = some.slot_hour({"GPU": 1.0}, on)
    assert labels == {"spot": 0.9, "both": 0.9, "p5": 4.0}
    assert some.slot_hour({"GPU": 1.0}, {"ray.io/market-type": "on-demand"}) == 2.0
    assert prices(("GPU", 1.0, SPOT)).slot_hour({"GPU": 1.0}, {}) == 0.0


def test_a_rule_that_no_node_comes_to_is_found() -> None:
    def found(*rules: tuple[Any, ...]) -> tuple[int, int] | None:
        return unreachable(prices(*rules).rules)

    assert found(("GPU", 1.0), ("CPU", 1.0), ("GPU", 0.5, SPOT)) == (2, 0)
    assert found(("GPU", 1.0), ("GPU", 1.0)) == (1, 0)
    assert found(("GPU", 1.0, SPOT), ("GPU", 2.0, {**SPOT, "a": "b"})) == (1, 0)
    assert found(("GPU", 1.0, SPOT), ("GPU", 2.0, {"a": "b"}), ("GPU", 3.0), ("CPU", 1.0)) is None


def test_the_cost_is_divided_as_the_ledger_is() -> None:
    held = [HeldOnNode(SPOT, 3600.0), HeldOnNode({}, 7200.0)]
    some = prices(("CPU", 1.0, SPOT), ("CPU", 2.0))
    ledger = {"useful": 60.0, "recomputed": 10.0, "idle": 20.0, "unreported": 10.0}
    cost = cost_of(some, {"CPU": 1.0}, held, ledger)
    assert (cost.slot_seconds, cost.total) == (10800.0, 5.0)
    assert (cost.useful, cost.wasted, cost.unreported) == pytest.approx((3.0, 1.5, 0.5))
    silent = cost_of(some, {"CPU": 1.0}, held, {})
    assert (silent.useful, silent.wasted, silent.unreported) == (0.0, 0.0, 5.0)
    nothing = cost_of(some, {"CPU": 1.0}, [], ledger)
    assert (nothing.total, nothing.wasted) == (0.0, 0.0)


def test_the_largest_amounts_stay_numbers() -> None:
    some = prices(("CPU", 1e9), ("slot", 1e9))
    cost = cost_of(some, {"CPU": 1e6}, [HeldOnNode({}, 1e15)], {"useful": 1e15})
    assert 0 < cost.useful == cost.total < 1e30


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0.0, "0 EUR"),
        (500.0, "500 EUR"),
        (1234.5, "1,234.50 EUR"),
        (0.00123456, "0.00123 EUR"),
        (1e15, "1,000,000,000,000,000 EUR"),
    ],
)
def test_amounts_are_written_for_people(amount: float, text: str) -> None:
    assert money(amount, "EUR") == text


def test_months_begin_in_utc() -> None:
    late = datetime.fromisoformat("2026-12-31T23:30:00-02:00")
    assert month_of(late) == datetime(2027, 1, 1, tzinfo=UTC)
    assert next_month(datetime(2026, 12, 31, tzinfo=UTC)) == datetime(2027, 1, 1, tzinfo=UTC)
    assert next_month(datetime(2027, 1, 31, tzinfo=UTC)) == datetime(2027, 2, 1, tzinfo=UTC)


def test_a_budget_that_is_used_up_says_how_much_and_until_when() -> None:
    now = datetime(2026, 11, 25, 12, 0, tzinfo=UTC)
    both = Queue("night", budget=5000.0, monthly_budget=500.0)
    assert used_up(both, QueueSpending(4999.9, 499.9), "EUR", now) is None
    assert used_up(both, QueueSpending(600.0, 512.34), "EUR", now) == (
        "the queue 'night' has exhausted its budget of 500 EUR for November 2026: its jobs have "
        "cost 512 EUR. Jobs can start again on 2026-12-01 at 00:00 UTC, or when an admin "
        "increases the budget (`dray queue set night --monthly-budget ...`)"
    )
    assert used_up(both, QueueSpending(5000.0, 500.0), "EUR", now) == (
        "the queue 'night' has exhausted its budget of 5,000 EUR: its jobs have cost 5,000 EUR. "
        "Jobs can start again when an admin increases the budget "
        "(`dray queue set night --budget ...`)"
    )
    spending = QueueSpending(4000.0, 400.0, to_come=1000.0, to_come_this_month=90.0)
    assert used_up(both, spending, "EUR", now) == (
        "the queue 'night' has exhausted its budget of 5,000 EUR: its jobs have cost about "
        "4,000 EUR, and the running jobs are expected to cost about 1,000 EUR more. Jobs can start "
        "again if these jobs cost less, or when an admin increases the budget "
        "(`dray queue set night --budget ...`)"
    )
    assert used_up(both, replace(spending, to_come=999.0), "EUR", now) is None
    assert used_up(Queue("q", budget=0.0), QueueSpending(), "EUR", now) is not None
    free = Queue("free")
    assert used_up(free, QueueSpending(1e9, 1e9), "EUR", now) is None
    assert with_budget([both, free, Queue("none", budget=0.0)]) == [both, Queue("none", budget=0.0)]


WHY = "the queue 'night' has used up its budget of 5 EUR"


def test_no_job_of_the_queue_starts_and_those_of_others_pass() -> None:
    node = Node("n", {"CPU": 4.0}, {"CPU": 4.0})
    stopped, other = job("a", 4, seq=1), job("b", 4, seq=2, queue="default")
    queues = (Queue("night", quota={"CPU": 4.0}), Queue("default"))
    snapshot = Snapshot(
        (stopped, other), (node,), connected=True, queues=queues, used_up={"night": WHY}
    )
    waits, starts = plan(snapshot, NOW)
    assert isinstance(waits, Wait)
    assert (waits.reason.code, waits.reason.message) == (
        "budget_used_up",
        f"needs 4 workers of 1 CPU; {WHY}",
    )
    assert isinstance(starts, Start)
    assert starts.job_id == "b"


def test_a_running_group_goes_on_and_does_not_grow() -> None:
    node = Node("n", {"CPU": 4.0}, {"CPU": 2.0})
    grows = replace(group("g", 4, Slice("n", 2)), queue="night")
    (stays,) = plan(
        Snapshot((), (node,), connected=True, growing=(grows,), used_up={"night": WHY}), NOW
    )
    assert isinstance(stays, Stay)
    assert stays.reason.code == "budget_used_up"
    lacks = replace(group("g", 4, Slice("n", 2), lacking=1), queue="night")
    (grown,) = plan(
        Snapshot((), (node,), connected=True, growing=(lacks,), used_up={"night": WHY}), NOW
    )
    assert isinstance(grown, Grow), "it gets what it lost"
