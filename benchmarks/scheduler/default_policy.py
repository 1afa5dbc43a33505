"""dray's policy in the replay: the function that the service's loop calls."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime

from benchmarks.scheduler.replay import GPUS_PER_NODE, NUM_NODES, ROUND_S, Allocation, ReplayedJob
from ray_workers.shared.slices import Slice
from service.domain.scheduling import policy
from service.domain.scheduling.outlook import forecast
from service.domain.scheduling.placement import slots
from service.domain.scheduling.rules import shares
from service.domain.scheduling.rules.queues import DEFAULT

START = datetime(2026, 1, 1, tzinfo=UTC)
PRIORITY = 50
NODES = {str(node): {"GPU": float(GPUS_PER_NODE)} for node in range(NUM_NODES)}


class DefaultPolicy:
    """Jobs report the share of their steps that they have completed. All jobs with the same
    application, size and batch size are assumed to be alike."""

    def __init__(self) -> None:
        self._earlier: defaultdict[tuple[str, int, int], list[float]] = defaultdict(list)
        self._seen: dict[str, ReplayedJob] = {}
        self._used = shares.Used()
        self._num_left: Counter[str] = Counter()
        """How often each job has released its GPUs to others."""
        self._started: set[str] = set()
        """Jobs that started in this round."""
        self.calls_s: list[tuple[float, float]] = []
        """Elapsed time and CPU time of each call."""

    def allocate(self, jobs: Sequence[ReplayedJob], now: float) -> Allocation:
        """See `ReplayedPolicy`. Jobs release their GPUs at once: their restart costs the same under
        every policy."""
        self._learn(jobs)
        held = {job.name: dict(job.nodes) for job in jobs if job.nodes}
        self._started.clear()
        while True:
            decisions = self._plan(jobs, held, now)
            for decision in decisions:
                if isinstance(decision, policy.Start):
                    self._started.add(decision.job_id)
                    held[decision.job_id] = {
                        int(part.node_id): part.num_workers for part in decision.slices
                    }
            leaving = [d.job_id for d in decisions if isinstance(d, policy.Preempt)]
            if not leaving:
                left = [job.name for job in jobs if job.nodes and job.name not in held]
                self._num_left.update(left)
                self._count(jobs, held, now)
                return held
            for name in leaving:
                del held[name]

    def _count(
        self, jobs: Sequence[ReplayedJob], held: dict[str, dict[int, int]], now: float
    ) -> None:
        """Add the GPU use of the round that begins."""
        for job in jobs:
            share = sum(held.get(job.name, {}).values()) / (NUM_NODES * GPUS_PER_NODE)
            self._used.add((DEFAULT, job.user), share * ROUND_S, now)

    def _learn(self, jobs: Sequence[ReplayedJob]) -> None:
        active = {job.name: job for job in jobs}
        for name in [name for name in self._seen if name not in active]:
            job = self._seen.pop(name)
            self._earlier[_kind(job)].append(job.ran_s)
        self._seen |= active

    def _plan(
        self, jobs: Sequence[ReplayedJob], held: dict[str, dict[int, int]], now: float
    ) -> list[policy.Decision]:
        snapshot = self._snapshot(jobs, held, now)
        began = time.perf_counter(), time.thread_time()
        decisions = policy.plan(snapshot, START)
        took = time.perf_counter() - began[0], time.thread_time() - began[1]
        self.calls_s.append(took)
        return decisions

    def _snapshot(
        self, jobs: Sequence[ReplayedJob], held: dict[str, dict[int, int]], now: float
    ) -> policy.Snapshot:
        waiting = [self._waiting(job, seq, now) for seq, job in enumerate(jobs)]
        running = [
            self._running(job, seq, held[job.name], now)
            for seq, job in enumerate(jobs)
            if job.name in held
        ]
        queue = tuple(job for job in waiting if job.job_id not in held)
        holders = tuple(
            slots.Holder(job.job_id, _slices(held[job.job_id]), job.request.bundle)
            for job in waiting
            if job.job_id in held
        )
        nodes = tuple(
            slots.Node(name, total, slots.offered(total, total, slots.held_on(name, holders)))
            for name, total in NODES.items()
        )
        return policy.Snapshot(
            queue,
            nodes,
            connected=True,
            holders=holders,
            running=tuple(running),
            used_s=self._used.seconds(now),
        )

    def _waiting(self, job: ReplayedJob, seq: int, now: float) -> policy.WaitingJob:
        return policy.WaitingJob(
            job.name,
            attempt=0,
            priority=PRIORITY,
            seq=seq,
            request=self._request(job),
            left_s=self._left_s(job),
            waited_s=now - job.submitted_s - job.ran_s,
            yields=True,
            owner=job.user,
        )

    def _running(
        self, job: ReplayedJob, seq: int, nodes: dict[int, int], now: float
    ) -> policy.RunningJob:
        return policy.RunningJob(
            job.name,
            priority=PRIORITY,
            seq=seq,
            request=slots.Request(sum(nodes.values()), {"GPU": 1.0}),
            slices=_slices(nodes),
            held_s=0.0 if job.name in self._started else now - job.since_s,
            waited_s=now - job.submitted_s - job.ran_s,
            left_s=self._left_s(job),
            yields=True,
            owner=job.user,
            num_left=self._num_left[job.name],
        )

    def _request(self, job: ReplayedJob) -> slots.Request:
        return slots.Request(job.num_gpus, {"GPU": 1.0})

    def _left_s(self, job: ReplayedJob) -> float | None:
        return forecast.seconds_left(job.share_done, job.ran_s, self._earlier[_kind(job)])


def _kind(job: ReplayedJob) -> tuple[str, int, int]:
    return job.application.name, job.num_gpus, job.batch_size


def _slices(nodes: dict[int, int]) -> tuple[Slice, ...]:
    return tuple(Slice(str(node), count) for node, count in nodes.items())
