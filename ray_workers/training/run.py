"""A rank's training from its first group to its last."""

from __future__ import annotations

from dray.spec import JobSpec
from ray_workers.contracts import RankTask
from ray_workers.pages import Page
from ray_workers.training.loop import Loop
from ray_workers.training.membership import Membership
from ray_workers.training.workload import Workload


def run(task: RankTask, spec: JobSpec, workload: Workload, page: Page) -> None:
    """Train the workload as the document says, through every generation of its group.

    From the newest checkpoint that is sound, or from the state of those who have one. Left if the
    rank was asked to leave.
    """
    membership = Membership(task, page)
    loop = Loop(task, spec, workload, page)
    try:
        while not _train(loop, membership):
            """In the next generation."""
    finally:
        loop.end()  # what was copied is committed, also after an error


def _train(loop: Loop, membership: Membership) -> bool:
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
        loop.let_go()
        membership.follow(error)
        return False
    return True
