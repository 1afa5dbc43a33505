"""Queues get their quotas and weighted shares, and users their shares, including over a simulated
month."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from service.domain.scheduling.policy import Preempt, RunningJob, Snapshot, Start, WaitingJob, plan
from service.domain.scheduling.rules.dependencies import ArrayLimit
from service.domain.scheduling.rules.eviction import MIN_RUN_S
from service.domain.scheduling.rules.order import LONGEST_WAIT_S
from service.domain.scheduling.rules.queues import Queue
from service.domain.scheduling.rules.shares import (
    HALF_LIFE_S,
    LEAST_USER_SLACK_S,
    QUEUE_SLACK_S,
    USER_SLACK_S,
    Standings,
    Used,
    UserStanding,
)
from tests.marks import SOAK
from tests.unit.service.domain.scheduling import snapshots
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW

GPUS = 8
DAY = 24 * HOUR


def waiting(
    name: str, queue: str, owner: str = "ann", *, gpus: int = 1, seq: int = 0
) -> WaitingJob:
    return snapshots.waiting(name, gpus, queue=queue, owner=owner, seq=seq)


def running(
    name: str, queue: str, owner: str = "ann", *, gpus: int = 1, yields: bool = True
) -> RunningJob:
    return snapshots.running(name, {"n": gpus}, queue=queue, owner=owner, yields=yields, seq=0)


def snapshot(
    queue: Sequence[WaitingJob], there: Sequence[RunningJob], queues: Sequence[Queue], used: Used
) -> Snapshot:
    used_s = used.seconds(NOW.timestamp())
    return snapshots.snapshot(queue, there, {"n": GPUS}, queues=tuple(queues), used_s=used_s)


def leaving(seen: Snapshot) -> dict[str, str]:
    """Return the jobs that are asked to leave, and why the new job ranks higher."""
    return {
        decision.job_id: decision.reason.message.split(", ")[1]
        for decision in plan(seen, NOW)
        if isinstance(decision, Preempt)
    }


def test_borrowed_slots_go_back_to_the_queue_whose_quota_they_are() -> None:
    queues = [Queue("own", quota={"GPU": 4.0}), Queue("other")]
    there = [running("borrows", "other", gpus=8, yields=False)]
    job = waiting("mine", "own", gpus=4)
    seen = snapshot([job], there, queues, Used())
    assert leaving(seen) == {"borrows": "which is within its queue's quota"}
    seen = snapshot([waiting("mine", "own", gpus=5)], there, queues, Used())
    assert leaving(seen) == {}, "that is more than the quota, and the script would lose its work"
    there = [running("a", "own", gpus=4), *there[:0], running("b", "other", gpus=4, yields=False)]
    seen = snapshot([waiting("more", "own", gpus=1)], there, queues, Used())
    assert "b" not in leaving(seen), "the quota is in use"


@pytest.mark.parametrize("limit", [{"user_limit": {"GPU": 1.0}}, {"max_running_per_user": 1}])
def test_jobs_that_a_limit_keeps_back_use_up_no_quota(limit: dict[str, Any]) -> None:
    queues = [Queue("own", quota={"GPU": 4.0}, **limit), Queue("other")]
    there = [running("a0", "own"), running("borrows", "other", gpus=7, yields=False)]
    queue = [
        *(waiting(f"a{n}", "own", seq=n) for n in range(1, 5)),
        waiting("b", "own", "bob", seq=9),
    ]
    assert leaving(snapshot(queue, there, queues, Used())) == {
        "borrows": "which is within its queue's quota"
    }


def test_what_runs_within_a_quota_is_not_pushed_out_by_the_work_of_others() -> None:
    queues = [Queue("own", quota={"GPU": 8.0}), Queue("other")]
    there = [running("mine", "own", gpus=8)]
    assert leaving(snapshot([waiting("new", "other")], there, queues, Used())) == {}
    assert leaving(snapshot([waiting("new", "other")], there, queues[1:], Used())) == {
        "mine": "which comes first until its duration is known"
    }


@pytest.mark.parametrize(
    ("queue", "owner", "slack_s", "why"),
    [
        ("two", "ann", QUEUE_SLACK_S, "because this job's queue has used more than its share"),
        ("one", "bob", USER_SLACK_S, "because this job's user has used more than their share"),
    ],
)
def test_a_queue_or_user_that_has_used_more_than_its_share_makes_room(
    queue: str, owner: str, slack_s: float, why: str
) -> None:
    used = Used()
    used.add(("one", "ann"), 4.1 * slack_s, NOW.timestamp())
    there = [running("greedy", "one", gpus=8)]
    # With the same remaining work, so that it does not rank higher because of its work.
    job = dataclasses.replace(waiting("new", queue, owner, gpus=8), left_s=HOUR)
    found = leaving(snapshot([job], there, [Queue("one"), Queue("two")], used))
    assert list(found) == ["greedy"]
    assert found["greedy"] == why
    used = Used()
    used.add(("one", "ann"), 3.9 * slack_s, NOW.timestamp())
    assert leaving(snapshot([job], there, [Queue("one"), Queue("two")], used)) == {}


@pytest.mark.parametrize(("weight", "is_ahead"), [(1.0, True), (1.3, True), (2.5, False)])
def test_a_user_is_ahead_by_the_weight_in_its_queue(weight: float, is_ahead: bool) -> None:
    used = Used()
    used.add(("one", "ann"), 9 * USER_SLACK_S, NOW.timestamp())
    used.add(("one", "bob"), 3 * USER_SLACK_S, NOW.timestamp())
    there = [running("greedy", "one", gpus=8)]
    job = dataclasses.replace(waiting("new", "one", "bob", gpus=8), left_s=HOUR)
    seen = snapshot([job], there, [Queue("one", user_weights={"ann": weight})], used)
    why = "because this job's user has used more than their share"
    assert leaving(seen) == ({"greedy": why} if is_ahead else {})


@pytest.mark.parametrize(
    ("weight", "ann_s", "bob_s", "ahead"),
    [
        (1 / 9, 2.0 * HOUR, 9 * HOUR, set()),
        (1 / 9, 2.2 * HOUR, 9 * HOUR, {"ann"}),
        (1 / 9, HOUR, 18 * HOUR, set()),
        (1 / 9, HOUR, 20 * HOUR, {"bob"}),
        (1e-6, 0.9 * LEAST_USER_SLACK_S, 9 * HOUR, set()),
        (1e-6, 1.1 * LEAST_USER_SLACK_S, 9 * HOUR, {"ann"}),
    ],
)
def test_beside_a_user_of_little_weight_less_is_clearly_more_than_a_share(
    weight: float, ann_s: float, bob_s: float, ahead: set[str]
) -> None:
    used = {("q", "ann"): ann_s, ("q", "bob"): bob_s}
    standings = Standings([Queue("q", user_weights={"ann": weight})], used, used)
    of_users = {owner: standings.user("q", owner) for owner in ("ann", "bob")}
    assert {owner for owner, of in of_users.items() if of is UserStanding.AHEAD} == ahead
    behind = {owner for owner, of in of_users.items() if of is UserStanding.BEHIND}
    assert behind == ({"ann", "bob"} - ahead if ahead else set()), "what one has more, one has less"


def test_within_a_queue_that_is_ahead_by_less_than_twice_the_margin_priorities_hold() -> None:
    used = Used()
    used.add(("one", "ann"), 3 * QUEUE_SLACK_S, NOW.timestamp())
    low = dataclasses.replace(running("low", "one", gpus=GPUS - 1), priority=10)
    there = [low, running("other", "two", "bob")]
    high = dataclasses.replace(waiting("high", "one", gpus=GPUS - 1), priority=90)
    found = leaving(snapshot([high], there, [Queue("one"), Queue("two")], used))
    assert found == {"low": "which has a higher priority"}


def test_a_queue_whose_jobs_are_all_held_does_not_count_among_the_others() -> None:
    used = Used()
    for queue, seconds in (("one", 10.5), ("two", 6.0)):
        used.add((queue, "ann"), seconds * QUEUE_SLACK_S, NOW.timestamp())
    queues = [Queue("one"), Queue("two"), Queue("three")]
    there = [running("greedy", "one", gpus=8)]
    job = dataclasses.replace(waiting("new", "two", gpus=8), left_s=HOUR)
    held = dataclasses.replace(waiting("held", "three"), held="ann")
    found = leaving(snapshot([job, held], there, queues, used))
    assert found == {"greedy": "because this job's queue has used more than its share"}


def test_half_of_the_use_is_forgotten_each_half_life() -> None:
    used = Used()
    used.add(("q", "ann"), 100.0, 1e9)
    used.add(("q", "ann"), 100.0, 1e9 - HALF_LIFE_S)
    assert used.seconds(1e9) == {("q", "ann"): 150.0}
    assert used.seconds(1e9 + 2 * HALF_LIFE_S) == {("q", "ann"): pytest.approx(37.5)}


@SOAK
def test_over_a_month_queues_and_users_get_their_weights() -> None:
    """Three queues with two users each that always have work. Jobs take 2 to 9 hours, and the jobs
    of one user three times as long."""
    queues = [
        Queue("a", weight=2.0, user_weights={"ann": 3.0}),
        Queue("b"),
        Queue("c", user_weights={"ann": 0.25, "carol": 7.0}),
    ]
    shares = {("a", "ann"): 0.75, ("b", "ann"): 0.5, ("c", "ann"): 0.2}
    users = [(queue.name, owner) for queue in queues for owner in ("ann", "bob")]
    step_s, at = 900.0, NOW.timestamp()
    numbers = itertools.count(1)
    used, got = Used(), Counter[tuple[str, str]]()
    jobs: dict[str, WaitingJob] = {}
    left_s: dict[str, float] = {}
    held: dict[str, float] = {}
    for _ in range(int(30 * DAY / step_s)):
        for name, owner in users:
            mine = [j for j in jobs.values() if (j.queue, j.owner) == (name, owner)]
            for _ in range(GPUS + 2 - len(mine)):
                seq = next(numbers)
                job = waiting(f"j{seq}", name, owner, seq=seq)
                jobs[job.job_id] = job
                left_s[job.job_id] = (2 + seq % 2) * HOUR * (3 if owner == "bob" else 1)
        there = [
            dataclasses.replace(
                running(name, jobs[name].queue, jobs[name].owner),
                held_s=held[name],
                left_s=left_s[name],
                seq=jobs[name].seq,
            )
            for name in held
        ]
        queue_now = [
            dataclasses.replace(job, left_s=left_s[name])
            for name, job in jobs.items()
            if name not in held
        ]
        for decision in plan(snapshot_at(queue_now, there, queues, used, at), NOW):
            if isinstance(decision, Start):
                held[decision.job_id] = 0.0
            elif isinstance(decision, Preempt):
                del held[decision.job_id]
        for name in list(held):
            account = jobs[name].queue, jobs[name].owner
            used.add(account, step_s / GPUS, at)
            got[account] += 1
            held[name] += step_s
            left_s[name] -= step_s
            if left_s[name] <= 0:
                del held[name], left_s[name], jobs[name]
        at += step_s
    whole = sum(got.values())
    for queue in queues:
        part = sum(number for (name, _), number in got.items() if name == queue.name)
        assert part / whole == pytest.approx(queue.weight / 4, rel=0.05)
        of_ann = shares[queue.name, "ann"]
        assert got[queue.name, "ann"] / part == pytest.approx(of_ann, rel=0.05)
        assert got[queue.name, "bob"] / part == pytest.approx(1 - of_ann, rel=0.05)


def snapshot_at(
    queue: Sequence[WaitingJob],
    there: Sequence[RunningJob],
    queues: Sequence[Queue],
    used: Used,
    at: float,
) -> Snapshot:
    return dataclasses.replace(snapshot(queue, there, queues, Used()), used_s=used.seconds(at))


def test_a_gang_of_half_the_cluster_does_not_starve_under_a_flood_of_small_jobs() -> None:
    step_s, flood = 300.0, itertools.count()
    left_s, waited_s, held_s = 20 * HOUR, 0.0, 0.0
    is_running = False
    small: list[RunningJob] = []
    for _ in range(int(3 * DAY / step_s)):
        gang = dataclasses.replace(waiting("gang", "q", gpus=GPUS // 2), waited_s=waited_s)
        gang = dataclasses.replace(gang, left_s=left_s)
        there = list(small)
        if is_running:
            job = running("gang", "q", gpus=GPUS // 2)
            job = dataclasses.replace(job, held_s=held_s, left_s=left_s, waited_s=waited_s)
            there.append(job)
        new = [waiting(f"s{next(flood)}", "q", seq=1) for _ in range(GPUS)]
        queue = new if is_running else [gang, *new]
        for decision in plan(snapshot(queue, there, [Queue("q")], Used()), NOW):
            if isinstance(decision, Preempt):
                small = [job for job in small if job.job_id != decision.job_id]
                if decision.job_id == "gang":
                    is_running = False
            elif isinstance(decision, Start) and decision.job_id == "gang":
                is_running, held_s = True, 0.0
            elif isinstance(decision, Start):
                small.append(dataclasses.replace(running(decision.job_id, "q"), held_s=0.0))
        small = [dataclasses.replace(job, held_s=job.held_s + step_s) for job in small]
        small = [job for job in small if job.held_s < 0.5 * HOUR]
        if not is_running:
            waited_s += step_s
            continue
        held_s += step_s
        left_s -= step_s
        if left_s <= 0:
            break
    assert left_s <= 0
    assert HOUR < waited_s <= LONGEST_WAIT_S + MIN_RUN_S + 2 * step_s


def test_a_quota_is_not_used_up_by_jobs_that_could_not_start() -> None:
    queues = [Queue("own", quota={"GPU": 8.0}), Queue("other")]
    there = [running("borrows", "other", gpus=8, yields=False)]
    array = ArrayLimit("array", 1)
    for blocked in (
        [dataclasses.replace(waiting("held", "own", gpus=8), held="ann")],
        [dataclasses.replace(waiting("builds", "own", gpus=8), preparing="host builds it")],
        [dataclasses.replace(waiting(f"a{n}", "own"), array=array) for n in range(8)],
    ):
        mine = waiting("mine", "own", gpus=4, seq=9)
        decisions = plan(snapshot([*blocked, mine], there, queues, Used()), NOW)
        assert [d.job_id for d in decisions if isinstance(d, Preempt)] == ["borrows"]
    low = dataclasses.replace(running("low", "own", gpus=8), priority=10)
    high = dataclasses.replace(waiting("high", "own", gpus=8), priority=90)
    assert leaving(snapshot([high], [low], queues, Used())) == {
        "low": "which is within its queue's quota"
    }


@pytest.mark.parametrize(("waited_s", "first"), [(0.0, "ann"), (8 * DAY, "bob")])
def test_usage_is_forgiven_unless_earlier_forgiven_jobs_hold_a_twentieth(
    waited_s: float, first: str
) -> None:
    used = Used()
    used.add(("q", "ann"), 90 * DAY, NOW.timestamp())
    old = dataclasses.replace(waiting("ann", "q", "ann", seq=5), waited_s=8 * DAY, yields=False)
    new = dataclasses.replace(waiting("bob", "q", "bob", seq=9), yields=False)
    earlier = running("earlier", "q", "cid", gpus=GPUS - 1, yields=False)
    there = [dataclasses.replace(earlier, waited_s=waited_s)]
    decisions = plan(snapshot([old, new], there, [Queue("q")], used), NOW)
    assert [d.job_id for d in decisions if isinstance(d, Start)] == [first]


@pytest.mark.parametrize("queue", ["a", "b"])
def test_a_user_who_is_ahead_makes_room_only_for_users_of_the_same_queue(queue: str) -> None:
    """The users of the other queue have their own shares."""
    there = [running("x", "a"), running("y", "a", "bob", yields=False, gpus=3)]
    there.append(running("z", "b", "dan", yields=False, gpus=4))
    new = dataclasses.replace(waiting("new", queue, "bob" if queue == "a" else "cat"), left_s=HOUR)
    used = {("a", "ann"): 10 * HOUR, ("b", "dan"): 10 * HOUR}
    seen = snapshots.snapshot([new], there, {"n": GPUS}, used_s=used)
    assert leaving(seen).keys() == ({"x"} if queue == "a" else set())


@pytest.mark.parametrize(("hours_of_b", "leaves"), [(8.5, False), (9.5, True)])
def test_a_queue_that_is_far_ahead_takes_slots_only_from_such_queues(
    hours_of_b: float, leaves: bool
) -> None:
    """If b is ahead by less than twice the margin, it would soon take its slots back."""
    there = [running("x", "b"), running("y", "c", yields=False, gpus=7)]
    there[0] = dataclasses.replace(there[0], left_s=30 * HOUR)
    new = dataclasses.replace(waiting("new", "a"), left_s=HOUR)
    used = {("a", "ann"): 10 * HOUR, ("b", "ann"): hours_of_b * HOUR, ("c", "ann"): 2.5 * HOUR}
    seen = snapshots.snapshot([new], there, {"n": GPUS}, used_s=used)
    assert leaving(seen).keys() == ({"x"} if leaves else set())
