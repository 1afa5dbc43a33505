"""Random clusters, jobs and reservations over several hours, planned every half minute.

The oracle knows only the definitions: it walks through the minutes of a job's possible run on a
node and looks which reservations are in effect. It shares no code with the policy.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache

import pytest

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.slots import Holder, Node, Request
from service.domain.scheduling.policy import (
    Preempt,
    RunningJob,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.reservations import Reservation
from tests.unit.service.domain.scheduling.snapshots import NOW

SEEDS = range(7)
TICK_S, TICKS = 30.0, 240
LEAVE_S, START_S, MIN_RUN_S = 45.0, 300.0, 300.0
USERS = ("ann", "bob", "cid")
NODES = {"a": 2, "b": 2, "c": 1}
KEPT_BACK = "waiting_for_reservation"


@dataclass
class Job:
    """A job of the test's own simulation."""

    waiting: WaitingJob
    lasts_s: float
    began_s: float = 0.0
    leaves_s: float | None = None
    node: str = ""

    def ends_s(self) -> float:
        limit_s = self.waiting.ends_within_s
        return self.began_s + min(self.lasts_s, math.inf if limit_s is None else limit_s)


def a_reservation(chance: random.Random, name: str, taken: list[Reservation]) -> Reservation | None:
    begins_s = chance.randrange(-600, 6000)
    maintenance = chance.random() < 0.3
    found = Reservation(
        name,
        NOW + timedelta(seconds=begins_s),
        NOW + timedelta(seconds=begins_s + chance.randrange(300, 3000)),
        node_ids=frozenset(chance.sample(sorted(NODES), chance.choice((1, 1, 2)))),
        all_nodes=maintenance and chance.random() < 0.2,
        users=() if maintenance else tuple(chance.sample(USERS, chance.choice((1, 2)))),
        accepts_unnamed=not maintenance and chance.random() < 0.3,
        flex=not maintenance and chance.random() < 0.3,
        at_begin=chance.choice(("preempt", "preempt", "wait", "cancel")),
        at_end="preempt" if not maintenance and chance.random() < 0.3 else "continue",
    )
    overlaps = any(
        found.begins_at < other.ends_at and other.begins_at < found.ends_at
        for other in taken
        if found.node_ids & other.node_ids and not maintenance
    )
    return None if overlaps else found


def a_job(chance: random.Random, number: int, names: list[str]) -> Job:
    lasts_s = chance.choice((60.0, 600.0, 2400.0))
    limit_s = chance.choice((None, lasts_s + 60, 900.0, 3600.0))
    named = chance.choice((*names, "gone")) if chance.random() < 0.4 else None
    return Job(
        WaitingJob(
            f"job-{number}",
            0,
            50,
            number,
            Request(1, {"GPU": 1.0}),
            yields=chance.random() < 0.4,
            ends_within_s=limit_s,
            owner=chance.choice(USERS),
            reservation=named,
        ),
        lasts_s,
    )


# The oracle.


def is_in(job: WaitingJob, one: Reservation) -> bool:
    names_it = job.reservation == one.name
    return job.owner in one.users and (
        names_it or (one.accepts_unnamed and job.reservation is None)
    )


def on(one: Reservation, node: str) -> bool:
    return one.all_nodes or node in one.node_ids


def seconds(one: Reservation) -> tuple[float, float]:
    return (one.begins_at - NOW).total_seconds(), (one.ends_at - NOW).total_seconds()


def kept_back(job: WaitingJob, known: list[Reservation], now_s: float) -> bool:
    if job.reservation is None:
        return False
    found = [one for one in known if one.name == job.reservation and seconds(one)[1] > now_s]
    if not found:
        return job.attempt == 0
    if job.owner not in found[0].users:
        return True
    early = seconds(found[0])[0] > now_s
    return not found[0].flex and (early or must_leave_soon(job, found[0], now_s))


def must_leave_soon(job: WaitingJob, one: Reservation, now_s: float) -> bool:
    """Whether its reservation would end this job before it has trained for a while."""
    if one.at_end == "continue":
        return False
    limit_s = math.inf if job.ends_within_s is None else job.ends_within_s + START_S
    trains_s = min(MIN_RUN_S, limit_s) if job.yields else 0.0
    return now_s + trains_s >= seconds(one)[1] - LEAVE_S


def may_use(job: WaitingJob, node: str, known: list[Reservation], now_s: float) -> bool:
    """Whether a job may start on a node now, by walking through its possible run."""
    there = [one for one in known if seconds(one)[1] > now_s]
    for one in there:
        if one.name == job.reservation and not one.flex and not on(one, node):
            return False
    limit_s = 40_000.0 if job.ends_within_s is None else job.ends_within_s + START_S
    for one in there:
        if not on(one, node):
            continue
        if is_in(job, one):
            if must_leave_soon(job, one, now_s):
                return False
            continue
        stays_s = limit_s
        if job.yields and one.at_begin == "preempt":
            stays_s = min(stays_s, MIN_RUN_S)
        begins_s, ends_s = seconds(one)
        moment = now_s
        while moment < now_s + stays_s + LEAVE_S:
            if begins_s <= moment < ends_s:
                return False
            moment += 5.0
    return True


class Play:
    """One simulation."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.known: list[Reservation] = []
        self.created_s: dict[str, float] = {}
        self.queue: list[Job] = []
        self.active: list[Job] = []
        self.num_starts = self.num_left = self.num_reserved = 0
        self.now_s = 0.0

    def run(self) -> None:
        number = 0
        for tick in range(TICKS):
            self.now_s = tick * TICK_S
            if self.chance.random() < 0.04 or tick == 0:
                name = f"r{len(self.created_s)}"
                new = a_reservation(self.chance, name, self.known)
                if new is not None and seconds(new)[1] > self.now_s:
                    self.known.append(new)
                    self.created_s[name] = self.now_s
            while self.chance.random() < 0.15:
                names = [one.name for one in self.known]
                self.queue.append(a_job(self.chance, number, names))
                number += 1
            self.release()
            self.check_nodes()
            self.step()

    def release(self) -> None:
        for job in list(self.active):
            leaves = job.leaves_s is not None and job.leaves_s <= self.now_s
            if job.ends_s() <= self.now_s or leaves:
                self.active.remove(job)
                if leaves and job.ends_s() > self.now_s and job.waiting.held != "cancelled":
                    self.num_left += 1
                    again = replace(job.waiting, attempt=job.waiting.attempt + 1)
                    self.queue.append(Job(again, job.lasts_s))

    def step(self) -> None:
        now = NOW + timedelta(seconds=self.now_s)
        running = [self.running(job) for job in self.active]
        holders = tuple(Holder(j.job_id, j.slices, j.request.bundle) for j in running)
        held = {node: sum(job.node == node for job in self.active) for node in NODES}
        free = {node: NODES[node] - held[node] for node in NODES}
        nodes = tuple(
            Node(name, {"GPU": float(number)}, {"GPU": float(free[name])})
            for name, number in NODES.items()
        )
        queue = tuple(job.waiting for job in self.queue)
        seen = Snapshot(
            *(queue, nodes, True, holders),
            running=tuple(running),
            reservations=tuple(self.known),
            leave_s=LEAVE_S,
        )
        by_id = {job.waiting.job_id: job for job in (*self.queue, *self.active)}
        for decision in plan(seen, now):
            job = by_id[decision.job_id]
            if isinstance(decision, Start):
                (part,) = decision.slices
                assert may_use(job.waiting, part.node_id, self.known, self.now_s), job
                assert not kept_back(job.waiting, self.known, self.now_s), job
                free[part.node_id] -= 1
                self.begin(job, part.node_id)
            elif isinstance(decision, Preempt):
                job.leaves_s = self.now_s + TICK_S
                if decision.ends:
                    job.waiting = replace(job.waiting, held="cancelled")
            elif isinstance(decision, Wait):
                self.check_wait(job.waiting, decision, free)

    def running(self, job: Job) -> RunningJob:
        waiting, limit_s = job.waiting, job.waiting.ends_within_s
        ran_s = self.now_s - job.began_s
        return RunningJob(
            *(waiting.job_id, 50, waiting.seq, waiting.request, (Slice(job.node, 1),), 0.0),
            ends_within_s=None if limit_s is None else max(0.0, limit_s - ran_s),
            yields=waiting.yields,
            is_leaving=job.leaves_s is not None,
            owner=waiting.owner,
            reservation=waiting.reservation,
        )

    def begin(self, job: Job, node: str) -> None:
        self.queue.remove(job)
        job.node, job.began_s = node, self.now_s
        self.active.append(job)
        self.num_starts += 1

    def check_wait(self, job: WaitingJob, wait: Wait, free: dict[str, int]) -> None:
        is_kept_back = kept_back(job, self.known, self.now_s)
        assert (wait.reason.code == KEPT_BACK) == is_kept_back, (job, wait)
        if is_kept_back:
            return
        usable = [n for n in NODES if may_use(job, n, self.known, self.now_s)]
        assert not any(free[node] for node in usable), (job, wait, free)
        if wait.reason.code == "reserved":
            self.num_reserved += 1
            closed = [node for node in NODES if node not in usable]
            causes = wait.reason.message.partition("reserved: ")[2]
            names = [one.name for one in self.known if f"'{one.name}'" in causes]
            for one in self.known:
                if one.name in names:
                    is_ending = must_leave_soon(job, one, self.now_s)
                    assert is_ending or not is_in(job, one), "its own is not in its way"
                    assert any(on(one, node) for node in closed)
            assert names, "the reason names a reservation"
            assert any(free[node] for node in closed) or not usable

    def check_nodes(self) -> None:
        """No job of others is on a reserved node, except for the time in which a job leaves if the
        reservation was created late, and except for jobs for which the reservation waits."""
        for one in self.known:
            begins_s, ends_s = seconds(one)
            since_s = max(begins_s, self.created_s[one.name] + LEAVE_S + 2 * TICK_S)
            if one.at_begin == "wait" or not since_s <= self.now_s < ends_s:
                continue
            for job in self.active:
                assert not on(one, job.node) or is_in(job.waiting, one), (one, job, self.now_s)


@cache
def played(seed: int) -> Play:
    play = Play(seed)
    play.run()
    return play


@pytest.mark.parametrize("seed", SEEDS)
def test_jobs_start_wherever_the_oracle_allows_it_and_nowhere_else(seed: int) -> None:
    assert played(seed).num_starts > 10, "the seed tests too little"


def test_the_seeds_cover_what_they_should() -> None:
    plays = [played(seed) for seed in SEEDS]
    assert sum(play.num_left for play in plays) > 5
    assert sum(play.num_reserved for play in plays) > 50
