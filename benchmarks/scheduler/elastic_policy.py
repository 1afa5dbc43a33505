"""dray's own policy in the replay, of jobs that may have any number of GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.scheduler.default_policy import DefaultPolicy
from benchmarks.scheduler.replay import GPUS_PER_NODE, NUM_NODES, ReplayedJob
from service.domain.scheduling import policy, slots
from service.domain.scheduling.sizing import ElasticJob, ReportedStep

MOST = NUM_NODES * GPUS_PER_NODE


class ElasticPolicy(DefaultPolicy):
    """Jobs report the time of their steps. A resized job leaves its GPUs and resumes on others."""

    def __init__(self, *, knows_earlier: bool) -> None:
        """knows_earlier: what jobs of one application report counts for the others, too."""
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
        )

    def _request(self, job: ReplayedJob) -> slots.Request:
        return slots.Request(MOST, {"GPU": 1.0}, min_workers=1)
