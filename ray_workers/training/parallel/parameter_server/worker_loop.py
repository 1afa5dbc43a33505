"""The training loop of a worker that uses parameter servers. The stages of the loop are in
`Trainer`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from dray.train.kv.connection import ConnectionLost
from ray_workers.shared import heartbeat
from ray_workers.shared.heartbeat import RankPhase, TimeCategory
from ray_workers.training.core.compat_torch import Store
from ray_workers.training.core.progress import finish_if_marked, mark_finished
from ray_workers.training.elastic.rendezvous import MEETING_LIMIT_S, RendezvousHandler
from ray_workers.training.parallel.parameter_server.batch_dispatcher import CHIEF

if TYPE_CHECKING:
    from ray_workers.training.loop.trainer import Trainer
    from ray_workers.training.parallel.parameter_server.strategy import ParameterServerWorker


def train_served(
    trainer: Trainer, strategy: ParameterServerWorker, rendezvous: RendezvousHandler
) -> None:
    """Train with the servers' weights until no batches are left.

    Raises Preempted if the rank was asked to leave and has left. Raises ConnectionLost if a server
    without a replica is lost, because the server's part of the weights then exists only in the
    latest checkpoint.
    """
    try:
        store = rendezvous.meet_without_group()
        try:
            _train(trainer, strategy, rendezvous, store)
        except ConnectionLost:
            # When all other workers have finished, servers may exit before this worker does.
            if not finish_if_marked(store, trainer.page, rendezvous.assignment.generation):
                raise
        else:
            trainer.page.enter(RankPhase.FINISH, TimeCategory.USEFUL)
    finally:
        trainer.close()


def _train(
    trainer: Trainer, strategy: ParameterServerWorker, rendezvous: RendezvousHandler, store: Store
) -> None:
    trainer.page.enter(RankPhase.JOINING, TimeCategory.STARTING)
    strategy.connect(store, rendezvous.assignment.rank, timedelta(seconds=MEETING_LIMIT_S))
    if strategy.servers.is_ready:
        figures = heartbeat.figures_of_earlier_processes(trainer.task.page_prefix)
        strategy.servers.notes["figures"] = figures
    trainer.join_group(rendezvous.assignment)
    trainer.restore()
    strategy.begin(trainer.progress.step, trainer.state.peer_state_dict([]))
    with trainer.steps_are_timed(strategy.servers.sent_bytes, strategy.num_workers):
        _compute_batches(trainer, strategy)
    if trainer.rank == CHIEF:
        trainer.finish()
        mark_finished(store, trainer.progress.step)
        strategy.servers.finish()


def _compute_batches(trainer: Trainer, strategy: ParameterServerWorker) -> None:
    settled = strategy.settled
    strategy.take()
    if strategy.is_synchronous:
        norm = strategy.pull(None if strategy.batch is None else strategy.batch - 1)
        if trainer.rank == CHIEF and strategy.servers.is_ready and strategy.version:
            # The servers have applied this step, but the previous chief may have been lost before
            # it reported the step.
            trainer.report_unseen(strategy.version, strategy.loss, norm)
    while True:
        if trainer.rank == CHIEF:
            settled = _settle(trainer, strategy, settled)
            if trainer.is_over(settled):
                strategy.servers.stop()
                return
        if strategy.batch is None:
            return
        number = strategy.batch
        if not strategy.is_synchronous:
            trainer.checkpoints.hold()
            strategy.pull()
        batch = trainer.load_batch(number, first=number)
        before = trainer.progress.step
        loss = trainer.forward_backward(number, batch)
        grad_norm = trainer.update(number, loss)
        step = strategy.version
        if strategy.counted:
            loss = strategy.loss if strategy.is_synchronous else loss
            num_steps = max(1, step - before)
            trainer.report(step, batch, loss, grad_norm, num_steps, lr=strategy.applied_lr)
        trainer.commit(max(step, before))


def _settle(trainer: Trainer, strategy: ParameterServerWorker, settled: int) -> int:
    """Perform the evaluations and checkpoints that have become due since the step `settled`, and
    return the step up to which all of them are complete. If an evaluation and a checkpoint are both
    due, they use the same weights."""
    calendar = trainer.calendar
    step = trainer.progress.step if strategy.batch is not None else calendar.total_steps
    passed = range(settled + 1, step + 1)
    is_asked_to_leave = strategy.preemption_requested
    evaluates = any(map(calendar.evaluates_after, passed))
    saves = any(map(calendar.saves_after, passed)) or trainer.triggers.is_due(step)
    if not (evaluates or saves or is_asked_to_leave):
        return step
    trainer.checkpoints.hold()
    strategy.consolidate()
    step = strategy.version
    trainer.commit(step)
    if evaluates:
        trainer.evaluate(step)
    if saves or trainer.is_over(step):
        trainer.save(step)
    trainer.settle()
    strategy.note(step, trainer.state.peer_state_dict([]))
    if is_asked_to_leave:
        trainer.leave_with_checkpoint(step)
    return step
