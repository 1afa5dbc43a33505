"""The reported factors give the order of the plan, on random queues."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from service.domain.scheduling.outlook.factors import Factors
from service.domain.scheduling.policy import Snapshot, plan
from tests import seeds
from tests.unit.service.domain.scheduling import snapshots
from tests.unit.service.domain.scheduling.outlook.test_counterfactuals_by_chance import drawn
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW

DAY = 24 * HOUR
HIGHER_FIRST = {"priority", "overdue"}
USED = {"ann": 1.0, "bo": 3.0, "cleo": 10.0, "dan": 22.0, "eve": 14.0}
"""Hours for which each user has used the cluster; each user's share is 10 hours."""


def queue(number: int) -> Snapshot:
    """A random queue with jobs that were moved to the front, are overdue, or have no estimate."""
    draw = random.Random(number)
    seen = drawn(draw).snapshot
    more = [job for at in range(4) for job in drawn(draw).snapshot.queue]
    jobs = []
    for at, job in enumerate([*seen.queue, *more]):
        changes = {
            "job_id": f"w{at}",
            "seq": at,
            "priority": draw.choice([50, 50, 50, 70]),
            "place": draw.choice([0, 0, 0, 0, -1, -2]),
            "left_s": draw.choice([None, 700.0, 700.0, job.left_s]),
            "guess_s": draw.choice([None, 4000.0]),
            "waited_s": draw.choice([0.0, job.waited_s, 2 * DAY, 4 * DAY]),
        }
        jobs.append(replace(job, **changes))
    draw.shuffle(jobs)
    return replace(seen, queue=tuple(jobs))


def compared(factors: Factors, job_id: str) -> list[tuple[str, float]]:
    """Return the values that are compared; lower values come first."""
    told = [
        (each.name, -each.value if each.name in HIGHER_FIRST else each.value)
        for each in factors.of(job_id)
        if each.value is not None
    ]
    assert [name for name, _ in told if name != "work"] == [
        *("tier", "priority", "standing", "usage", "overdue", "submission", "front")
    ]
    return told


@pytest.mark.parametrize("number", seeds.drawn(200))
def test_the_reported_factors_give_the_order_of_the_plan(number: int) -> None:
    seen = queue(number)
    by_id = {job.job_id: job for job in seen.queue}
    planned = [d.job_id for d in plan(seen, NOW) if d.job_id in by_id and not by_id[d.job_id].held]
    factors = Factors(seen, NOW)
    keys = {job_id: compared(factors, job_id) for job_id in planned}
    told = sorted(planned, key=lambda job_id: ([v for _, v in keys[job_id]], by_id[job_id].seq))
    assert told == planned
    assert [factors.num_ahead(job_id) for job_id in planned] == [*range(len(planned))]
    for job in seen.queue:
        assert (job.job_id in factors) == (job.held is None)
    for at, job_id in enumerate(planned):
        ahead = factors.ahead(job_id, 5)
        assert [each.job_id for each in ahead] == planned[max(0, at - 5) : at]
        for each in ahead:
            pairs = zip(keys[each.job_id], keys[job_id], strict=True)
            differ = next((one[0] for one, other in pairs if one != other), "submission")
            assert each.decided_by == differ


def test_each_factor_is_told_in_words_with_both_values() -> None:
    four, eight = 4, 8
    jobs = [
        snapshots.waiting("this", eight, seq=9, left_s=10 * HOUR, owner="ann"),
        snapshots.waiting("small", four, seq=8, left_s=2 * HOUR, owner="ann"),
        snapshots.waiting("urgent", seq=7, priority=60, owner="ann"),
        snapshots.waiting("others", seq=6, owner="bob", left_s=20 * HOUR),
        snapshots.waiting("unknown", seq=5, owner="ann"),
        snapshots.waiting("waited", seq=3, owner="ann", left_s=50 * HOUR, waited_s=26 * HOUR),
        snapshots.waiting("moved", seq=10, owner="ann", left_s=50 * HOUR, place=-1, priority=60),
    ]
    used_s = {("default", "ann"): 20 * HOUR}
    factors = Factors(snapshots.snapshot(jobs, (), {"n": 8.0}, used_s=used_s), NOW)
    told = {each.job_id: (each.decided_by, each.message) for each in factors.ahead("this", 20)}
    assert told == {
        "moved": (
            "priority",
            "priority 60 > 50; the job ahead was moved to the front, and has the rank of urgent",
        ),
        "urgent": ("priority", "priority 60 > 50"),
        "others": (
            "standing",
            "its owner has used less than their share; "
            "this job: its owner has used more than their share",
        ),
        "waited": (
            "overdue",
            "overdue, with the longest wait (26 h); this job: not overdue: waited for 0 s",
        ),
        "unknown": (
            "work",
            "unknown time left with 1 worker of 1 GPU < 10 h left with 8 workers of 1 GPU "
            "(work 0 < 36,300)",
        ),
        "small": (
            "work",
            "2 h left with 4 workers of 1 GPU < 10 h left with 8 workers of 1 GPU "
            "(work 4,617 < 36,300)",
        ),
    }
    assert [(each.name, each.message) for each in factors.of("small")] == [
        ("tier", "its queue has used at most its share"),
        ("priority", "priority 50"),
        ("standing", "its owner has used more than their share"),
        ("usage", "its owner has used 200% of their share"),
        ("overdue", "not overdue: waited for 0 s"),
        (
            "work",
            "2 h left with 4 workers of 1 GPU, 0.5 of the cluster: "
            "(7,200 + 300) s * 0.5^0.7 = 4,617",
        ),
        ("submission", "submitted as number 8"),
        ("front", "not moved to the front"),
    ]
    [passed] = factors.ahead("urgent", 1)
    assert (passed.job_id, passed.decided_by) == ("moved", "front")


def test_users_who_have_used_the_smallest_part_of_their_share_come_first() -> None:
    jobs = [snapshots.waiting(name, owner=name, left_s=HOUR, seq=9 - len(name)) for name in USED]
    used_s = {("default", name): hours * HOUR for name, hours in USED.items()}
    factors = Factors(snapshots.snapshot(jobs, (), {"n": 8.0}, used_s=used_s), NOW)
    assert list(factors.in_order()) == ["ann", "bo", "cleo", "eve", "dan"]
    told = {each.job_id: (each.decided_by, each.message) for each in factors.ahead("bo", 1)}
    others = (
        "its owner has used 10% of their share; this job: its owner has used 30% of their share"
    )
    assert told == {"ann": ("usage", others)}
    assert factors.ahead("dan", 1)[0].decided_by == "usage"


def test_a_job_that_has_waited_for_a_week_tells_why_it_comes_first() -> None:
    jobs = [
        snapshots.waiting("old", seq=1, owner="ann", left_s=HOUR, waited_s=180 * HOUR),
        snapshots.waiting("older", seq=0, owner="bob", left_s=HOUR, waited_s=190 * HOUR),
        snapshots.waiting("new", seq=2, owner="ann", left_s=HOUR),
    ]
    used_s = {("default", "ann"): 20 * HOUR, ("default", "bob"): 18 * HOUR}
    factors = Factors(snapshots.snapshot(jobs, (), {"n": 8.0}, used_s=used_s), NOW)
    standings = [
        next(each.message for each in factors.of(job_id) if each.name == "standing")
        for job_id in ("older", "old", "new")
    ]
    about = "its owner has used about their share"
    forgiven = "waited for 190 h, so it ranks as if its owner had used less than their share"
    assert standings == [forgiven, about, about]
    assert factors.ahead("new", 2)[0].message == f"{forgiven}; this job: {about}"
    assert factors.ahead("new", 2)[1].decided_by == "overdue"
