"""A tree of queues: which job may start, whose turn it is, and what may be reclaimed, against a
slow oracle; and the shares of each level over a simulated time."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ray_workers.shared.slices import Slice
from service.domain.scheduling.outlook.factors import Factors
from service.domain.scheduling.placement.gangs import Gangs
from service.domain.scheduling.placement.slots import Request
from service.domain.scheduling.policy import Preempt, Snapshot, Start, Wait, WaitingJob, plan
from service.domain.scheduling.policy.ordering import in_order
from service.domain.scheduling.rules.lending import Lending
from service.domain.scheduling.rules.queues import Queue
from service.domain.scheduling.rules.shares import Standings, Tier, Used
from service.domain.scheduling.rules.tree import QueueTree
from tests.unit.service.domain.scheduling import snapshots
from tests.unit.service.domain.scheduling.rules.trees import TreeOracle, snapshot_of, tree_of
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW

FOR_SLOTS = ("waiting_for_slots", "lending_limit")


def test_a_job_starts_if_no_queue_above_it_forbids_it() -> None:
    seen = set()
    for seed in range(300):
        draw = random.Random(seed)
        snapshot = snapshot_of(draw, tree_of(draw), 1)
        snapshot = replace(
            snapshot, running=tuple(replace(job, held_s=0.0) for job in snapshot.running)
        )
        oracle, (job,) = TreeOracle(snapshot), snapshot.queue
        (decision,) = (each for each in plan(snapshot, NOW) if each.job_id == job.job_id)
        binding = oracle.binding(job, snapshot.running)
        free = snapshot.nodes[0].available_to_us["GPU"]
        code = decision.reason.code if isinstance(decision, Wait) else "starts"
        seen.add(code)
        if binding is not None:
            assert isinstance(decision, Wait)
            assert code == "queue_limit"
            assert f"the queue {binding!r}" in decision.reason.message
        elif free < 1:
            assert code == "waiting_for_slots"
        elif oracle.lendable(job, snapshot.running) < 1 and not oracle.is_within_quota(job):
            assert code == "lending_limit"
        else:
            assert isinstance(decision, Start), (seed, decision)
    assert seen == {"queue_limit", "waiting_for_slots", "lending_limit", "starts"}


def test_what_may_be_borrowed_changes_with_each_job() -> None:
    kind, slot = Gangs({}).of(Request(1, {"GPU": 1.0})).kind, (Slice("n", 1),)
    lent = 0
    for seed in range(100):
        draw = random.Random(seed)
        snapshot = snapshot_of(draw, tree_of(draw), 8)
        oracle, (holding, coming) = TreeOracle(snapshot), ([*snapshot.running], snapshot.queue)
        lending = Lending(QueueTree(snapshot.queues), snapshot.nodes, snapshot.holders)
        for job in coming:
            if holding and draw.random() < 0.4:
                gone = holding.pop(draw.randrange(len(holding)))
                lending.leave(gone.queue, kind, slot)
            else:
                holding.append(job)
                lending.take(job.queue, kind, slot)
            trial = lending.trial()
            trial.leave(job.queue, kind, slot, -1)
            for name in {each.queue for each in coming}:
                asks = replace(coming[0], queue=name)
                found = lending.workers(name, kind, soon=True)
                assert found is None or found[0] == max(0, oracle.lendable(asks, holding)), seed
                then = trial.workers(name, kind, soon=True)
                assert then is None or then[0] == max(0, oracle.lendable(asks, [*holding, job]))
                lent += found is not None
    assert lent > 100


@pytest.mark.parametrize("part", range(4))
def test_it_is_the_turn_of_the_job_that_the_recursion_names(part: int) -> None:
    for seed in range(60 * part, 60 * (part + 1)):
        draw = random.Random(seed)
        queues = tree_of(draw)
        snapshot = snapshot_of(draw, queues, 6)
        oracle = TreeOracle(snapshot)
        order = in_order(snapshot, NOW, lambda job_id, error: None)
        jobs = [snapshot.queue[at] for at in order.queue]
        for first, second in itertools.pairwise(jobs):
            assert oracle.is_before(first, second), (seed, first.job_id, second.job_id)


@pytest.mark.parametrize("part", range(4))
def test_only_slots_that_the_rules_allow_are_reclaimed(part: int) -> None:
    preempted = 0
    for seed in range(80 * part, 80 * (part + 1)):
        draw = random.Random(seed)
        snapshot = snapshot_of(draw, tree_of(draw), 4)
        oracle = TreeOracle(snapshot)
        decisions = plan(snapshot, NOW)
        jobs = {job.job_id: job for job in snapshot.queue}
        running = {job.job_id: job for job in snapshot.running}
        asked = [each for each in decisions if isinstance(each, Preempt)]
        preempted += len(asked)
        for each in asked:
            assert oracle.may_take(jobs[each.because_of], running[each.job_id]), (seed, each)
        starts = [jobs[each.job_id] for each in decisions if isinstance(each, Start)]
        holding = [*snapshot.running, *starts]
        for job in starts:
            for name in oracle.line(job.queue):
                assert len(oracle.jobs(name, holding)) <= min(oracle.limits(name))
            assert oracle.lendable(job, holding) >= 0 or oracle.is_within_quota(job)
        promised = [
            jobs[each.job_id]
            for each in decisions
            if isinstance(each, Wait) and each.reason.code == "room_is_made"
        ]
        if not any(queue.lending_limit for queue in snapshot.queues):
            assert len(asked) <= len(promised)
        leaving = {each.job_id for each in asked}
        for each in decisions:
            if isinstance(each, Wait) and each.reason.code in FOR_SLOTS:
                left = [job for job in snapshot.running if job.job_id not in leaving]
                could = [job for job in left if oracle.may_take(jobs[each.job_id], job)]
                after = [*left, *starts, *promised]
                for one in could:
                    rest = [job for job in after if job is not one]
                    assert oracle.lendable(jobs[each.job_id], rest) < 1, (seed, each, one.job_id)
                if each.reserved:  # what later jobs could free is reserved
                    break
    assert preempted > 10


def test_no_job_leaves_for_one_that_would_not_get_its_slots() -> None:
    """The running job is within the quota of the parent, and the larger one is not."""
    low = snapshots.running("low", {"n": 1}, queue="q", priority=10, yields=False)
    high = snapshots.waiting("high", 5, queue="q", priority=90)
    queues = (Queue("p", quota={"GPU": 3.0}), Queue("q", parent="p"))
    seen = replace(snapshots.snapshot([high], [low], {"n": 5.0}), queues=queues)
    (decision,) = plan(seen, NOW)
    assert isinstance(decision, Wait)


def test_jobs_within_their_quotas_start_although_nodes_are_gone_that_all_quotas_need() -> None:
    queues = tuple(Queue(name, quota={"GPU": 4.0}, lending_limit={"GPU": 0.0}) for name in "abc")
    waiting = [snapshots.waiting(f"of-{name}", queue=name) for name in "abc"]
    seen = replace(snapshots.snapshot(waiting, [], {"n": 4.0}), queues=queues)
    assert all(isinstance(each, Start) for each in plan(seen, NOW))


@pytest.mark.parametrize("gpus", [4, 6])
def test_later_jobs_do_not_borrow_what_an_overdue_job_waits_for(gpus: int) -> None:
    """Four GPUs can be lent: a gang of four gets them at some time, and one of six never does."""
    queues = (Queue("a", quota={"GPU": 4.0}, lending_limit={"GPU": 0.0}), Queue("b"))
    gang = snapshots.waiting("gang", gpus, queue="b", seq=1, waited_s=30 * HOUR)
    small = snapshots.waiting("small", queue="b", seq=2)
    there = [snapshots.running(f"r{at}", {"n": 1}, queue="b", yields=False) for at in range(2)]
    seen = replace(snapshots.snapshot([gang, small], there, {"n": 8.0}), queues=queues)
    of_gang, of_small = sorted(plan(seen, NOW), key=lambda each: each.job_id)
    assert isinstance(of_gang, Wait)
    assert of_gang.reason.code == "lending_limit"
    assert isinstance(of_small, Wait if gpus == 4 else Start)


def test_a_job_that_its_own_queue_blocks_uses_up_no_limit_of_its_user_above() -> None:
    queues = (
        Queue("p", user_limit={"GPU": 4.0}),
        Queue("closed", parent="p", max_running=0),
        Queue("open", parent="p"),
    )
    waiting = [snapshots.waiting("x", 4, queue="closed"), snapshots.waiting("y", 4, queue="open")]
    seen = replace(snapshots.snapshot(waiting, [], {"n": 8.0}), queues=queues)
    _, y = sorted(plan(seen, NOW), key=lambda each: each.job_id)
    assert isinstance(y, Start)


def outcomes(snapshot: Snapshot, *queues: Queue) -> list[object]:
    """The kind of each job's decision, if no job can be preempted: of equal candidates, those
    nearest in the tree come first."""
    there = tuple(replace(job, held_s=0.0) for job in snapshot.running)
    found = plan(replace(snapshot, queues=queues, running=there), NOW)
    return [(type(each), each.job_id) for each in found]


def test_a_parent_without_rules_changes_nothing() -> None:
    """Each queue is the only child of a parent with its weight, or all queues are the children of
    one parent. In the second case, no queue has a quota: the parent would guarantee their sum."""
    for seed in range(150):
        draw = random.Random(seed)
        flat = [replace(queue, parent=None, lending_limit={}) for queue in tree_of(draw)]
        snapshot = snapshot_of(draw, flat, 8)
        parents = [Queue(f"{queue.name}-parent", weight=queue.weight) for queue in flat]
        alone = [replace(queue, parent=f"{queue.name}-parent") for queue in flat]
        assert outcomes(snapshot, *alone, *parents) == outcomes(snapshot, *flat), seed
        free = [replace(queue, quota={}, borrowing_limit={}) for queue in flat]
        under = [replace(queue, parent="root") for queue in free]
        assert outcomes(snapshot, *under, Queue("root")) == outcomes(snapshot, *free), seed


def closed_backlog(queues: Sequence[Queue], days: float) -> Counter[str]:
    """Simulate leaves that always have waiting jobs of one GPU, which take 2 or 3 hours. Return the
    GPU-steps of each queue and of each queue above it."""
    tree, gpus, step_s = QueueTree(queues), 8, HOUR
    leaves = [queue.name for queue in queues if not tree.children.get(queue.name)]
    used, got, numbers = Used(), Counter[str](), itertools.count(1)
    jobs: dict[str, WaitingJob] = {}
    left_s: dict[str, float] = {}
    held: dict[str, float] = {}
    for step in range(int(days * 24 * HOUR / step_s)):
        at = NOW.timestamp() + step * step_s
        for leaf in leaves:
            for _ in range(gpus - sum(job.queue == leaf for job in jobs.values())):
                seq = next(numbers)
                jobs[f"j{seq}"] = snapshots.waiting(f"j{seq}", queue=leaf, seq=seq)
                left_s[f"j{seq}"] = (2 + seq % 2) * HOUR
        there = [
            snapshots.running(
                *(name, {"n": 1}),
                queue=jobs[name].queue,
                seq=jobs[name].seq,
                held_s=held[name],
                left_s=left_s[name],
            )
            for name in held
        ]
        queue = [replace(j, left_s=left_s[j.job_id]) for j in jobs.values() if j.job_id not in held]
        seen = snapshots.snapshot(
            *(queue, there, {"n": float(gpus)}), queues=tuple(queues), used_s=used.seconds(at)
        )
        for decision in plan(seen, NOW):
            if isinstance(decision, Start):
                held[decision.job_id] = 0.0
            elif isinstance(decision, Preempt):
                del held[decision.job_id]
        for name in list(held):
            used.add((jobs[name].queue, "default"), step_s / gpus, at)
            got.update(tree.path(jobs[name].queue))
            held[name] += step_s
            left_s[name] -= step_s
            if left_s[name] <= 0:
                del held[name], left_s[name], jobs[name]
    return got


@pytest.mark.parametrize("quota", [{}, {"GPU": 4.0}])
def test_a_subtree_gets_its_weight_however_many_queues_it_has(quota: dict[str, float]) -> None:
    queues = [
        Queue("many", quota=quota),
        *(Queue(f"many-{n}", parent="many", weight=1.0 + (n == 0)) for n in range(4)),
        Queue("few", quota=quota),
        Queue("few-a", parent="few", weight=3.0),
        Queue("few-b", parent="few"),
    ]
    got = closed_backlog(queues, 16.0)
    whole = got["many"] + got["few"]
    assert got["many"] / whole == pytest.approx(0.5, rel=0.05)
    assert got["few-a"] / got["few"] == pytest.approx(0.75, rel=0.05)
    assert got["many-0"] / got["many"] == pytest.approx(0.4, rel=0.05)
    for n in (1, 2, 3):
        assert got[f"many-{n}"] / got["many"] == pytest.approx(0.2, rel=0.05)


def test_usage_moves_with_its_queue_to_another_parent() -> None:
    used = {("a1", "ann"): 40 * HOUR, ("a2", "ann"): 10 * HOUR, ("b1", "ann"): 10 * HOUR}
    queues = [Queue("a"), Queue("b"), *(Queue(name, parent=name[0]) for name in ("a1", "a2", "b1"))]
    before = Standings(queues, used, used)
    assert before.of_queues["a"].used_s == 50 * HOUR
    assert (before.tier("a"), before.tier("b")) == (Tier.AHEAD, Tier.SHARE)
    moved = [replace(queue, parent="b") if queue.name == "a1" else queue for queue in queues]
    after = Standings(moved, used, used)
    assert (after.of_queues["a"].used_s, after.of_queues["b"].used_s) == (10 * HOUR, 50 * HOUR)
    assert (after.tier("a"), after.tier("b")) == (Tier.SHARE, Tier.AHEAD)
    assert after.tier("a1") is Tier.AHEAD, "among the children of its new parent"


def test_reasons_name_the_queues_that_decide() -> None:
    queues = (Queue("lab", quota={"GPU": 2.0}), Queue("a", parent="lab"), Queue("other"))
    there = [
        snapshots.running(f"r{n}", {"n": 1}, queue="other", seq=n, yields=False) for n in range(4)
    ]
    waiting = [
        snapshots.waiting("first", queue="a", seq=10, priority=10),
        snapshots.waiting("second", queue="other", seq=11, priority=50),
    ]
    snapshot = snapshots.snapshot(waiting, there, {"n": 4.0}, queues=queues)
    (asked,) = (each for each in plan(snapshot, NOW) if each.job_id.startswith("r"))
    assert isinstance(asked, Preempt)
    assert asked.reason.message == (
        "releases its slots for job first, which is within the quota of 'lab'"
    )
    factors = Factors(snapshot, NOW)
    (ahead,) = factors.ahead("second", 20)
    assert (ahead.job_id, ahead.decided_by) == ("first", "tier")
    assert ahead.message == (
        "within the quota of the queue 'lab'; this job: the queue 'other' has used at most its "
        "share"
    )
    tiers = [each.message for each in factors.of("first") if each.name == "tier"]
    assert tiers == [
        "within the quota of the queue 'lab'",
        "the queue 'a' has used at most its share",
    ]


def test_the_queues_nearest_in_the_tree_return_slots_first() -> None:
    """Of two queues that borrow, the one with the same parent is asked."""
    queues = (
        *(Queue("lab"), Queue("a", parent="lab", quota={"GPU": 1.0}), Queue("b", parent="lab")),
        *(Queue("rest"), Queue("c", parent="rest")),
    )
    for near in (0, 1):
        there = [
            snapshots.running(f"r{n}", {"n": 1}, queue="b" if n == near else "c", lost_s=float(n))
            for n in range(2)
        ]
        (job,) = (snapshots.waiting("mine", queue="a"),)
        seen = snapshots.snapshot([job], there, {"n": 2.0}, queues=queues)
        asked = [each.job_id for each in plan(seen, NOW) if isinstance(each, Preempt)]
        assert asked == [f"r{near}"]


def test_a_job_that_its_own_queue_blocks_does_not_block_its_siblings() -> None:
    queues = (
        Queue("lab", limit={"GPU": 4.0}),
        *(Queue("a", parent="lab", limit={"GPU": 1.0}), Queue("b", parent="lab")),
    )
    there = [snapshots.running("r", {"n": 1}, queue="a", held_s=0.0)]
    waiting = [snapshots.waiting(f"a{n}", queue="a", seq=n) for n in range(4)]
    waiting += [snapshots.waiting(f"b{n}", queue="b", seq=10 + n) for n in range(4)]
    found = plan(snapshots.snapshot(waiting, there, {"n": 8.0}, queues=queues), NOW)
    assert [each.job_id for each in found if isinstance(each, Start)] == ["b0", "b1", "b2"]
    codes = {each.job_id: each.reason.message for each in found if isinstance(each, Wait)}
    assert "the queue 'a' holds 1 GPU, and its limit is 1 GPU" in codes["a3"]
    assert "the queue 'lab' holds 4 GPU, and its limit is 4 GPU" in codes["b3"]


@pytest.mark.parametrize(("lends", "first"), [(0.0, "outside"), (4.0, "inside")])
def test_a_quota_that_is_not_lent_does_not_count_for_siblings(lends: float, first: str) -> None:
    queues = (
        *(Queue("lab"), Queue("b", parent="lab"), Queue("other")),
        Queue("a", parent="lab", quota={"GPU": 4.0}, lending_limit={"GPU": lends}),
    )
    waiting = [
        snapshots.waiting("inside", queue="b", priority=10),
        snapshots.waiting("outside", queue="other", priority=90),
    ]
    snapshot = snapshots.snapshot(waiting, [], {"n": 8.0}, queues=queues)
    assert Factors(snapshot, NOW).in_order()[0] == first


def test_quotas_that_children_share() -> None:
    draw = random.Random(1)
    for _ in range(200):
        queues = tree_of(draw)
        tree, oracle = QueueTree(queues), TreeOracle(snapshot_of(draw, queues, 0))
        for queue in queues:
            quota = tree.quotas.get(queue.name, {}).get("GPU", 0.0)
            assert quota == oracle.quota(queue.name)
            assert list(reversed(tree.path(queue.name))) == oracle.line(queue.name)
