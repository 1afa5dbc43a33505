"""An in-memory cluster on which every job reports one step per second indefinitely."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Mapping

from benchmarks.many_jobs import jobs, workload
from benchmarks.still_cluster import StillCluster, node
from ray_workers.shared.contracts import Phase, PollReply
from service.cluster.port import AttemptRef, ClusterSnapshot

NODE = {"CPU": float(workload.NUM_RANKS), "memory": 64.0 * 2**30}
MAX_STEPS = 200
"""Maximum steps in one reply, about as many as the byte limit allows."""


class ReportingCluster(StillCluster):
    """Implements the port `Cluster` for the jobs of `jobs.write`, each on a separate node.

    A reply's frames are unpickled for each job, like the gateway's replies.
    """

    def __init__(self, num_jobs: int) -> None:
        self._num_jobs = num_jobs
        nodes = tuple(
            node(jobs.node_of(n), NODE, dict.fromkeys(NODE, 0.0)) for n in range(num_jobs)
        )
        self._snapshot = ClusterSnapshot(jobs.SESSION, "memory:0", None, False, nodes)
        self._began: list[float] = [0.0] * workload.NUM_PHASES
        """Unix time of step 0, by phase."""
        self._reported: dict[str, list[float]] = {}
        """Report times of steps that were returned but are not stored yet, by job."""

    async def start(self) -> None:
        """Make the next step of every job its first step in this measurement."""
        now = time.time()
        for phase in range(workload.NUM_PHASES):
            done_s = workload.first_step(phase) * workload.PERIOD_S
            self._began[phase] = now + workload.offset_s(phase) - done_s

    async def poll(
        self, ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        known = workload.step_at(dict(cursor))
        began = self._began[jobs.phase_of(_number(ref.job_id))]
        wait_s = min(wait_s, began + (known + 1) * workload.PERIOD_S - time.time())
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        newest = int((time.time() - began) / workload.PERIOD_S)
        last = min(newest, known + MAX_STEPS)
        if last <= known:
            return PollReply(dict(cursor), Phase.RUNNING, {}, (), False, None, ())
        frames = pickle.loads(workload.pickled(known + 1, last, began))
        self._reported.setdefault(ref.job_id, []).extend(
            began + step * workload.PERIOD_S for step in range(known + 1, last + 1)
        )
        return PollReply(
            workload.cursor_at(last), Phase.RUNNING, {}, frames, last < newest, None, ()
        )

    def stored(self, job_id: str) -> list[float]:
        """Record that all returned steps of the job are stored. Returns when they were reported."""
        return self._reported.pop(job_id, [])

    async def snapshot(self) -> ClusterSnapshot:
        return self._snapshot

    async def attempts(self) -> list[AttemptRef]:
        names = ((jobs.RUNNING.format(n), jobs.node_of(n)) for n in range(self._num_jobs))
        return [AttemptRef(job_id, 1, jobs.SESSION, (node_id,)) for job_id, node_id in names]


def _number(job_id: str) -> int:
    return int(job_id.rpartition("-")[2])
