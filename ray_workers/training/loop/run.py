"""The training loop of one rank of a recipe. `Trainer` implements the stages of the loop."""

from __future__ import annotations

from collections.abc import Callable

from dray.spec import JobSpec
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.job_log import log
from ray_workers.training.core.errors import LeaveRequested, UnendingOperationError
from ray_workers.training.core.workload import Workload
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from ray_workers.training.loop.result import store_files
from ray_workers.training.loop.trainer import Trainer


def run(
    task: RankTask,
    spec: JobSpec,
    workload: Workload,
    page: HeartbeatPage,
    end_with: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Train the workload as the document specifies, in every group that this rank joins.

    end_with: calls a function, and then ends the process; used if the calling thread can't
        continue. Raises Preempted if the rank has left on request.
    """
    if task.rank == 0 and task.incarnation == 0:
        for line in workload.about:
            log(line)
        store_files(workload.files)
    rendezvous = RendezvousHandler(task, page)
    trainer = Trainer(task, spec, workload, page)

    def train_on() -> None:
        log(
            "gloo did not end an operation of the broken group: training continues in another "
            "thread"
        )
        train(trainer, rendezvous, UnendingOperationError())

    if end_with is not None:
        rendezvous.hand_over_to(lambda: end_with(train_on))
    trainer.strategy.run(trainer, rendezvous, train)


def train(trainer: Trainer, rendezvous: RendezvousHandler, broken: Exception | None = None) -> None:
    """Train one rank until the end of its job, in every group that it joins.

    A group breaks when one of its ranks dies or hangs, or when its size is to change. The other
    ranks leave the group, discard the current step, keep the rest of their state, and meet in the
    next round of the rendezvous. Raises Preempted if the rank has left on request.

    broken: why the rank must first leave a group that it has joined in another thread.
    """
    try:
        if broken is not None:
            _leave_group(trainer, rendezvous, broken)
        while True:
            try:
                _train_in_group(trainer, rendezvous)
                return
            except LeaveRequested:
                trainer.leave_with_checkpoint(trainer.progress.step)
            except Exception as error:
                rendezvous.park_if_replaced()
                if not rendezvous.may_follow(error):
                    raise
                _leave_group(trainer, rendezvous, error)
    finally:
        trainer.close()  # even after an error, commits a checkpoint whose state has been copied


def _leave_group(trainer: Trainer, rendezvous: RendezvousHandler, error: Exception) -> None:
    rendezvous.break_group()
    trainer.leave_group()
    rendezvous.follow(error)


def _train_in_group(trainer: Trainer, rendezvous: RendezvousHandler) -> None:
    rendezvous.join(lambda: trainer.join_group(rendezvous.assignment))
    trainer.restore()
    with trainer.steps_are_timed(rendezvous.sent_bytes, trainer.world_size):
        for step in trainer.steps():
            if step > trainer.progress.step:
                rendezvous.check_together()  # raises GroupChanged
                batch = trainer.load_batch(step)
                for part in trainer.optimizer_steps(step, batch):
                    loss = trainer.forward_backward(step, part)
                    grad_norm = trainer.update(step, loss)
                trainer.report(step, batch, loss, grad_norm)
                trainer.commit(step)
                trainer.check_replicas(step)
            if not trainer.progress.is_settled:  # also if a group broke after a step
                if trainer.evaluates_after(step):
                    trainer.evaluate(step)
                if trainer.saves_after(step):
                    trainer.save(step)
                trainer.settle()
            if trainer.strategy.preemption_requested:
                trainer.leave_with_checkpoint(step)
            if trainer.is_over(step):
                break
    trainer.finish()
    rendezvous.leave()
