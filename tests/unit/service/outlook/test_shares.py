"""The report of shares gives the numbers of docs/explanation/scheduling.md, on random usage."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dray import views
from service.domain.scheduling.outlook.factors import Factors
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.rules.queues import Queue
from service.outlook import shares
from tests.unit.service.domain.scheduling import snapshots
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW

HALF_LIFE_S = 14 * 24 * HOUR
Used = Mapping[tuple[str, str], float]

WEIGHTS = st.sampled_from([0.1, 0.5, 1.0, 1.0, 2.0, 1000.0])
ACCOUNTS = st.tuples(
    st.sampled_from(["default", "night"]), st.sampled_from(["ann", "bob", "cy", "di"])
)
RULES = st.tuples(WEIGHTS, st.dictionaries(st.sampled_from(["ann", "bob"]), WEIGHTS))
USED = st.dictionaries(ACCOUNTS, st.floats(0, 1e6), max_size=8)


class Oracle:
    """The standings, computed from the sentences of the page for one account at a time."""

    def __init__(self, rules: Mapping[str, Queue], used_s: Used, active: set[tuple[str, str]]):
        self.rules, self.used_s, self.active = rules, used_s, active
        self.queues = {queue for queue, _ in active}

    def of_queue(self, name: str) -> float:
        return sum(seconds for (queue, _), seconds in self.used_s.items() if queue == name)

    def part(self, name: str) -> float:
        return self.rules[name].weight / sum(self.rules[each].weight for each in self.queues)

    def queue_due(self, name: str) -> float:
        return self.part(name) * sum(self.of_queue(each) for each in self.queues)

    def part_of(self, name: str, owner: str) -> float:
        """The part of the queue that is due to an active user."""
        weights = {
            user: self.rules[name].user_weights.get(user, 1.0)
            for queue, user in self.active
            if queue == name
        }
        return weights[owner] / sum(weights.values())

    def due(self, name: str, owner: str) -> float:
        used = sum(self.used_s.get(each, 0.0) for each in self.active if each[0] == name)
        return used * self.part_of(name, owner)

    def margin(self, name: str) -> float:
        """The smallest share of any user in 10 hours, from 2 minutes to 4 hours, multiplied by
        the queue's share of the cluster."""
        smallest = min(self.part_of(queue, user) for queue, user in self.active if queue == name)
        return min(max(smallest * 10 * HOUR, 120.0), 4 * HOUR) * self.part(name)

    def beyond(self, name: str, owner: str, after_s: float = 0.0) -> float:
        """The usage beyond the share, after a time in which no job ran."""
        decay = 2 ** (-after_s / HALF_LIFE_S)
        return (self.used_s.get((name, owner), 0.0) - self.due(name, owner)) * decay


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-3)


@example(
    rules=((1.0, {"ann": 1000.0}), (1.0, {})),
    used_s={("default", "bob"): 700.0},
    active={("default", "ann"), ("default", "bob")},
).via("the smallest margin")
@given(rules=st.tuples(RULES, RULES), used_s=USED, active=st.sets(ACCOUNTS, min_size=1))
def test_the_report_gives_the_numbers_of_the_page(
    rules: tuple[tuple[float, dict[str, float]], ...],
    used_s: dict[tuple[str, str], float],
    active: set[tuple[str, str]],
) -> None:
    queues = {
        name: Queue(name, weight, weights)
        for name, (weight, weights) in zip(("default", "night"), rules, strict=True)
    }
    oracle = Oracle(queues, used_s, active)
    waiting = [
        snapshots.waiting(f"{queue}-{owner}", queue=queue, owner=owner, seq=at)
        for at, (queue, owner) in enumerate(sorted(active))
    ]
    seen = snapshots.snapshot(waiting, (), {"n": 8.0}, used_s=used_s, queues=tuple(queues.values()))
    report = shares.of_situation(queues, NOW, Situation(seen))
    assert [queue.name for queue in report.queues] == ["default", "night"]
    factors = Factors(seen, NOW)
    for queue in report.queues:
        _check_queue(queue, oracle)
        recent = {user for (name, user), s in used_s.items() if name == queue.name and s >= 1}
        users = recent | {user for name, user in active if name == queue.name}
        assert [user.owner for user in queue.users] == sorted(users)
        for user in queue.users:
            _check_user(queue.name, user, oracle)
            if user.standing is not None:
                told = {each.name: each.value for each in factors.of(f"{queue.name}-{user.owner}")}
                assert told["standing"] == {"behind": -1, "even": 0, "ahead": 1}[user.standing]
                assert told["tier"] == {"share": 1, "ahead": 2}[queue.tier or ""]


def _check_queue(queue: views.QueueShare, oracle: Oracle) -> None:
    name = queue.name
    assert queue.used_s == near(oracle.of_queue(name))
    if name not in oracle.queues:
        assert (queue.share, queue.due_s, queue.tier, queue.until) == (None, None, None, None)
        return
    beyond = oracle.of_queue(name) - oracle.queue_due(name)
    assert (queue.share, queue.due_s) == (near(oracle.part(name)), near(oracle.queue_due(name)))
    assert (queue.difference_s, queue.margin_s) == (near(beyond), HOUR)
    assume(abs(beyond - HOUR) > 1e-3)
    assert queue.tier == ("ahead" if beyond > HOUR else "share")
    assert (queue.until is not None) == (beyond > HOUR)


def _check_user(name: str, user: views.UserShare, oracle: Oracle) -> None:
    assert user.weight == oracle.rules[name].user_weights.get(user.owner, 1.0)
    assert user.used_s == near(oracle.used_s.get((name, user.owner), 0.0))
    if (name, user.owner) not in oracle.active:
        assert (user.share, user.standing, user.until) == (None, None, None)
        return
    beyond, margin = oracle.beyond(name, user.owner), oracle.margin(name)
    assert user.share == near(oracle.part_of(name, user.owner))
    assert user.due_s == near(oracle.due(name, user.owner))
    assert (user.difference_s, user.margin_s) == (near(beyond), near(margin))
    assume(abs(abs(beyond) - margin) > 1.0)
    if abs(beyond) < margin:
        assert (user.standing, user.until) == ("even", None)
        return
    assert user.standing == ("ahead" if beyond > 0 else "behind")
    assert user.until is not None
    left_s = (user.until - NOW) / timedelta(seconds=1)
    assert abs(oracle.beyond(name, user.owner, left_s - 60)) > margin
    assert abs(oracle.beyond(name, user.owner, left_s + 60)) < margin


def test_users_of_a_queue_whose_budget_is_used_up_are_not_active() -> None:
    queues = {name: Queue(name) for name in ("default", "spent")}
    waiting = [
        snapshots.waiting("a", queue="spent", owner="ann"),
        snapshots.waiting("b", queue="default", owner="bob"),
    ]
    used_s = {("spent", "ann"): HOUR, ("default", "bob"): HOUR}
    seen = snapshots.snapshot(waiting, used_s=used_s, used_up={"spent": "the budget is used up"})
    default, spent = shares.of_situation(queues, NOW, Situation(seen)).queues
    assert (default.share, spent.share, spent.users[0].standing) == (1.0, None, None)
