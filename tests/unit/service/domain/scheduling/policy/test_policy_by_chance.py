"""Jobs are randomly submitted, held, ended, and evicted on a changing cluster, and a slow check
verifies the guarantees of each plan."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from ray_workers.shared.slices import Slice
from service.domain.scheduling.elastic.resizing import spare
from service.domain.scheduling.placement.slots import count, held_on, offered
from service.domain.scheduling.policy import (
    Decision,
    Grow,
    Growing,
    Holder,
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
from service.domain.scheduling.rules.eviction import MIN_RUN_S
from service.domain.scheduling.rules.queues import Queue
from tests.marks import soak
from tests.unit.service.domain.scheduling.policy.oracle import Oracle

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LEVELS = ("zone", "rack")
NODES = {
    "a": {"CPU": 4.0, "GPU": 2.0, "memory": 2.0**33, "label:zone=z": 1.0, "label:rack=1": 1.0},
    "b": {"CPU": 8.0, "GPU": 4.0, "memory": 2.0**33, "label:zone=z": 1.0, "label:rack=2": 1.0},
    "c": {"CPU": 4.0, "label:rack=1": 1.0},
    "d": {"CPU": 4.0, "GPU": 2.0, "memory": 2.0**33, "label:zone=z": 1.0, "label:rack=1": 1.0},
}
SILOS = tuple(
    Node.labelled(f"silo-{name}", total, total, {"dray.io/silo": "true"})
    for name, total in NODES.items()
)
"""Nodes that no job can use, as if they did not exist."""
BUNDLES = (
    {"CPU": 1.0, "GPU": 1.0},
    {"CPU": 1.0},
    {"CPU": 2.0, "GPU": 2.0},
    {"CPU": 1.0, "memory": 2.0**31},
)
QUEUES = ("default", "night", "research")
NUMBERS = st.integers(0, 99)
HOURS = st.sampled_from([None, 0.1, 1.0, 5.0])
AMOUNTS = st.dictionaries(st.sampled_from(["CPU", "GPU"]), st.sampled_from([1.0, 3.0, 6.0]))
SUBMITS = st.fixed_dictionaries(
    {
        "size": st.tuples(
            st.sampled_from([1, 1, 2, 2, 3, 4, 5, 6]), st.sampled_from([None, None, 1, 2])
        ),
        "bundle": st.sampled_from(BUNDLES),
        "priority": st.sampled_from([40, 50, 50, 60]),
        "hours": HOURS,
        "guess_hours": HOURS,
        "start_s": st.sampled_from([0.0, 0.0, 60.0]),
        "queue": st.sampled_from(QUEUES),
        "owner": st.sampled_from(["ann", "ben"]),
        "yields": st.booleans(),
        "array": st.sampled_from([None, None, None, ArrayLimit("array-1", 2)]),
        "after": st.sampled_from([None] * 19 + ["first"]),
        "limit_s": st.sampled_from([None, None, 60.0, 1000.0, 7200.0]),
        "waited": st.sampled_from([0.0, 0.0, 0.0, 6.0, 25.0]),
        "level": st.sampled_from([None, None, None, "zone", "rack", "node"]),
    }
)


@dataclass
class Modelled:
    """A job in the model of the cluster."""

    waiting: WaitingJob
    slices: tuple[Slice, ...] = ()
    since_s: float = 0.0
    is_leaving: bool = False
    recalled: tuple[Slice, ...] = ()
    lacking: int = 0
    start_s: float = 0.0
    """How long its starts take."""


class Cluster(RuleBasedStateMachine):
    """A model of the cluster. Rules choose jobs by number."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, Modelled] = {}
        self.queues: dict[str, Queue] = {}
        self.gone: set[str] = set()
        self.num_submitted = 0
        self.at_s = 0.0

    @initialize(submits=st.lists(SUBMITS, min_size=4, max_size=10))
    def begin(self, submits: list[dict[str, Any]]) -> None:
        for submit in submits:
            self.submit(submit)
        self.tick(1.0)

    @rule(submit=SUBMITS)
    def submit(self, submit: dict[str, Any]) -> None:
        num_workers, least = submit["size"]
        name = f"job-{self.num_submitted}"
        after: tuple[Dependency, ...] = ()
        if submit["after"] and "job-0" in self.jobs:
            after = (Dependency("job-0", "end", "RUNNING"),)
        hours, guess = submit["hours"], submit["guess_hours"]
        self.jobs[name] = Modelled(
            WaitingJob(
                name,
                attempt=0,
                priority=submit["priority"],
                seq=self.num_submitted,
                request=Request(
                    num_workers,
                    submit["bundle"],
                    None if least is None else min(least, num_workers),
                    submit["level"],
                ),
                left_s=None if hours is None else hours * 3600.0,
                guess_s=None if guess is None or submit["yields"] else guess * 3600.0,
                waited_s=submit["waited"] * 3600.0,
                yields=submit["yields"],
                ends_within_s=submit["limit_s"],
                queue=submit["queue"],
                owner=submit["owner"],
                after=after,
                array=submit["array"],
            ),
            start_s=submit["start_s"],
        )
        self.num_submitted += 1

    @rule(submits=st.lists(SUBMITS, min_size=1, max_size=3), priority=st.sampled_from([50, 70]))
    def rush(self, submits: list[dict[str, Any]], priority: int) -> None:
        """Submit jobs that can start immediately, after running jobs have held their slots for a
        long time."""
        self.at_s += MIN_RUN_S
        for submit in submits:
            self.submit({**submit, "after": None, "array": None, "priority": priority})

    @rule(
        number=NUMBERS,
        how=st.sampled_from(["held", "preparing", "backs off", "begins later", "first", "free"]),
    )
    def change(self, number: int, how: str) -> None:
        if (job := self.one_of(number, runs=False)) is None:
            return
        changes: dict[str, Any] = {
            "held": {"held": "ann"},
            "preparing": {"preparing": "its environment is being prepared"},
            "backs off": {"not_before": NOW + timedelta(seconds=30)},
            "begins later": {"begins_at": NOW + timedelta(hours=1)},
            "first": {"place": -self.num_submitted},
            "free": dict.fromkeys(("held", "preparing", "not_before", "begins_at")),
        }[how]
        job.waiting = replace(job.waiting, **changes)

    @rule(number=NUMBERS)
    def end(self, number: int) -> None:
        if (job := self.one_of(number, runs=True)) is not None:
            self.forget(job)

    @rule(number=NUMBERS)
    def lose_a_worker(self, number: int) -> None:
        """Make a group wait for another worker."""
        job = self.one_of(number, runs=True)
        stays = job is not None and not job.is_leaving and not job.recalled
        if job is not None and stays and count(job.slices) > 1:
            first, *others = job.slices
            less = Slice(first.node_id, first.num_workers - 1)
            job.slices = (less, *others) if less.num_workers else tuple(others)
            job.lacking = max(0, job.waiting.request.least - count(job.slices))

    @rule(name=st.sampled_from(QUEUES), quota=AMOUNTS, limit=AMOUNTS, user_limit=AMOUNTS)
    def rules(
        self,
        name: str,
        quota: dict[str, float],
        limit: dict[str, float],
        user_limit: dict[str, float],
    ) -> None:
        most = 2 if len(quota) == 2 else None
        self.queues[name] = Queue(
            name, quota=quota, limit=limit, user_limit=user_limit, max_running_per_user=most
        )

    @rule(name=st.just("c"))
    def refuse_or_accept(self, name: str) -> None:
        self.gone ^= {name}

    @rule(seconds=st.sampled_from([1.0, MIN_RUN_S, MIN_RUN_S, 3600.0]))
    def tick(self, seconds: float) -> None:
        """Let the jobs leave that were asked to, advance the time, and make and apply a plan."""
        self.at_s += seconds
        for job in self.jobs.values():
            if job.is_leaving:
                job.slices, job.is_leaving, job.lacking = (), False, 0
            for part in job.recalled if job.slices else ():
                kept = list(job.slices)
                kept.remove(part)
                job.slices = tuple(kept)
            job.recalled = ()
        for decision in self.planned():
            self.follow(decision)
        self.never_more_than_there_is()

    @invariant()
    def a_plan_at_any_time_keeps_what_is_promised(self) -> None:
        self.planned()

    def planned(self) -> list[Decision]:
        seen = self.snapshot()
        decisions = plan(seen, NOW)
        shuffled = list(seen.queue)
        random.Random(len(shuffled)).shuffle(shuffled)
        again = plan(replace(seen, queue=tuple(shuffled)), NOW)
        assert Counter(map(repr, decisions)) == Counter(map(repr, again))
        Oracle(seen, NOW).check(decisions)
        with_silos = plan(replace(seen, nodes=(*seen.nodes, *SILOS)), NOW)
        assert list(map(without_words, with_silos)) == list(map(without_words, decisions))
        later = {job.job_id for job in seen.queue if job.begins_at and not job.held}
        if later:
            kept = tuple(job for job in seen.queue if job.job_id not in later)
            without = plan(replace(seen, queue=kept), NOW)
            others = [each for each in decisions if each.job_id not in later]
            assert list(map(without_position, without)) == list(map(without_position, others))
        return decisions

    def follow(self, decision: Decision) -> None:
        job = self.jobs[decision.job_id]
        if isinstance(decision, Start):
            job.slices, job.since_s = decision.slices, self.at_s
        elif isinstance(decision, Grow):
            job.slices = (*job.slices, *decision.slices)
            job.lacking = 0
        elif isinstance(decision, Preempt):
            assert self.at_s - job.since_s >= MIN_RUN_S
            job.is_leaving = True
        elif isinstance(decision, Shrink):
            job.recalled = decision.slices

    def never_more_than_there_is(self) -> None:
        for name, total in NODES.items():
            held = held_on(name, [self.holder(job) for job in self.running()])
            assert all(amount <= total.get(each, 0.0) for each, amount in held.items())

    # The cluster as seen by the plan.

    def one_of(self, number: int, *, runs: bool) -> Modelled | None:
        found = [job for job in self.jobs.values() if bool(job.slices) == runs]
        return found[number % len(found)] if found else None

    def forget(self, job: Modelled) -> None:
        name = job.waiting.job_id
        del self.jobs[name]
        for other in self.jobs.values():
            after = tuple(one for one in other.waiting.after if one.id != name)
            other.waiting = replace(other.waiting, after=after)

    def running(self) -> list[Modelled]:
        return [job for job in self.jobs.values() if job.slices]

    def holder(self, job: Modelled) -> Holder:
        waiting = job.waiting
        bundle = waiting.request.bundle
        return Holder(waiting.job_id, job.slices, bundle, waiting.queue, waiting.owner)

    def snapshot(self) -> Snapshot:
        holders = [self.holder(job) for job in self.running()]
        return Snapshot(
            queue=tuple(job.waiting for job in self.jobs.values() if not job.slices),
            nodes=tuple(
                Node(
                    name,
                    total,
                    offered(total, total, held_on(name, holders)),
                    name not in self.gone,
                )
                for name, total in NODES.items()
            ),
            connected=True,
            holders=tuple(holders),
            growing=tuple(self.growing(job) for job in self.running() if self.could_grow(job)),
            running=tuple(self.as_running(job) for job in self.running()),
            queues=tuple(self.queues.values()),
            topology=LEVELS,
            running_of_arrays=Counter(
                job.waiting.array.array_id for job in self.running() if job.waiting.array
            ),
        )

    def could_grow(self, job: Modelled) -> bool:
        request = job.waiting.request
        is_small = request.min_workers is not None and count(job.slices) < request.num_workers
        return not (job.is_leaving or job.recalled) and (is_small or job.lacking > 0)

    def growing(self, job: Modelled) -> Growing:
        one = job.waiting
        return Growing(
            one.job_id,
            *(1, one.priority, one.seq, one.request, job.slices, job.lacking, one.queue, one.owner),
        )

    def as_running(self, job: Modelled) -> RunningJob:
        one, held_s, limit_s = job.waiting, self.at_s - job.since_s, job.waiting.ends_within_s
        return RunningJob(
            one.job_id,
            one.priority,
            one.seq,
            one.request.of_size(count(job.slices)),
            job.slices,
            held_s=held_s,
            left_s=None if one.left_s is None else max(0.0, one.left_s - held_s),
            guess_s=one.guess_s,
            ends_within_s=None if limit_s is None else max(0.0, limit_s - held_s),
            waited_s=one.waited_s,
            lost_s=0.0 if one.yields else held_s,
            yields=one.yields,
            is_leaving=job.is_leaving,
            place=one.place,
            queue=one.queue,
            owner=one.owner,
            spare=self.spare(job),
            recalled=job.recalled,
            start_s=job.start_s,
        )

    def spare(self, job: Modelled) -> tuple[Slice, ...]:
        least = job.waiting.request.min_workers
        is_settled = least is not None and not (job.recalled or job.lacking)
        return spare(job.slices, least or 1) if is_settled else ()


def without_words(decision: Decision) -> Decision:
    """Return a decision, with its reason reduced to the code."""
    if isinstance(decision, Start | Grow):
        return decision
    return replace(decision, reason=replace(decision.reason, message=""))


def without_position(decision: Decision) -> Decision:
    """Return a decision without the job's position in the queue, and with only the reason's
    code."""
    bare = without_words(decision)
    return replace(bare, position=None) if isinstance(bare, Wait) else bare


@pytest.mark.timeout(900)  # the long one, on a machine with other work
@pytest.mark.parametrize("examples", [30, soak(2000)])
def test_each_plan_keeps_what_is_promised(examples: int) -> None:
    run_state_machine_as_test(
        Cluster, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None)
    )
