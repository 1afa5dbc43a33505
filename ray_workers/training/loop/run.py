"""One rank of a recipe, from its workload to the end of its training."""

from __future__ import annotations

from dray.spec import JobSpec
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.job_log import log
from ray_workers.training.core.workload import Workload
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from ray_workers.training.loop.trainer import Trainer, train


def run(task: RankTask, spec: JobSpec, workload: Workload, page: HeartbeatPage) -> None:
    """Train the workload as the document says, in every group that this rank is in.

    Preempted if the rank was asked to leave, and did.
    """
    if task.rank == 0 and task.incarnation == 0:
        for line in workload.about:
            log(line)
    rendezvous = RendezvousHandler(task, page)
    train(Trainer(task, spec, workload, page), rendezvous)
