"""Alternatives to the policy's rule for the order, run by a small copy of the policy's round.

The copy supports only what the replay requires: one resource, one queue, and jobs that all save
their state. With the policy's own rule, it makes exactly the same decisions as the policy, ten
times as fast, so that a rule can be tried on many workloads before it is added to the policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.scheduler.default_policy import DefaultPolicy
from benchmarks.scheduler.replay import GPUS_PER_NODE, NUM_NODES, ReplayedJob
from ray_workers.shared.contracts import Slice
from service.domain.scheduling import policy
from service.domain.scheduling.placement.gangs import SIZE_POWER
from service.domain.scheduling.rules import eviction, order, shares
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.scheduling.rules.queues import DEFAULT

NUM_GPUS = NUM_NODES * GPUS_PER_NODE
BY_NAME = sorted(range(NUM_NODES), key=str)

Held = dict[str, dict[int, int]]
"""Number of GPUs by node, for each job that has any."""


@dataclass(frozen=True)
class Rule:
    """A rule: the policy's own rule, except for the changes in these fields."""

    name: str
    most_work: float = math.inf
    """Jobs with at least this much work left count as equal: they run in the order of submission,
    and a running job is displaced for any of them that was submitted before it."""
    keeps_gangs: bool = False
    """Whether a gang is displaced only if jobs ahead of it can use all of its slots."""
    fills: bool = False
    """Whether a gang of which more than half would fit on idle slots displaces smaller jobs from
    the rest."""


class Standing(NamedTuple):
    """The position of a job in the order. The lowest comes first."""

    user_is_ahead: bool
    work: float
    seq: int


class WeighedPolicy(DefaultPolicy):
    """The default policy with a different rule."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self._rule = rule

    def _plan(self, jobs: Sequence[ReplayedJob], held: Held, now: float) -> list[policy.Decision]:
        """Return the decisions to start and to leave. Once no job leaves, one gang can fill idle
        slots. The jobs that it displaces are removed from `held` immediately."""
        plan = _Plan(self._rule, jobs, held, self._standings(jobs, now), self._may_leave(jobs, now))
        plan.serve()
        started = plan.started
        if self._rule.fills and not plan.leaving:
            started |= plan.fill(self._started)
        starts = [
            policy.Start(name, tuple(Slice(str(node), num) for node, num in nodes.items()))
            for name, nodes in started.items()
        ]
        why = Reason("preempted", "leaves its slots")
        return [*starts, *(policy.Preempt(name, why, "") for name in plan.leaving)]

    def _standings(self, jobs: Sequence[ReplayedJob], now: float) -> dict[str, Standing]:
        accounts = {(DEFAULT, job.user) for job in jobs}
        users = shares.Standings((), self._used.seconds(now), accounts)
        found = {}
        for seq, job in enumerate(jobs):
            weight = (job.num_gpus / NUM_GPUS) ** SIZE_POWER
            waited_s = now - job.submitted_s - job.ran_s
            work = min(self._rule.most_work, order.work_left(self._left_s(job), weight, waited_s))
            found[job.name] = Standing(users.user_is_ahead(DEFAULT, job.user), work, seq)
        return found

    def _may_leave(self, jobs: Sequence[ReplayedJob], now: float) -> set[str]:
        """Return the jobs that have held their GPUs for long enough."""
        return {
            job.name
            for job in jobs
            if job.name not in self._started and now - job.since_s >= eviction.MIN_RUN_S
        }


class _Plan:
    """One round."""

    def __init__(
        self,
        rule: Rule,
        jobs: Sequence[ReplayedJob],
        held: Held,
        standings: Mapping[str, Standing],
        may_leave: set[str],
    ) -> None:
        self._rule = rule
        self._held = held
        self._of = standings
        self._may_leave = may_leave
        self._size = {job.name: job.num_gpus for job in jobs}
        self._waiting = sorted(set(self._size) - held.keys(), key=standings.__getitem__)
        self._cheapest = sorted(
            held, key=lambda name: (-standings[name].work, -standings[name].seq)
        )
        self._idle = NUM_GPUS - sum(self._size[name] for name in held)
        """Number of idle GPUs when the round begins."""
        self.started: Held = {}
        self.leaving: list[str] = []

    def serve(self) -> None:
        """Start jobs in order, displacing other jobs if necessary."""
        now = _free(self._held)
        soon = list(now)
        for name in self._waiting:
            size = self._size[name]
            if sum(soon) >= size and sum(now) >= size:
                self.started[name] = _pack(now, size)
                for node, num in self.started[name].items():
                    soon[node] -= num
                continue
            if sum(soon) < size:
                asked = self._victims(
                    [each for each in self._cheapest if self._may_evict(name, each)],
                    size - sum(soon),
                )
                if not asked:
                    continue
                self.leaving += asked
                for node, num in (part for each in asked for part in self._held[each].items()):
                    soon[node] += num
            for node in _pack(soon, size):
                now[node] = min(now[node], soon[node])

    def fill(self, started: set[str]) -> Held:
        """Start at most one gang that fills idle slots. started: jobs started in this round, which
        are not displaced."""
        held = self._held | self.started
        free = NUM_GPUS - sum(self._size[name] for name in held)
        for name in self._waiting:
            size = self._size[name]
            if name in held or free < size / 2:
                continue
            narrower = [
                each
                for each in sorted(held, key=lambda one: -self._of[one].work)
                if each in self._may_leave - started - self.started.keys()
                and self._size[each] < size
                and self._of[each].user_is_ahead >= self._of[name].user_is_ahead
                and self._of[each].work > 0
            ]
            asked = self._victims(narrower, size - free)
            if asked and sum(self._size[each] for each in asked) < free:
                for each in asked:
                    del self._held[each]
                return {name: _pack(_free(self._held | self.started), size)}
        return {}

    def _victims(self, candidates: Sequence[str], lacking: int) -> list[str]:
        """Return the first candidates that suffice, without unnecessary ones."""
        chosen: list[str] = []
        freed = 0
        for name in candidates:
            chosen.append(name)
            freed += self._size[name]
            if freed >= lacking:
                break
        else:
            return []
        needed = []
        for name in reversed(chosen):
            if freed - self._size[name] >= lacking:
                freed -= self._size[name]
            else:
                needed.append(name)
        return needed[::-1]

    def _may_evict(self, coming: str, running: str) -> bool:
        ours, theirs = self._of[coming], self._of[running]
        if running in self.leaving or running not in self._may_leave or ours >= theirs:
            return False
        is_owed = ours.user_is_ahead < theirs.user_is_ahead
        has_less = theirs.work > 0 and ours.work < eviction.CLEARLY_LESS * theirs.work
        both_long = min(ours.work, theirs.work) >= self._rule.most_work
        if not (is_owed or has_less or both_long):
            return False
        is_wider = self._size[running] > self._size[coming]
        return is_owed or not (self._rule.keeps_gangs and is_wider) or self._is_used(running)

    def _is_used(self, running: str) -> bool:
        """Return whether jobs ahead of a gang can use all of its slots."""
        ahead = sum(
            self._size[name]
            for name in self._waiting
            if name not in self.started and self._of[name] < self._of[running]
        )
        return ahead + self._idle >= self._size[running]


def _free(held: Held) -> list[int]:
    free = [GPUS_PER_NODE] * NUM_NODES
    for nodes in held.values():
        for node, num in nodes.items():
            free[node] -= num
    return free


def _pack(free: list[int], size: int) -> dict[int, int]:
    """Return GPUs by node, subtracted from `free`, chosen like in `placement`."""
    found: dict[int, int] = {}
    while size:
        fitting = [node for node in BY_NAME if free[node] >= size]
        if fitting:
            node = min(fitting, key=free.__getitem__)
            num = size
        else:
            node = max(BY_NAME, key=free.__getitem__)
            num = free[node]
        found[node] = num
        free[node] -= num
        size -= num
    return found
