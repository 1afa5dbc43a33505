"""The limits of queues, lending limits and reservations, where several of them apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from service.domain.scheduling.elastic.sizing import ElasticJob, ReportedStep
from service.domain.scheduling.policy import Decision, Preempt, Request, RunningJob, plan
from service.domain.scheduling.rules.queues import Queue
from tests.unit.service.domain.scheduling.snapshots import GPU, HOUR, NOW, running, snapshot

TIMES = tuple(ReportedStep(n, -(-n // 4), 64, 1.0 / n) for n in (1, 2, 4, 8))
TWO_NODES = {"n1": 4.0, "n2": 4.0}


def decide(*args: Any, **facts: Any) -> dict[str, Decision]:
    return {each.job_id: each for each in plan(snapshot(*args, **facts), NOW)}


def group(name: str, slices: dict[str, int], **fields: Any) -> RunningJob:
    """A group of 1 to 8 workers."""
    there = running(name, slices, held_s=HOUR, **fields)
    return replace(there, request=Request(8, GPU, 1))


def sizes(most: int = 8) -> ElasticJob:
    return ElasticJob(1, most, 64, 64, TIMES, steps_left=9000.0)


@pytest.mark.parametrize(
    "queues",
    [
        [Queue("a", quota={"GPU": 4.0}, lending_limit={"GPU": 0.0}), Queue("b")],
        [Queue("b", limit={"GPU": 4.0})],
        [Queue("b", user_limit={"GPU": 4.0})],
        [Queue("b", quota={"GPU": 2.0}, borrowing_limit={"GPU": 2.0})],
        [Queue("top", limit={"GPU": 4.0}), Queue("b", parent="top")],
    ],
)
def test_a_group_is_not_resized_beyond_its_limits(queues: list[Queue]) -> None:
    """The group would resume with the size that it had."""
    there = [group("x", {"n1": 4}, queue="b")]
    facts = {"elastic": {"x": sizes()}, "totals": TWO_NODES}
    assert isinstance(decide([], there, **facts)["x"], Preempt)
    found = decide([], there, queues=tuple(queues), **facts)
    assert not any(isinstance(each, Preempt) for each in found.values())


def test_groups_that_share_a_limit_are_not_all_resized() -> None:
    """Both groups could use the remaining 4 GPUs of the limit, but not both of them."""
    there = [group("x", {"n1": 2}, queue="b"), group("y", {"n1": 2}, queue="b", seq=2)]
    facts = {"elastic": {"x": sizes(), "y": sizes()}, "totals": {**TWO_NODES, "n3": 4.0, "n4": 4.0}}
    assert len(decide([], there, **facts)) == 2
    found = decide([], there, queues=(Queue("b", limit={"GPU": 8.0}),), **facts)
    assert [isinstance(each, Preempt) for each in found.values()] == [True]
