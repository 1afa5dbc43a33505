"""Limits of queues are never exceeded, and are explained. A job that is blocked by a limit does not
reserve slots."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.slots import amounts
from service.domain.scheduling.policy import (
    Decision,
    Grow,
    Growing,
    Holder,
    Node,
    Request,
    Snapshot,
    Start,
    Stay,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.limits import why_never
from service.domain.scheduling.rules.queues import Queue

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CPU = {"CPU": 1.0}
BIG = Node("n", {"CPU": 100.0}, {"CPU": 100.0})


def job(
    name: str,
    workers: int = 1,
    *,
    seq: int = 0,
    queue: str = "night",
    owner: str = "ann",
    held: str | None = None,
    rank: int = 0,
    priority: int = 50,
    least: int | None = None,
) -> WaitingJob:
    request = Request(workers, CPU, least)
    return WaitingJob(
        name, 0, priority, seq, request, queue=queue, owner=owner, held=held, place=rank
    )


def holder(name: str, workers: int, owner: str = "ann", queue: str = "night") -> Holder:
    return Holder(name, (Slice("n", workers),), CPU, queue, owner)


def decide(
    *jobs: WaitingJob,
    queues: Sequence[Queue],
    holders: Sequence[Holder] = (),
    node: Node = BIG,
    growing: Sequence[Growing] = (),
) -> list[Decision]:
    used = sum(part.num_workers for h in holders for part in h.slices)
    free = Node(node.id, node.total, {"CPU": node.available_to_us["CPU"] - used})
    snapshot = Snapshot(
        jobs, (free,), True, tuple(holders), growing=tuple(growing), queues=tuple(queues)
    )
    return plan(snapshot, NOW)


def wait(decision: Decision) -> tuple[str, str]:
    assert isinstance(decision, Wait)
    return decision.reason.code, decision.reason.message


def started(decisions: Sequence[Decision]) -> list[str]:
    return [d.job_id for d in decisions if isinstance(d, Start)]


def test_a_limit_of_the_queue_is_told_with_what_it_holds() -> None:
    night = Queue("night", limit={"CPU": 8.0})
    (decision,) = decide(job("a", 2), queues=[night], holders=[holder("r", 7)])
    assert wait(decision) == (
        "queue_limit",
        "needs 2 workers of 1 CPU; the queue 'night' holds 7 CPU, and its limit is 8 CPU",
    )
    assert isinstance(decision, Wait)
    assert decision.blocked_by == ("r",)


def test_a_limit_of_a_user_keeps_back_that_user_alone() -> None:
    night = Queue("night", user_limit={"CPU": 2.0})
    decisions = decide(
        job("a", 2, seq=1),
        job("b", 2, seq=2, owner="bob"),
        queues=[night],
        holders=[holder("r", 1)],
    )
    assert wait(decisions[0]) == (
        "user_limit",
        "needs 2 workers of 1 CPU; "
        "ann holds 1 CPU in the queue 'night', and its limit for a user is 2 CPU",
    )
    assert started(decisions) == ["b"]


@pytest.mark.parametrize(
    "night",
    [
        Queue("night", limit={"CPU": 4.0}),
        Queue("night", user_limit={"CPU": 4.0}),
        Queue("night", limit={"CPU": 4.0}, max_running=1),
    ],
)
def test_a_job_that_a_lowered_limit_never_allows_reserves_nothing(night: Queue) -> None:
    decisions = decide(job("a", 8, seq=1), job("b", 4, seq=2), queues=[night])
    assert started(decisions) == ["b"]
    assert wait(decisions[0])[0] in ("queue_limit", "user_limit")


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        (Queue("night", max_running=1), "the queue 'night' runs 1 job, and its limit is 1"),
        (
            Queue("night", max_running_per_user=1),
            "ann runs 1 job in the queue 'night', and its limit for a user is 1",
        ),
    ],
)
def test_so_many_jobs_run_and_no_more(queue: Queue, message: str) -> None:
    (decision,) = decide(job("a"), queues=[queue], holders=[holder("r", 3)])
    assert wait(decision)[1] == f"needs 1 worker of 1 CPU; {message}"
    others = decide(job("a", seq=1), job("b", seq=2), queues=[queue])
    assert started(others) == ["a"]


def test_a_job_that_waits_under_a_limit_reserves_nothing_of_the_cluster() -> None:
    small = Node("n", {"CPU": 4.0}, {"CPU": 4.0})
    queues = [Queue("night", max_running=0), Queue("default")]
    last = job("b", 4, seq=2, queue="default")
    decisions = decide(job("a", 4, seq=1), last, queues=queues, node=small)
    assert started(decisions) == ["b"]


def test_later_jobs_do_not_take_the_headroom_that_an_earlier_job_waits_for() -> None:
    night = Queue("night", limit={"CPU": 8.0})
    ahead, behind = decide(
        job("a", 4, seq=1), job("b", 1, seq=2), queues=[night], holders=[holder("r", 6)]
    )
    assert wait(ahead)[0] == "queue_limit"
    assert wait(behind) == (
        "queue_limit",
        "needs 1 worker of 1 CPU; the queue 'night' holds 6 CPU, and its limit is 8 CPU; "
        "jobs ahead are also waiting",
    )


def test_an_elastic_job_starts_and_grows_up_to_the_limit() -> None:
    night = Queue("night", limit={"CPU": 3.0})
    (decision,) = decide(job("a", 8, least=1), queues=[night])
    assert decision == Start("a", (Slice("n", 3),))
    group = Growing("g", 1, 50, 1, Request(8, CPU, 1), (Slice("n", 2),), 0, "night", "ann")
    (grown,) = decide(queues=[night], holders=[holder("g", 2)], growing=[group])
    assert grown == Grow("g", (Slice("n", 1),))
    (stays,) = decide(queues=[Queue("night", limit={"CPU": 2.0})], holders=[holder("g", 2)],
                      growing=[group])  # fmt: skip
    assert isinstance(stays, Stay)
    assert stays.reason.code == "queue_limit"
    assert stays.reason.message.startswith("could grow by 6 workers of 1 CPU; the queue 'night'")


def test_the_headroom_for_the_missing_workers_of_a_group_stays_its_own() -> None:
    night = Queue("night", limit={"CPU": 4.0})
    group = Growing("g", 1, 50, 1, Request(4, CPU), (Slice("n", 3),), 1, "night", "ann")
    decisions = decide(job("a"), queues=[night], holders=[holder("g", 3)], growing=[group])
    assert wait(decisions[0])[0] == "queue_limit"
    assert decisions[1] == Grow("g", (Slice("n", 1),))


def test_a_held_job_waits_without_a_position_and_reserves_nothing() -> None:
    small = Node("n", {"CPU": 2.0}, {"CPU": 2.0})
    jobs = (job("a", 2, seq=1, held="bob"), job("b", 2, seq=2), job("c", 2, seq=3))
    decisions = decide(*jobs, queues=[Queue("night")], node=small)
    assert [d.job_id for d in decisions] == ["b", "c", "a"]
    assert started(decisions) == ["b"]
    assert isinstance(decisions[1], Wait)
    assert isinstance(decisions[2], Wait)
    assert (decisions[1].position, decisions[2].position) == (1, None)
    assert wait(decisions[2]) == ("held", "is held by bob; `dray release a` releases it")


def test_a_held_job_says_so_also_while_the_cluster_is_away() -> None:
    jobs = (job("a", held="bob"), job("b"))
    decisions = plan(Snapshot(jobs, (), connected=False), NOW)
    assert [wait(d)[0] for d in decisions] == ["cluster_unavailable", "held"]


def test_a_job_that_was_moved_to_the_front_goes_before_others_of_its_priority() -> None:
    small = Node("n", {"CPU": 2.0}, {"CPU": 2.0})
    jobs = (job("a", seq=1), job("b", seq=2, rank=-1), job("c", seq=3, priority=60))
    assert started(decide(*jobs, queues=[Queue("night")], node=small)) == ["c", "b"]


def test_a_job_at_the_front_of_its_queue_passes_no_job_of_another() -> None:
    one = Node("n", {"CPU": 1.0}, {"CPU": 1.0})
    queues = [Queue("night"), Queue("day")]
    jobs = (job("d", seq=1, queue="day"), job("a", seq=2), job("b", seq=3, rank=-1))
    in_order = [decision.job_id for decision in decide(*jobs, queues=queues, node=one)]
    assert in_order == ["d", "b", "a"]
    first = (job("a", seq=1), job("d", seq=2, queue="day"), job("b", seq=3, rank=-1))
    in_order = [decision.job_id for decision in decide(*first, queues=queues, node=one)]
    assert in_order == ["b", "a", "d"], "it takes the place of the first of its queue"


def test_the_last_that_was_moved_to_the_front_is_the_first() -> None:
    one = Node("n", {"CPU": 1.0}, {"CPU": 1.0})
    jobs = (job("a", seq=1), job("b", seq=2, rank=-1), job("c", seq=3, rank=-2))
    in_order = [d.job_id for d in decide(*jobs, queues=[Queue("night")], node=one)]
    assert in_order == ["c", "b", "a"]


def test_the_older_of_two_jobs_at_one_position_goes_first_in_whatever_order_they_are_read() -> None:
    one = Node("n", {"CPU": 1.0}, {"CPU": 1.0})
    jobs = [job("a", seq=1), job("b", seq=2, rank=-1), job("c", seq=3, rank=-1)]
    for each in permutations(jobs):
        in_order = [d.job_id for d in decide(*each, queues=[Queue("night")], node=one)]
        assert in_order == ["b", "c", "a"]


def test_a_job_at_the_front_passes_for_no_job_that_can_not_start() -> None:
    one = Node("n", {"CPU": 1.0}, {"CPU": 1.0})
    queues = [Queue("night"), Queue("day")]
    jobs = (job("a", seq=1, held="ann"), job("d", seq=2, queue="day"), job("b", seq=3, rank=-1))
    in_order = [decision.job_id for decision in decide(*jobs, queues=queues, node=one)]
    assert in_order == ["d", "b", "a"]


def test_a_queue_without_a_row_has_no_limits() -> None:
    assert started(decide(job("a", queue="older"), queues=[])) == ["a"]


def test_accelerators_count_by_the_worker() -> None:
    held = amounts({"CPU": 2.0, "accelerator_type:H100": 0.001}, 3)
    assert held == {"CPU": 6.0, "accelerator_type:H100": 3.0}


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        (Queue("q", limit={"CPU": 3.0}), "the queue 'q' has a limit of 3 CPU"),
        (Queue("q", user_limit={"CPU": 3.0}), "the queue 'q' allows a user at most 3 CPU"),
    ],
)
def test_a_job_that_a_limit_never_allows_is_told(queue: Queue, said: str) -> None:
    assert why_never(queue, Request(4, CPU)) == f"needs 4 workers of 1 CPU, but {said}"
    assert why_never(queue, Request(4, CPU, 3)) is None


def _maybe(values: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.none() | values


NAMES = st.sampled_from(["q1", "q2"])
OWNERS = st.sampled_from(["ann", "bob"])


@st.composite
def situations(draw: st.DrawFn) -> Snapshot:
    queues = tuple(
        Queue(
            name,
            limit={} if draw(st.booleans()) else {"CPU": float(draw(st.integers(0, 12)))},
            user_limit={} if draw(st.booleans()) else {"CPU": float(draw(st.integers(0, 8)))},
            max_running=draw(_maybe(st.integers(0, 4))),
            max_running_per_user=draw(_maybe(st.integers(0, 3))),
        )
        for name in ("q1", "q2")
    )
    jobs = []
    for seq in range(draw(st.integers(0, 8))):
        most = draw(st.integers(1, 6))
        least = draw(_maybe(st.integers(1, most)))
        held = draw(st.sampled_from([None, None, None, "bob"]))
        jobs.append(
            job(
                f"j{seq}",
                most,
                least=least,
                seq=seq,
                queue=draw(NAMES),
                owner=draw(OWNERS),
                held=held,
                priority=draw(st.integers(0, 2)),
            )
        )
    holders, growing = [], []
    for number in range(draw(st.integers(0, 3))):
        has, queue, owner = draw(st.integers(1, 3)), draw(NAMES), draw(OWNERS)
        name = f"h{number}"
        holders.append(holder(name, has, owner, queue))
        if draw(st.booleans()):
            slices = (Slice("n", has),)
            growing.append(
                Growing(name, 1, 50, number, Request(6, CPU, 1), slices, 0, queue, owner)
            )
    used = sum(part.num_workers for h in holders for part in h.slices)
    node = Node("n", {"CPU": 30.0}, {"CPU": 30.0 - used})
    return Snapshot(
        tuple(jobs), (node,), True, tuple(holders), growing=tuple(growing), queues=queues
    )


Member = tuple[str, str, str, int]
"""Job, queue, owner, and number of workers."""


def running(snapshot: Snapshot) -> list[Member]:
    return [
        (h.job_id, h.queue, h.owner, sum(p.num_workers for p in h.slices)) for h in snapshot.holders
    ]


def after(snapshot: Snapshot, decisions: Sequence[Decision]) -> list[Member]:
    """Return all jobs that hold slots after the plan is applied."""
    there: list[WaitingJob | Growing] = [*snapshot.queue, *snapshot.growing]
    known = {job.job_id: (job.queue, job.owner) for job in there}
    given = [
        (d.job_id, *known[d.job_id], sum(p.num_workers for p in d.slices))
        for d in decisions
        if isinstance(d, Start | Grow)
    ]
    return [*running(snapshot), *given]


def over(members: Sequence[Member], queue: Queue) -> dict[str, float]:
    """Return the amount by which the members exceed each limit."""
    inside = [m for m in members if m[1] == queue.name]
    users = {m[2]: [n for n in inside if n[2] == m[2]] for m in inside}
    found: dict[str, float] = {}

    def measure(
        name: str, these: Sequence[Member], most: float | None, running: int | None
    ) -> None:
        held, jobs = sum(m[3] for m in these), len({m[0] for m in these})
        found[f"{name} CPU"] = max(0.0, held - most) if most is not None else 0.0
        found[f"{name} jobs"] = max(0, jobs - running) if running is not None else 0

    measure("queue", inside, queue.limit.get("CPU"), queue.max_running)
    for user, these in users.items():
        measure(user, these, queue.user_limit.get("CPU"), queue.max_running_per_user)
    return found


@given(situations())
def test_no_plan_exceeds_a_limit_that_was_not_exceeded_before(snapshot: Snapshot) -> None:
    decisions = plan(snapshot, NOW)
    for queue in snapshot.queues:
        before = over(running(snapshot), queue)
        for name, excess in over(after(snapshot, decisions), queue).items():
            assert excess <= before.get(name, 0.0), name


@given(situations())
def test_every_job_gets_one_decision_and_a_held_one_never_starts(snapshot: Snapshot) -> None:
    decisions = plan(snapshot, NOW)
    of_jobs = [d for d in decisions if not isinstance(d, Grow | Stay)]
    assert sorted(d.job_id for d in of_jobs) == sorted(j.job_id for j in snapshot.queue)
    held = {j.job_id for j in snapshot.queue if j.held is not None}
    assert not held & set(started(decisions))
    for decision in of_jobs:
        assert (isinstance(decision, Wait) and decision.reason.code == "held") == (
            decision.job_id in held
        )


@given(situations())
def test_a_plan_is_the_same_without_the_held_jobs(snapshot: Snapshot) -> None:
    free = tuple(j for j in snapshot.queue if j.held is None)
    without = Snapshot(
        *(free, snapshot.nodes, True, snapshot.holders),
        growing=snapshot.growing,
        queues=snapshot.queues,
    )
    decisions = [
        d for d in plan(snapshot, NOW) if not (isinstance(d, Wait) and d.reason.code == "held")
    ]
    assert decisions == plan(without, NOW)


@given(situations())
def test_a_queue_in_which_nothing_may_run_delays_nobody_elsewhere(snapshot: Snapshot) -> None:
    closed = (Queue("q1", max_running=0), *snapshot.queues[1:])
    elsewhere = tuple(j for j in snapshot.queue if j.queue != "q1")
    alone = Snapshot(elsewhere, snapshot.nodes, True, snapshot.holders, queues=closed)
    beside = Snapshot(snapshot.queue, snapshot.nodes, True, snapshot.holders, queues=closed)
    assert started(plan(beside, NOW)) == started(plan(alone, NOW))
