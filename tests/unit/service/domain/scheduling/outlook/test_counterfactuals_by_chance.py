"""Suggestions for jobs in random queues: with each suggested change, the job starts at the expected
time.

The oracle changes the job as a user would, and simulates the policy with all jobs, at each second
at which something happens. It shares no code with the forecast.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from ray_workers.shared.slices import RoleSlots, Slice
from service.domain.scheduling.outlook.counterfactuals import (
    GIB,
    Choices,
    Counterfactual,
    JobQuestions,
    OtherQueue,
    sooner,
)
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.placement.shared_gpus import parts_on, with_shared_gpus
from service.domain.scheduling.placement.slots import WHOLE_GPUS, held_on, offered
from service.domain.scheduling.policy import (
    Growing,
    Holder,
    Impossible,
    Node,
    Preempt,
    Request,
    RunningJob,
    Shrink,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.dependencies import ArrayLimit, Dependency
from service.domain.scheduling.rules.queues import Queue
from tests.marks import FRESH_SEEDS, soak
from tests.unit.service.domain.scheduling.outlook.test_counterfactuals import Multiples
from tests.unit.service.domain.scheduling.snapshots import NOW

OWNERS = ("ann", "ben", "cy")
QUEUES = ("default", "night", "batch")
LEAVES_S = 15.0
MAX_PRIORITY = 90


def drawn(draw: random.Random) -> Situation:
    shares = draw.random() < 0.25
    totals = {f"n{number}": _total(draw) for number in range(draw.randint(1, 3))}
    labels = {"n0": {"dray.io/silo": "true"}} if len(totals) > 1 and draw.random() < 0.2 else {}
    queues = tuple(_queue(draw, name) for name in QUEUES)
    left = {name: dict(total) for name, total in totals.items() if name not in labels}
    running = [job for at in range(draw.randint(0, 5)) for job in _running(draw, at, left, shares)]
    growing = tuple(_growing(draw, job) for job in running if job.spare and draw.random() < 0.5)
    waiting = [_waiting(draw, f"w{at}", at, shares) for at in range(draw.randint(1, 6))]
    used = [(queue, owner) for queue in QUEUES for owner in OWNERS]
    used_s = {account: draw.choice([0.0, 1e4, 1e6]) for account in used}
    nodes = tuple(Node.labelled(n, t, t, labels.get(n, {})) for n, t in totals.items())
    arrays = {job.job_id: "array" for job in waiting if job.array is not None}
    holders = _holders(running)
    snapshot = Snapshot(
        *(tuple(waiting), tuple(_seen(node, holders, shares) for node in nodes), True, holders),
        growing=growing,
        queues=queues,
        running=tuple(running),
        used_s=used_s if draw.random() < 0.5 else {},
    )
    return Situation(snapshot, arrays=arrays)


def _total(draw: random.Random) -> dict[str, float]:
    total = {"GPU": float(draw.choice([1, 2, 4])), "CPU": float(draw.choice([4, 8]))}
    return total | {"memory": draw.choice([4, 16]) * GIB}


def _bundle(draw: random.Random, shares: bool) -> dict[str, float]:
    found = draw.choice([{"GPU": 1.0}] * 5 + [{"GPU": 2.0}, {"CPU": 1.0}, {"CPU": 3.0}])
    if shares and draw.random() < 0.4:
        found = {"GPU": draw.choice([0.25, 0.5, 0.6])}
    if draw.random() < 0.3:
        found = found | draw.choice([{"CPU": 2.0}, {"memory": 3 * GIB}])
    return found


def _seen(node: Node, holders: tuple[Holder, ...], shares: bool) -> Node:
    free = offered(node.total, node.total, held_on(node.id, holders))
    return replace(
        node,
        available_to_us=with_shared_gpus(free, parts_on(node.id, holders)) if shares else free,
    )


def _queue(draw: random.Random, name: str) -> Queue:
    def some(*values: Any) -> Any:
        return draw.choice([*values, *[None] * len(values)])

    return Queue(
        name,
        weight=draw.choice([1.0, 3.0]),
        quota={"GPU": 2.0} if draw.random() < 0.2 else {},
        limit={"GPU": some(1.0, 2.0) or 8.0},
        user_limit={"GPU": some(1.0, 2.0) or 8.0},
        max_running=some(0, 1, 2),
        max_running_per_user=some(1, 2),
        max_priority=draw.choice([50, 70, MAX_PRIORITY]),
    )


def _running(
    draw: random.Random, at: int, left: dict[str, dict[str, float]], shares: bool
) -> Iterator[RunningJob]:
    """A job with slots on some nodes, if there are any; no two parts share a GPU."""
    bundle = _bundle(draw, shares)
    taken = {name: float(math.ceil(amount)) for name, amount in bundle.items()}
    slices: list[Slice] = []
    for node in draw.sample(list(left), len(left)):
        most = int(min(left[node][name] // amount for name, amount in taken.items()))
        number = draw.randint(0, most)
        if number and len(slices) < 2:
            slices.append(Slice(node, number))
            for name, amount in taken.items():
                left[node][name] -= number * amount
    if not slices:
        return
    number = sum(part.num_workers for part in slices)
    least = draw.randint(1, number) if draw.random() < 0.4 else number
    yield RunningJob(
        *(f"r{at}", draw.choice([30, 50, 80, 95]), draw.randint(0, 50), Request(number, bundle)),
        slices=tuple(slices),
        held_s=draw.choice([0.0, 200.0, 4000.0]),
        start_s=draw.choice([0.0, 0.0, 300.0]),
        left_s=draw.choice([100.0, 900.0, 4000.0, 90000.0]),
        waited_s=0.0,
        yields=draw.random() < 0.5,
        queue=draw.choice(QUEUES),
        owner=draw.choice(OWNERS),
        spare=_beyond(tuple(slices), number - least),
    )


def _growing(draw: random.Random, job: RunningJob) -> Growing:
    most = job.request.num_workers + draw.randint(1, 3)
    least = job.request.num_workers - sum(part.num_workers for part in job.spare)
    request = Request(most, job.request.bundle, least)
    facts = (1, job.priority, job.seq, request, job.slices)
    return Growing(job.job_id, *facts, queue=job.queue, owner=job.owner)


def _waiting(draw: random.Random, name: str, seq: int, shares: bool) -> WaitingJob:
    number = draw.choice([1, 1, 2, 3, 4, 5])
    request = Request(number, _bundle(draw, shares))
    kind = draw.random()
    if kind < 0.2:
        request = replace(request, min_workers=draw.randint(1, number))
    elif kind < 0.3 and request.bundle.get("GPU", 1.0) >= 1.0:
        role = RoleSlots("server", number, 1, {"CPU": draw.choice([1.0, 2.0, 5.0])})
        request = replace(request, num_workers=number + 1, roles=(role,))
    return WaitingJob(
        *(name, 0, draw.choice([30, 50, 50, 70, 90]), seq),
        request=request,
        left_s=draw.choice([60.0, 700.0, 5000.0]),
        waited_s=draw.choice([0.0, 600.0, 100_000.0]),
        yields=draw.random() < 0.5,
        queue=draw.choice(QUEUES),
        owner=draw.choice(OWNERS),
        held="ann" if draw.random() < 0.1 else None,
        after=(Dependency("r-x", "end", "RUNNING"),) if draw.random() < 0.05 else (),
        array=ArrayLimit("array", 1) if draw.random() < 0.1 else None,
    )


def _holders(running: list[RunningJob]) -> tuple[Holder, ...]:
    return tuple(
        Holder(j.job_id, j.slices, j.request.bundle, j.queue, j.owner, j.request.roles)
        for j in running
    )


def _taken(slices: Sequence[Slice], request: Request) -> Iterator[tuple[str, str, float]]:
    """Node, resource, and amount for each rank."""
    nodes = [part.node_id for part in slices for _ in range(part.num_workers)]
    for rank, node in enumerate(nodes):
        bundle = request.bundle
        for role in request.roles:
            if role.first_rank <= rank < role.first_rank + role.number:
                bundle = role.bundle
        yield from ((node, name, amount) for name, amount in bundle.items())


@dataclass
class _Held:
    job: RunningJob
    ends_at: datetime
    leaves_at: datetime | None = None


class Oracle:
    """A simulation of the policy in which no jobs are submitted and none fail."""

    def __init__(self, there: Situation) -> None:
        self._snapshot = there.snapshot
        self._queue = {job.job_id: job for job in there.snapshot.queue}
        self._total: defaultdict[str, float] = defaultdict(float)
        for node in there.snapshot.nodes:
            if "label:dray.io/silo=true" not in node.total:
                for name, amount in node.total.items():
                    self._total[name] += amount
        self._shares = any(WHOLE_GPUS in node.available_to_us for node in there.snapshot.nodes)
        self._held = {
            job.job_id: _Held(job, NOW + timedelta(seconds=job.left_s or 0.0))
            for job in there.snapshot.running
        }
        self._is_first = True
        self._used_s = dict(there.snapshot.used_s)
        self._of_arrays = Counter(there.snapshot.running_of_arrays)
        self._array_of = {
            job.job_id: job.array.array_id for job in self._queue.values() if job.array is not None
        }

    def start_of(self, job_id: str, until: datetime) -> datetime | None:
        """Return the time at which the job starts; None if it does not start in time."""
        now = NOW
        while now <= until:
            started = True
            while started:
                started = self._round(now)
                if job_id in self._held:
                    return now
            coming = self._next(now)
            if coming is None:
                return None
            self._pass((coming - now).total_seconds())
            now = coming
            self._end(now)
        return None

    def _round(self, now: datetime) -> bool:
        """Make and apply one plan; return whether a job started."""
        running = [held.job for held in self._held.values()]
        holders = _holders(running)
        nodes = (_seen(node, holders, self._shares) for node in self._snapshot.nodes)
        snapshot = replace(
            self._snapshot,
            queue=tuple(self._queue.values()),
            running=tuple(running),
            holders=holders,
            nodes=tuple(nodes),
            growing=self._snapshot.growing if now == NOW and self._is_first else (),
            used_s=dict(self._used_s),
            running_of_arrays=self._of_arrays,
        )
        self._is_first, started = False, False  # groups do not grow in a forecast
        for decision in plan(snapshot, now):
            if isinstance(decision, Start):
                started = True
                self._start(self._queue.pop(decision.job_id), decision.slices, now)
            elif isinstance(decision, Preempt):
                held = self._held[decision.job_id]
                held.job = replace(held.job, is_leaving=True)
                held.leaves_at = now + timedelta(seconds=LEAVES_S)
            elif isinstance(decision, Shrink):
                held = self._held[decision.job_id]
                held.job = replace(held.job, recalled=decision.slices)
                held.leaves_at = now + timedelta(seconds=LEAVES_S)
            elif isinstance(decision, Impossible):  # it fails
                del self._queue[decision.job_id]
        return started

    def _start(self, job: WaitingJob, slices: tuple[Slice, ...], now: datetime) -> None:
        number = sum(part.num_workers for part in slices)
        left_s = (job.left_s or 0.0) * job.request.num_workers / number
        if job.job_id in self._array_of:
            self._of_arrays[self._array_of[job.job_id]] += 1
        beyond = _beyond(slices, number - job.request.least)
        runs = RunningJob(
            *(job.job_id, job.priority, job.seq, job.request.of_size(number)),
            slices=slices,
            held_s=0.0,
            left_s=left_s,
            waited_s=job.waited_s,
            yields=job.yields,
            place=job.place,
            queue=job.queue,
            owner=job.owner,
            spare=beyond,
        )
        self._held[job.job_id] = _Held(runs, now + timedelta(seconds=left_s))

    def _next(self, now: datetime) -> datetime | None:
        times = []
        for held in self._held.values():
            times += [held.ends_at, held.leaves_at]
            left_s = self._snapshot.min_run_s - held.job.held_s
            times.append(now + timedelta(seconds=left_s))
        return min((time for time in times if time is not None and time > now), default=None)

    def _pass(self, passed_s: float) -> None:
        for held in self._held.values():
            job = held.job
            held.job = replace(
                job,
                held_s=job.held_s + passed_s,
                left_s=max(0.0, (job.left_s or 0.0) - passed_s),
                lost_s=0.0 if job.yields else job.lost_s + passed_s,
            )
            account = job.queue, job.owner
            holds: defaultdict[str, float] = defaultdict(float)
            for _, name, amount in _taken(job.slices, job.request):
                holds[name] += amount
            share = max(holds[name] / self._total[name] for name in holds if self._total[name])
            self._used_s[account] = self._used_s.get(account, 0.0) + passed_s * share
        self._queue = {
            job.job_id: replace(job, waited_s=job.waited_s + passed_s)
            for job in self._queue.values()
        }

    def _end(self, now: datetime) -> None:
        for name, held in list(self._held.items()):
            if held.ends_at <= now:
                self._leave(name)
            elif held.leaves_at is not None and held.leaves_at <= now:
                if held.job.is_leaving:
                    self._wait_again(self._leave(name))
                else:
                    self._shrink(held, now)

    def _leave(self, name: str) -> RunningJob:
        job = self._held.pop(name).job
        if name in self._array_of:
            self._of_arrays[self._array_of[name]] -= 1
        return job

    def _wait_again(self, job: RunningJob) -> None:
        self._queue[job.job_id] = WaitingJob(
            *(job.job_id, 0, job.priority, job.seq, job.request),
            left_s=(job.left_s or 0.0) + job.lost_s,
            waited_s=job.waited_s,
            yields=job.yields,
            queue=job.queue,
            owner=job.owner,
            place=job.place,
        )

    def _shrink(self, held: _Held, now: datetime) -> None:
        job = held.job
        slices = list(job.slices)
        for part in job.recalled:
            slices.remove(part)
        before, after = (sum(p.num_workers for p in each) for each in (job.slices, slices))
        left_s = (job.left_s or 0.0) * before / after
        held.job = replace(
            job,
            request=job.request.of_size(after),
            slices=tuple(slices),
            left_s=left_s,
            recalled=(),
            spare=tuple(part for part in job.spare if part in slices),
        )
        held.ends_at, held.leaves_at = now + timedelta(seconds=left_s), None


def _beyond(slices: tuple[Slice, ...], spare: int) -> tuple[Slice, ...]:
    """Complete slices that a group could release, in reverse order."""
    found = []
    for part in reversed(slices):
        if part.num_workers <= spare:
            spare -= part.num_workers
            found.append(part)
    return tuple(found)


def _changed(
    there: Situation, job: WaitingJob, suggested: Counterfactual, rules: Multiples
) -> Situation:
    """Return the job with the change applied as by a user."""
    change = suggested.change
    if change is not None:
        request = job.request
        if change.num_workers is not None:
            wanted = change.num_workers
            assert wanted % rules.step == 0
            assert wanted >= rules.least
            request = Request(wanted, job.request.bundle)
        elif change.min_workers is not None:
            assert request.min_workers is not None
            assert 1 <= change.min_workers < request.min_workers
            request = replace(request, min_workers=change.min_workers)
        elif change.of_worker is not None:
            name, amount = change.of_worker
            assert 0 < amount < request.bundle[name]
            request = replace(request, bundle={**request.bundle, name: amount})
        changed = replace(job, request=request, seq=10**6, waited_s=0.0, place=0)
    else:
        priority = job.priority if suggested.priority is None else suggested.priority
        changed = replace(job, priority=priority, queue=suggested.queue or job.queue, place=0)
        limits = {queue.name: queue.max_priority for queue in there.snapshot.queues}
        assert changed.priority <= limits[changed.queue]
    queue = tuple(changed if each is job else each for each in there.snapshot.queue)
    return replace(there, snapshot=replace(there.snapshot, queue=queue))


def _starts_alone(
    there: Situation, job: WaitingJob, suggested: Counterfactual, rules: Multiples
) -> bool:
    snapshot = _changed(there, job, suggested, rules).snapshot
    (alone,) = (each for each in snapshot.queue if each.job_id == job.job_id)
    nodes = tuple(replace(node, available_to_us=dict(node.total)) for node in snapshot.nodes)
    empty = replace(snapshot, queue=(alone,), nodes=nodes, holders=(), running=(), growing=())
    return Oracle(replace(there, snapshot=empty)).start_of(job.job_id, NOW) == NOW


def false_suggestions(seed: object) -> Iterator[str]:
    """Yield the false suggestions for the jobs of a random queue."""
    draw = random.Random(str(seed))
    there = drawn(draw)
    rules = Multiples(step=draw.choice([1, 1, 2]), least=draw.choice([1, 1, 3]))
    queues = there.snapshot.queues
    for job in there.snapshot.queue:
        here = next(queue for queue in queues if queue.name == job.queue)
        questions = JobQuestions(there, job, NOW)
        decision = questions.decision
        if not isinstance(decision, Wait | Impossible) or job.after or job.held:
            continue
        others = tuple(OtherQueue(queue, job.ends_within_s) for queue in queues)
        choices = Choices(rules, others, max(here.max_priority, job.priority))
        expected = questions.expected().at
        for found in sooner(questions.answers(choices, decision.reason), expected):
            if found.at is None:
                if found.change and not _starts_alone(there, job, found, rules):
                    yield f"{job.job_id}: {found.message}"
                continue
            near_s = 20.0 + 0.1 * (found.at - NOW).total_seconds()
            latest = found.at if found.at == NOW else found.at + timedelta(seconds=near_s)
            at = Oracle(_changed(there, job, found, rules)).start_of(job.job_id, latest)
            if at is None:
                yield f"{job.job_id}: {found.message} at {found.at}"
            elif expected is not None and found.at >= expected:
                yield f"{job.job_id}: {found.message}, no sooner than {expected}"


@pytest.mark.parametrize("number", [40, soak(400)])
def test_each_suggestion_that_is_shown_has_the_job_start(number: int) -> None:
    salt = random.randrange(10**9) if FRESH_SEEDS else 0
    seeds = (f"{salt}-{seed}" for seed in range(number))
    assert {seed: found for seed in seeds if (found := list(false_suggestions(seed)))} == {}
