"""A rank's training from its first group to its last."""

from __future__ import annotations

from dray.spec import JobSpec
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.job_log import log
from ray_workers.training.core.workload import Workload
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from ray_workers.training.loop.trainer import Trainer


def run(task: RankTask, spec: JobSpec, workload: Workload, page: HeartbeatPage) -> None:
    """Train the workload as the document says, through every generation of its group.

    From the newest checkpoint that is sound, or from the state of those who have one. Left if the
    rank was asked to leave.
    """
    if task.rank == 0 and task.incarnation == 0:
        for line in workload.about:
            log(line)
    membership = RendezvousHandler(task, page)
    loop = Trainer(task, spec, workload, page)
    try:
        while not _train(loop, membership):
            """In the next generation."""
    finally:
        loop.end()  # what was copied is committed, also after an error


def _train(loop: Trainer, membership: RendezvousHandler) -> bool:
    """Train in one generation of the group; False if it broke, and there is a place in the next."""
    try:
        membership.join(lambda: loop.take(membership.place))
        loop.enter()
        loop.fit(membership)
        loop.finish()
        membership.leave()
    except Exception as error:
        if not membership.may_follow(error):
            raise
        loop.leave_group()
        membership.follow(error)
        return False
    return True
