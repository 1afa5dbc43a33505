"""The stages of one rank's training loop, in the order in which `train` calls them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from dray import train as api
from dray.spec import JobSpec
from ray_workers.shared.contracts import BATCH_SIZE, TOKENS, RankTask
from ray_workers.shared.heartbeat import HeartbeatPage, RankAssignment, RankPhase, TimeCategory
from ray_workers.shared.job_log import log
from ray_workers.training import devices
from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.checkpoint.peer_memory import PeerMemory
from ray_workers.training.checkpoint.save_group import SaveGroup
from ray_workers.training.checkpoint.triggers import CheckpointTriggers
from ray_workers.training.core.divergence import Divergence
from ray_workers.training.core.errors import DifferentDataError, Preempted
from ray_workers.training.core.faultpoints import FaultPoint, faultpoint
from ray_workers.training.core.progress import NOTHING, Progress
from ray_workers.training.core.schedule import LearningRates
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.data.prefetcher import Feed, Feeding
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.elastic import process_group
from ray_workers.training.loop import result
from ray_workers.training.loop.client_evaluation import evaluation_of
from ray_workers.training.loop.comm_metrics import CommMetrics
from ray_workers.training.loop.profiler import Profiler
from ray_workers.training.loop.replica_check import ReplicaCheck
from ray_workers.training.loop.step_reporter import Batch, StepFigures, StepReporter
from ray_workers.training.loop.training_state import TrainingState
from ray_workers.training.parallel import StrategyContext, calendar_of, strategy_of
from ray_workers.training.parallel.gradients import Pass

NOWHERE = -1
"""The rank of a process that does not belong to a group."""


class Trainer:
    """The training of one rank: its state between two steps, and each stage of the loop."""

    def __init__(
        self, task: RankTask, spec: JobSpec, workload: Workload, page: HeartbeatPage
    ) -> None:
        self.task, self.spec = task, spec
        self.options = options = spec.train
        self.workload = workload
        self.page = page
        self.device = torch.device(task.device)
        self.samples = on_device(workload.train, self.device)
        self.calendar = calendar_of(spec, workload)
        self._rates = LearningRates(options, self.calendar.total_steps, len(workload.train))
        given = StrategyContext(
            *(spec, workload, self.device, self.calendar, page),
            rounds_url=task.rounds_url,
            worker_index=task.rank,
        )
        self.strategy = strategy_of(given)
        self.comm_metrics: CommMetrics | None = None
        self.evaluation = evaluation_of(given, self.strategy)
        self.profiler = Profiler(spec.profile, self.device)
        self.divergence = Divergence(options.on_divergence, is_scaled=options.precision == "fp16")
        self.reporter = StepReporter(self.calendar.total_steps, page, self.device, self.divergence)
        self._furthest_step = task.furthest_step
        rule = spec.checkpoint
        self.checkpoints = CheckpointManager(
            task.checkpoint_url, keep=rule.keep, best=rule.best, progressed=page.move
        )
        self.triggers = CheckpointTriggers.of(task, self.checkpoints, self.calendar)
        every = None if spec.check is None else spec.check.replicas_every
        self.replica_check = ReplicaCheck(every, self.device, self.checkpoints.agreed_at)
        self.state = TrainingState(
            task, spec, workload, self.calendar, self.strategy, self.reporter
        )
        self.memory = PeerMemory(spec, lambda: self.state.peer_state_dict(page.kept()))
        self.prefetcher: Feed | None = None
        """Reads this rank's part of the data while the rank is in a group."""
        self.assignment: RankAssignment
        self.rank, self.was_rank, self.world_size = NOWHERE, NOWHERE, 0

    @property
    def progress(self) -> Progress:
        """The progress of this rank."""
        return self.state.progress

    # Methods that join a group and restore the latest state.

    def join_group(self, assignment: RankAssignment) -> None:
        """Join a group that was just formed. A collective operation."""
        use = TimeCategory.RECOVERING if assignment.generation else TimeCategory.STARTING
        self.page.enter(RankPhase.JOINING, use)
        self.assignment = assignment
        self.rank, self.world_size = assignment.rank, assignment.world_size
        self.strategy.join_group(assignment.rank, assignment.world_size)
        self.memory.join(assignment.rank, assignment.world_size, self.device)

    def restore(self) -> None:
        """Restore the latest state. A collective operation.

        A rank of a broken group keeps its state, and new ranks receive this state. If no rank has a
        state, the latest intact checkpoint is loaded; if there is no such checkpoint, training
        starts from the beginning.
        """
        faultpoint(FaultPoint.GROUP_JOINED, self.progress.step, self)
        self.evaluation.take(self.strategy.evaluated_part(), self.world_size)
        self.reporter.rank = self.profiler.rank = self.rank
        self.prefetcher = self.strategy.feed(self.samples)
        if not self._all_agree(int(self.workload.fingerprint[:15], 16)):
            raise DifferentDataError("ranks", self.workload.fingerprint)
        number = self.progress.number
        self._furthest_step = max(self._furthest_step, self.progress.step)
        refuse = partial(self.replica_check.refuse, self.strategy)
        newest = self.state.sync(self.memory, self.page.kept(), refuse)
        if newest == NOTHING:
            self.state.resume(self.checkpoints, self._all_agree, self.rank, self.world_size)
        if self.spec.is_divided:
            self.triggers.join(SaveGroup.of(self.task, self.assignment, self.page), self.device)
        if self.assignment.batch_size is not None:
            self.state.batch_size = self.assignment.batch_size
        self.prefetcher.end_batches(self._last_of, self.progress.step + 1)
        self.strategy.prepare(self.prefetcher, self.progress.step)
        self.comm_metrics = CommMetrics.of(self.spec.sync, self.strategy)
        if self.rank == 0 and newest != NOTHING and (self.was_rank != 0 or number < newest):
            self._take_over()
        self.was_rank = self.rank
        if newest == NOTHING:
            self.replica_check.begins_at(self.progress.step)
        else:
            self.replica_check.regrouped_at(self.progress.step, self.rank, self.state.is_compared)
        self.memory.begin_copy(self.progress, self.strategy.model.buffers())
        self.page.begin(self.assignment.generation, self.progress.step)
        faultpoint(FaultPoint.RESTORED, self.progress.step, self)

    def _all_agree(self, number: int) -> bool:
        return process_group.all_same(number, self.device, self.world_size)

    def _take_over(self) -> None:
        """Take over from a dead rank 0: report everything that it did not report, and save a
        checkpoint in case one was due."""
        self.state.report_unreported(self.page.kept())
        self.checkpoints.adopt_own()
        if self.progress.step and self.strategy.saves_alone:
            self._begin_save(self.progress.step)

    @contextmanager
    def steps_are_timed(
        self, sent_bytes: Callable[[], int | None], num_ranks: int
    ) -> Iterator[None]:
        """Time and report each step within this context. sent_bytes: returns the number of bytes
        that this rank has sent to other ranks. num_ranks: number of ranks that train together."""
        self.reporter.restart_clock()
        if self.comm_metrics is not None:
            self.comm_metrics.watch(sent_bytes, num_ranks)
        self.triggers.starts_at(self.progress.step, self.world_size)
        try:
            yield
        finally:
            # After an error, the device might not respond, so report the metrics read so far.
            self.reporter.flush(wait_for_device=False)

    # One optimizer step: the mean gradient over one global batch.

    def steps(self) -> Iterator[int]:
        """Yield the last completed step, and then the last step of each subsequent batch."""
        yield self.progress.step
        while True:
            yield self._last_of(self.progress.step + 1)

    def _last_of(self, first: int) -> int:
        """Return the last step of the batch that begins with the given step. It is the same step
        unless the document specifies a range of batch sizes."""
        num_steps = self.state.batch_size // self.options.samples_per_step
        return self.calendar.last_of(first, num_steps)

    def load_batch(self, step: int, first: int | None = None) -> Batch:
        """Load this rank's samples of the step to its device. first: the first step of the batch,
        if it is not the step after the last completed step."""
        faultpoint(FaultPoint.STEP_BEGINS, step, self)
        assert self.prefetcher is not None
        self.page.enter(RankPhase.DATA, TimeCategory.DATA_WAIT)
        if self.comm_metrics is not None:
            self.comm_metrics.begin_step()
        self.profiler.begin_step(step)
        began = time.perf_counter()
        feed = self.prefetcher.at(self.progress.step + 1 if first is None else first)
        wait_s = time.perf_counter() - began
        self.profiler.data_came()
        batch = Batch(feed, began, wait_s)
        faultpoint(FaultPoint.DATA_LOADED, step, batch)
        return batch

    def optimizer_steps(self, step: int, batch: Batch) -> Iterator[Batch]:
        """Iterate over the parts of the step that this rank computes, each followed by an optimizer
        step. A step has only one part, unless each rank trains at its own speed."""
        for shares in self.strategy.optimizer_steps(step, batch.feed.shares):
            yield batch._replace(feed=Feeding(batch.feed.num_global, shares))

    def forward_backward(self, step: int, batch: Batch) -> Tensor:
        """Compute the gradient of the global batch, which is equal on all ranks, and return the
        result of `take_loss()`."""
        strategy = self.strategy

        def seed_share(number: int) -> None:
            faultpoint(FaultPoint.SHARE_BEGINS, step, batch)
            # Dropout depends only on (seed, step, share), so generator states are not saved.
            seed = derive_seed("step", self.options.seed, step, number, *strategy.coordinates)
            devices.seed(self.device, seed)

        alone_until: list[float] = []

        def before_exchange() -> None:
            alone_until.append(time.perf_counter())
            faultpoint(FaultPoint.BEFORE_EXCHANGE, step, self)
            self.page.exchange()

        scale = strategy.update.loss_scale()
        self.page.enter(RankPhase.COMPUTE, self._time_of(step))
        began = time.perf_counter()
        strategy.gradients.backward(Pass(batch.feed.shares, scale, seed_share, before_exchange))
        if self.comm_metrics is not None:
            alone_until.append(time.perf_counter())  # used if there was no exchange
            self.comm_metrics.computed(alone_until[0] - began)
        faultpoint(FaultPoint.BACKWARD_DONE, step, self)
        loss = strategy.gradients.take_loss()
        return loss if scale is None else loss / scale

    def update(self, step: int, loss: Tensor) -> Tensor:
        """Run the optimizer step, and return the gradient norm before clipping, on the device."""
        faultpoint(FaultPoint.BEFORE_OPTIMIZER, step, self)
        self.strategy.gradients.wait()
        if self.options.on_divergence != "warn":  # otherwise, each further step would be compared
            self.replica_check.before_update(self.progress.step, loss, self.strategy)
        self.page.enter(RankPhase.UPDATE, self._time_of(step))
        self.checkpoints.hold()
        self.memory.hold()
        grad_norm = self.strategy.update.step(self._lr_at(step))
        faultpoint(FaultPoint.AFTER_OPTIMIZER, step, self)
        self.strategy.after_step(step)
        return grad_norm

    def report(
        self,
        step: int,
        batch: Batch,
        loss: Tensor,
        grad_norm: Tensor,
        num_steps: int = 1,
        lr: float | None = None,
    ) -> None:
        """Record the metrics of the step, to be written in the next steps. num_steps: steps since
        the last report, if ranks run concurrently. lr: the learning rate; by default, the rate of
        the schedule."""
        loss, measured = self.strategy.gradients.divided(loss)
        has_batch_size = self.rank == 0 and self.options.batch_range is not None
        each = self.workload.inputs_per_token
        self.reporter.step_done(
            StepFigures(
                step=step,
                epoch=self.calendar.epoch_of(step),
                num_samples=batch.feed.num_global * num_steps,
                lr=self._lr_at(step) if lr is None else lr,
                data_wait_s=batch.wait_s,
                loss=loss,
                grad_norm=grad_norm,
                measured=measured,
                more={
                    **(self.comm_metrics.of_step() if self.comm_metrics else {}),
                    **self.strategy.gradients.step_metrics(),
                    **({BATCH_SIZE: float(self.state.batch_size)} if has_batch_size else {}),
                    **({TOKENS: batch.feed.num_inputs / each} if each else {}),
                },
            )
        )
        seconds = time.perf_counter() - batch.began
        self.memory.step_took(step, seconds)
        if self.rank == 0 or self.spec.is_divided:
            self.triggers.step_took(step, seconds)
        self.profiler.end_step(step)
        faultpoint(FaultPoint.STEP_ENDS, step, self)

    def commit(self, step: int) -> None:
        """Mark the step as completed, regardless of what happens to the group."""
        self.state.progress = Progress.just_after(step)
        self.page.commit(step)

    def check_replicas(self, step: int) -> None:
        """Compare the replicas if a comparison is due or if a checkpoint will be saved."""
        is_saved = self.calendar.saves_after(step)
        self.replica_check.after_step(step, self.strategy, is_saved=is_saved)

    def _time_of(self, step: int) -> TimeCategory:
        return TimeCategory.RECOMPUTED if step <= self._furthest_step else TimeCategory.USEFUL

    def report_unseen(self, step: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Report a step whose end the previous process of this rank might not have seen."""
        lr, epoch = self._rates.of(step, step), self.calendar.epoch_of(step)
        self.reporter.report_unseen(step, epoch, lr, loss.item(), grad_norm.item())

    def _lr_at(self, step: int) -> float:
        """Return the learning rate of the uncommitted batch that ends with this step."""
        return self._rates.of(self.progress.step + 1, step)

    # Methods for the evaluation and the checkpoint after a step. The metrics are reported before
    # the checkpoint.

    def evaluates_after(self, step: int) -> bool:
        return self.calendar.evaluates_after(step)

    def evaluate(self, step: int) -> None:
        """Evaluate on the validation split. A collective operation: every rank gets the result, and
        decides whether to continue."""
        self.reporter.flush()
        self.page.enter(RankPhase.EVALUATE, TimeCategory.USEFUL)
        faultpoint(FaultPoint.BEFORE_EVALUATION, step, self)
        began = time.perf_counter()
        state, rule = self.state, self.options.early_stopping
        measured = self.evaluation.measure(step)
        process_group.wait_for_results(self.device)
        faultpoint(FaultPoint.AFTER_EVALUATION, step, self)
        if rule is not None and step != state.measured_at:  # not a repeated evaluation
            state.early_stopping = state.early_stopping.after(rule, measured)
        state.metrics = measured | {"train/loss": self.reporter.last_loss}
        state.measured_at = step
        self.divergence.evaluated(self.rank, step, measured["val/loss"])
        more = self.comm_metrics.of_all(self.device, self.world_size) if self.comm_metrics else {}
        process_group.wait_for_results(self.device)
        if self.rank == 0:
            more |= self.strategy.evaluation_metrics()
            api.report(step, measured | more | {"perf/eval_time_s": time.perf_counter() - began})
            print(result.of_evaluation(self.calendar, step, state.metrics))  # noqa: T201
        self.reporter.restart_clock()

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due because of `calendar`, early stopping, or measurements;
        unless the model is divided, only rank 0 needs the measurements."""
        is_stopped = self.evaluates_after(step) and self._is_stopped()
        is_due = (self.rank == 0 or self.spec.is_divided) and self.triggers.is_due(step)
        return self.calendar.saves_after(step) or is_stopped or is_due

    def save(self, step: int) -> None:
        """Begin a checkpoint, which is written during the next steps. A collective operation if
        rank 0 does not have the whole state."""
        self.reporter.flush()
        if self.rank == 0 or not self.strategy.saves_alone:
            self._begin_save(step)
            faultpoint(FaultPoint.SAVE_BEGUN, step, self)
        self.reporter.restart_clock()

    def _begin_save(self, step: int) -> None:
        """Save on rank 0 or, if the state is divided, on all ranks."""
        self.page.enter(RankPhase.SAVE, TimeCategory.CHECKPOINTING)
        self.strategy.consolidate()
        if self.rank != 0 and not self.spec.is_divided:
            return
        is_due = not self.divergence.forbids_saving
        if not is_due and self.rank == 0:
            log(
                f"the checkpoint of step {step} is not saved because the loss or the gradient was "
                "not finite in the last steps"
            )
        if self.spec.is_divided:  # all ranks begin the same saves, and one at a time
            self.replica_check.compare(step, self.strategy)
            self.triggers.settle(step)
            is_due = is_due and not self.checkpoints.has(step)
            is_due = process_group.rank_0s(is_due, self.rank, self.device, self.world_size)
            if is_due:
                self.memory.ask(step)
        if is_due:
            about, state = self.state.of_checkpoint(step, self.world_size)
            self.triggers.save(about, state, volatile=self.strategy.model.buffers())

    def settle(self) -> None:
        """Mark all tasks that were due after the last step as done."""
        self.state.progress = self.progress.settled()
        self.memory.begin_copy(self.progress, self.strategy.model.buffers())

    def is_over(self, step: int) -> bool:
        return step >= self.calendar.total_steps or self._is_stopped()

    def _is_stopped(self) -> bool:
        rule = self.options.early_stopping
        return rule is not None and self.state.early_stopping.is_over(rule)

    def leave_with_checkpoint(self, step: int) -> None:
        """Save as after a step. Rank 0 then raises Preempted. Without rank 0, the other ranks can't
        run another step, and the supervisor ends these ranks."""
        self.reporter.flush()
        if step:
            self._begin_save(step)
        if self.spec.is_divided:
            self.checkpoints.wait()  # while all ranks exist
        if self.rank == 0:
            raise Preempted

    def finish(self) -> None:
        """Store the result only on rank 0, except for the weights of a divided model. The other
        ranks wait until the result is stored, so that the group can store the result again if a
        rank dies."""
        step = self.progress.step
        faultpoint(FaultPoint.BEFORE_RESULT, step, self)
        self.page.enter(RankPhase.FINISH, TimeCategory.USEFUL)
        self.reporter.flush()
        self.replica_check.compare(step, self.strategy)
        metrics = self.state.metrics
        self.divergence.check_end(metrics.get("val/loss", math.nan))
        self.checkpoints.wait()
        self.memory.finish(self.page.move)
        trained = result.trained(self.strategy, self.spec.parallel, waiting=self.page.move)
        self.profiler.finish(step)
        if self.rank == 0:
            assert trained is not None
            result.log_end(self.spec, step, self.calendar.total_steps)
            result.store(self.workload, trained, metrics, step, waiting=self.page.move)
            faultpoint(FaultPoint.RESULT_WRITTEN, step, self)
        process_group.wait_for_all(self.device, self.world_size)

    def leave_group(self) -> None:
        """Leave a broken group, and discard the unfinished step."""
        if self.rank == NOWHERE:
            return
        self.reporter.flush()  # of the last complete step; the device responds again
        self.checkpoints.disband()
        self.memory.leave()
        self.profiler.break_off()
        self.strategy.leave_group()
        if self.prefetcher is not None:
            self.prefetcher.close()
        self.rank = NOWHERE

    def close(self) -> None:
        """Commit the checkpoint that is being saved, and stop the prefetcher."""
        self.checkpoints.disband()
        self.checkpoints.wait()
        self.checkpoints.tidy()
        if self.rank != NOWHERE and self.prefetcher is not None:
            self.prefetcher.close()
