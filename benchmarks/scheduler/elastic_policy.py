"""dray's policy in the replay, for jobs that can have any number of GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.scheduler.default_policy import DefaultPolicy
from benchmarks.scheduler.replay import GPUS_PER_NODE, NUM_NODES, Allocation, ReplayedJob
from service.domain.scheduling import policy
from service.domain.scheduling.elastic import sizing
from service.domain.scheduling.elastic.sizing import ElasticJob, ReportedStep
from service.domain.scheduling.placement import slots
from service.domain.scheduling.policy.batch_changes import batch_changes

MOST = NUM_NODES * GPUS_PER_NODE


class ElasticPolicy(DefaultPolicy):
    """Jobs report the duration of their steps and the noise of their gradients. A job that is
    resized releases its GPUs and resumes on others, with the batch size for these."""

    def __init__(self, *, knows_earlier: bool) -> None:
        """knows_earlier: whether reports of jobs are also used for other jobs of the same
        application."""
        super().__init__()
        self._knows_earlier = knows_earlier
        self._of_application: defaultdict[str, dict[tuple[int, int, int], ReportedStep]]
        self._of_application = defaultdict(dict)

    def _snapshot(
        self, jobs: Sequence[ReplayedJob], held: dict[str, dict[int, int]], now: float
    ) -> policy.Snapshot:
        for job in jobs:
            self._of_application[job.application.name] |= job.step_times
        snapshot = super()._snapshot(jobs, held, now)
        elastic = {job.name: self._elastic(job) for job in jobs}
        return replace(snapshot, elastic=elastic)

    def allocate(self, jobs: Sequence[ReplayedJob], now: float) -> Allocation:
        held = super().allocate(jobs, now)
        with_range = {job.name: job for job in jobs if job.batch_range and job.name in held}
        for name in self._started & with_range.keys():
            job, num_gpus = with_range[name], sum(held[name].values())
            job.change_batch(sizing.best_batch(self._elastic(job), num_gpus, GPUS_PER_NODE), now)
        snapshot = self._snapshot(jobs, {name: dict(on) for name, on in held.items()}, now)
        for name, size in batch_changes(snapshot, self._started).items():
            with_range[name].change_batch(size, now)
        return held

    def _running(
        self, job: ReplayedJob, seq: int, nodes: dict[int, int], now: float
    ) -> policy.RunningJob:
        running = super()._running(job, seq, nodes, now)
        return replace(running, same_batch_s=now - max(job.since_s, job.batch_since_s))

    def _elastic(self, job: ReplayedJob) -> ElasticJob:
        known = job.step_times
        if self._knows_earlier:
            known = self._of_application[job.application.name] | known
        return ElasticJob(
            least=1,
            most=MOST,
            batch_size=job.batch_size,
            micro_batch_size=job.application.most_local_size,
            step_times=tuple(known.values()),
            steps_left=job.steps_left,
            batch_range=job.batch_range,
            noise_scale=job.noise_scale,
        )

    def _request(self, job: ReplayedJob) -> slots.Request:
        return slots.Request(MOST, {"GPU": 1.0}, min_workers=1)
