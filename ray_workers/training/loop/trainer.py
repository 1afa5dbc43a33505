"""The training loop of one rank. It reads from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from dray import train
from dray.spec import JobSpec
from dray.train import storage_room
from ray_workers.shared import job_log
from ray_workers.shared.contracts import FrameKind, RankTask
from ray_workers.shared.heartbeat import (
    HeartbeatPage,
    RankAssignment,
    RankPhase,
    TimeCategory,
    UnreportedStep,
)
from ray_workers.training import devices
from ray_workers.training.checkpoint import checkpoint_files, resuming
from ray_workers.training.checkpoint.checkpoint_files import CheckpointMetadata, LoadedCheckpoint
from ray_workers.training.checkpoint.interval import CheckpointInterval
from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.checkpoint.triggers import CheckpointTriggers
from ray_workers.training.core.divergence import Divergence
from ray_workers.training.core.early_stopping import EarlyStoppingState
from ray_workers.training.core.errors import BrokenCheckpointError, DataError
from ray_workers.training.core.progress import NO_STATE, NOTHING, Progress
from ray_workers.training.core.schedule import Calendar, lr_at, scaled_lr
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.data.prefetcher import Prefetcher
from ray_workers.training.data.sampler import (
    DistributedBatchSampler,
    derive_seed,
    position_after,
    steps_per_epoch,
)
from ray_workers.training.elastic import process_group, takeover
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from ray_workers.training.loop.comm_metrics import CommMetrics
from ray_workers.training.loop.evaluation import Evaluation
from ray_workers.training.loop.profiler import Profiler
from ray_workers.training.loop.step_reporter import StepFigures, StepReporter
from ray_workers.training.parallel import StrategyContext, strategy_of
from ray_workers.training.parallel.optim.optimizer_step import is_numbered

NOWHERE = -1
"""The rank of a process that is in no group."""


class Preempted(Exception):
    """The rank was asked to leave, and did, with a checkpoint of its last step."""


class Trainer:
    """One rank's training: everything it holds between two steps."""

    def __init__(
        self, task: RankTask, spec: JobSpec, workload: Workload, page: HeartbeatPage
    ) -> None:
        self.task = task
        self.options = options = spec.train
        self.workload = workload
        self.page = page
        self.device = torch.device(task.device)
        self.samples = on_device(workload.train, self.device)
        self.calendar = Calendar.of(
            options,
            spec.checkpoint,
            steps_per_epoch(len(workload.train), options.global_batch_size),
        )
        self.lr = scaled_lr(options.optimizer.lr, options.lr_scaling, options.global_batch_size)

        self.spec = spec
        given = StrategyContext(spec, workload, self.device, self.calendar, page)
        self.strategy = strategy_of(given)
        self.comm_metrics: CommMetrics | None = None
        self.evaluation = Evaluation(
            workload, self.device, self.strategy, given.autocast, options, moved=page.move
        )
        self.profiler = Profiler(spec.profile, self.device) if spec.profile else None
        self.divergence = Divergence(options.on_divergence, is_scaled=options.precision == "fp16")
        self.reporter = StepReporter(self.calendar.total_steps, page, self.device, self.divergence)
        self.checkpoints = CheckpointManager(
            task.checkpoint_url, keep=spec.checkpoint.keep, best=spec.checkpoint.best
        )
        auto = self.calendar.save_every_steps is None
        self.triggers = CheckpointTriggers(
            self.checkpoints,
            CheckpointInterval(task.worker_mtbf_s / task.world_size) if auto else None,
        )
        self.metrics: dict[str, float] = {}  # what was last measured, the same on all ranks
        self.measured_at = 0  # after which step of this attempt
        self.early_stopping = EarlyStoppingState()
        self.handed_figures: list[
            UnreportedStep
        ] = []  # what those who stayed know of the last steps
        self.prefetcher: Prefetcher | None = None  # of its part of the data, once it is in a group
        self.place: RankAssignment
        self.rank, self.world_size = NOWHERE, 0
        self.was_rank = NOWHERE
        self.progress = NO_STATE

    def take(self, place: RankAssignment) -> None:
        """Take a place in a group that was just formed. A collective."""
        use = TimeCategory.RECOVERING if place.generation else TimeCategory.STARTING
        self.page.enter(RankPhase.JOINING, use)
        self.place = place
        self.rank, self.world_size = place.rank, place.world_size
        self.strategy.join_group(place.rank, place.world_size)

    def enter(self) -> None:
        """Come into the group with the newest state that there is. A collective.

        A rank that comes from a broken group keeps what it has, a newcomer gets it from there;
        where nobody has anything, the checkpoint is taken.
        """
        self.prefetcher = self._divided_data()
        _check_same_data(self.workload.fingerprint, self.device, self.world_size)
        number = self.progress.number
        newest, state = self.strategy.sync_progress(number, self._peer_state_dict)
        if newest == NOTHING:
            self.resume()
        else:
            if state is not None:
                self._load_peer_state(state)
            self.progress = Progress(newest)
        self.strategy.prepare(self.prefetcher, self.progress.step)
        if self.spec.sync is not None:
            self.comm_metrics = CommMetrics(self.strategy.gradients.num_elements)
        is_new = self.was_rank != 0 or number < newest
        if self.rank == 0 and newest != NOTHING and is_new:
            self._take_over()
        self.was_rank = self.rank
        self.page.begin(self.place.generation, self.progress.step)

    def leave_group(self) -> None:
        """Leave a group as if the step that broke off had not begun."""
        if self.rank == NOWHERE:
            return
        self.checkpoints.hold()
        if self.profiler is not None:
            self.profiler.break_off()
        self.strategy.leave_group()
        if self.prefetcher is not None:
            self.prefetcher.close()
        self.rank = NOWHERE

    def end(self) -> None:
        """Let go of all that works beside the training; what was copied is committed first."""
        self.checkpoints.wait()
        self.checkpoints.tidy()
        if self.rank != NOWHERE and self.prefetcher is not None:
            self.prefetcher.close()

    def _divided_data(self) -> Prefetcher:
        """This rank's part."""
        options, part = self.options, self.strategy.data_part()
        batches = DistributedBatchSampler(
            len(self.workload.train),
            global_batch_size=options.global_batch_size,
            seed=options.seed,
            shares=part.shares,
            num_shares=part.num_shares,
        )
        self.evaluation.take(part, self.world_size)
        self.reporter.rank = self.rank
        if self.profiler is not None:
            self.profiler.rank = self.rank
        return Prefetcher(
            self.samples,
            batches,
            part.micro_batch_size or self._micro_batch_size,
            last_step=self.calendar.total_steps,
            loader_workers=self.spec.data.loader_workers,
            evenly=part.is_even,
        )

    @property
    def _micro_batch_size(self) -> int:
        return self.options.micro_batch_size or self.options.global_batch_size

    def _take_over(self) -> None:
        """Others have done what nobody told of, because rank 0 died, or the step ended on them and
        not on it: tell it, and commit the checkpoint that may have been due. What was told before
        is stored once."""
        kept = [*self.handed_figures, *self.page.kept()]
        spools = Path(self.task.spool_dir).parent
        for figures in takeover.untold(spools, kept, self.progress.step):
            self.reporter.tell(figures)
        if self.measured_at:
            measured = {key: value for key, value in self.metrics.items() if key != "train/loss"}
            train.report(self.measured_at, measured)
        self.checkpoints.adopt_own()
        if self.progress.step and self.strategy.saves_alone:
            self._save(self.progress.step)

    def resume(self) -> None:
        """Restore the newest sound checkpoint, or begin at step 0."""
        refs = self.task.resume_from
        loaded, passed_over = resuming.choose(
            refs,
            lambda sound: process_group.all_same(sound, self.device, self.world_size) and sound,
        )
        if loaded is None:
            loaded = self._begin()
        else:
            self._restore(loaded)
        if self.rank != 0:
            return
        resuming.log_passed_over(passed_over)
        step = self.progress.step
        if step:
            self.checkpoints.adopt(refs[len(passed_over) :])
        body = resuming.receipt(loaded, passed_over, step=step, position=self._position(step))
        train.emit(FrameKind.RESUMED, body)

    def fit(self, membership: RendezvousHandler) -> None:
        """Train to the end of the calendar, or until nothing gets better.

        Regroup if the group is to change, Left if the rank was asked to leave.
        """
        self.reporter.restart_clock()
        if self.comm_metrics is not None:
            self.comm_metrics.watch(membership.sent_bytes, self.world_size)
        self.triggers.starts_at(self.progress.step)
        try:
            while True:
                if not self.progress.is_settled:
                    self._between_steps(self.progress.step)
                    self.progress = self.progress.settled()
                if self.strategy.preemption_requested:
                    self._leave()
                if self.progress.step >= self.calendar.total_steps or self._is_stopped():
                    break
                membership.check()
                self._step(self.progress.step + 1)
                self.progress = self.progress.after_step()
                self.page.commit(self.progress.step)
        finally:
            # After an error the device may not answer any more; what was read is told.
            self.reporter.flush(wait_for_device=False)

    def _leave(self) -> None:
        """Rank 0 saves what there is and goes; without it the others can't take another step."""
        self.page.enter(RankPhase.SAVE, TimeCategory.CHECKPOINTING)
        self.strategy.consolidate()
        if self.rank == 0:
            self.reporter.flush()
            if self.progress.step:
                self._save(self.progress.step)
            raise Preempted

    def finish(self) -> None:
        """Leave the result: rank 0's, the model being the same everywhere. The others stay until
        it is there, so that one of them can do it if rank 0 dies."""
        self.page.enter(RankPhase.FINISH, TimeCategory.USEFUL)
        self.reporter.flush()
        self.divergence.check_end(self.metrics.get("val/loss", math.nan))
        trained = self.strategy.trained()
        if self.profiler is not None:
            self.profiler.finish(self.progress.step)
        if self.rank == 0:
            assert trained is not None
            self._write_result(trained, self.progress.step)
        process_group.wait_for_all(self.device, self.world_size)

    def _write_result(self, trained: nn.Module, steps_done: int) -> None:
        self.checkpoints.wait()
        if steps_done < self.calendar.total_steps:
            rule = self.options.early_stopping
            assert rule is not None
            job_log.log(
                f"stopped early after step {steps_done} of {self.calendar.total_steps}: "
                f"{rule.metric} has not improved for {rule.patience} evaluations"
            )
            train.report(steps_done, {}, total_steps=steps_done)

        def write() -> None:
            with TemporaryDirectory(prefix="dray-result-") as folder:
                self.workload.write_results(trained, self.metrics, steps_done, Path(folder))
                for path in sorted(Path(folder).iterdir()):
                    train.store_artifact(path)

        storage_room.wait_for_room("the result", write, waiting=self.page.move)

    def _step(self, step: int) -> None:
        """One optimizer step: the mean gradient over one global batch."""
        options, page, strategy = self.options, self.page, self.strategy
        assert self.prefetcher is not None
        use = TimeCategory.RECOMPUTED if step <= self.task.furthest_step else TimeCategory.USEFUL
        recorder = self.profiler
        page.enter(RankPhase.DATA, TimeCategory.DATA_WAIT)
        if self.comm_metrics is not None:
            self.comm_metrics.begin_step()
        if recorder is not None:
            recorder.begin_step(step)
        began = time.perf_counter()
        feeding = self.prefetcher.at(step)
        data_wait_s = time.perf_counter() - began
        if recorder is not None:
            recorder.data_came()

        lr = lr_at(
            step, total_steps=self.calendar.total_steps, lr=self.lr, schedule=options.schedule
        )

        def prepare(number: int) -> None:
            # Dropout is a function of (seed, step, share): nothing to save, nothing to restore.
            seed = derive_seed("step", options.seed, step, number, *strategy.place)
            devices.seed(self.device, seed)

        scale = strategy.update.loss_scale()
        page.enter(RankPhase.COMPUTE, use)
        strategy.gradients.backward(feeding.shares, scale, prepare, page.exchange)
        page.enter(RankPhase.UPDATE, use)
        loss = strategy.gradients.take_loss()
        if scale is not None:
            loss = loss / scale
        self.checkpoints.hold()
        grad_norm = strategy.update.step(lr)
        strategy.after_step(step)

        self.reporter.step_done(
            StepFigures(
                step=step,
                epoch=self.calendar.epoch_of(step),
                num_samples=feeding.num_global,
                lr=lr,
                data_wait_s=data_wait_s,
                loss=loss,
                grad_norm=grad_norm,
                more=self.comm_metrics.of_step() if self.comm_metrics else {},
            )
        )
        if self.rank == 0:
            self.triggers.step_took(step, time.perf_counter() - began)
        if recorder is not None:
            recorder.end_step(step)

    def _between_steps(self, step: int) -> None:
        """What is due: first the metrics, so that no checkpoint is ahead of what was told."""
        evaluates = self.calendar.evaluates_after(step)
        # A save by rank 0's own measure asks nothing of the others.
        saves = self.calendar.saves_after(step) or (self.rank == 0 and self.triggers.is_due(step))
        if not (evaluates or saves):
            return
        self.reporter.flush()
        if evaluates:
            self.page.enter(RankPhase.EVALUATE, TimeCategory.USEFUL)
            self._evaluate(step)
        saves = saves or self._is_stopped()
        if saves and not self.strategy.saves_alone:
            self.page.enter(RankPhase.SAVE, TimeCategory.CHECKPOINTING)
            self.strategy.consolidate()
        if saves and self.rank == 0:
            self._save(step)
        self.reporter.restart_clock()

    def _evaluate(self, step: int) -> None:
        """Measure on the validation split; everyone learns the result, and whether to go on."""
        began = time.perf_counter()
        self.metrics = self.evaluation.measure()
        rule = self.options.early_stopping
        if rule is not None and step != self.measured_at:  # else it is measured again
            self.early_stopping = self.early_stopping.after(rule, self.metrics)
        measured = dict(self.metrics)
        self.measured_at = step
        self.metrics["train/loss"] = self.reporter.last_loss
        if self.rank == 0:
            eval_time_s = time.perf_counter() - began
            train.report(step, measured | {"perf/eval_time_s": eval_time_s})
            print(self._sentence(step))  # noqa: T201

    def _is_stopped(self) -> bool:
        rule = self.options.early_stopping
        return rule is not None and self.early_stopping.is_over(rule)

    def _sentence(self, step: int) -> str:
        """What the log says of an evaluation."""
        epoch = self.calendar.epoch_of(step)
        figures = ", ".join(f"{key} {value:.4g}" for key, value in sorted(self.metrics.items()))
        return f"epoch {epoch}, step {step} of {self.calendar.total_steps}: {figures}"

    def _peer_state_dict(self) -> dict[str, Any]:
        """What a rank that comes into the group needs besides."""
        return {
            **self.strategy.peer_state_dict(),
            "patience": asdict(self.early_stopping),
            "metrics": self.metrics,
            "measured_at": self.measured_at,
            "loss": self.reporter.last_loss,
            "figures": [tuple(figures) for figures in self.page.kept()],
        }

    def _load_peer_state(self, state: Mapping[str, Any]) -> None:
        self.strategy.load_peer_state(state)
        self.early_stopping = EarlyStoppingState(**state["patience"])
        self.metrics = dict(state["metrics"])
        self.measured_at = state["measured_at"]
        self.reporter.last_loss = state["loss"]
        self.handed_figures = [UnreportedStep(*figures) for figures in state["figures"]]

    def _save(self, step: int) -> None:
        self.page.enter(RankPhase.SAVE, TimeCategory.CHECKPOINTING)
        loss = self.reporter.last_loss
        about = CheckpointMetadata(
            step,
            metrics=self.metrics if self.calendar.evaluates_after(step) else {},
            position={
                **self._position(step),
                "seed": self.options.seed,
                "global_batch_size": self.options.global_batch_size,
                "world_size": self.world_size,
                "data": self.workload.fingerprint,
            },
            loss=loss if math.isfinite(loss) else None,
        )
        state = {**self.strategy.state(), "patience": asdict(self.early_stopping)}
        self.triggers.save(about, state, volatile=self.strategy.model.buffers())

    def _position(self, step: int) -> dict[str, int]:
        return position_after(step, len(self.workload.train), self.options.global_batch_size)

    def _restore(self, loaded: LoadedCheckpoint) -> None:
        """Go on from a checkpoint. DataError if it was trained on other data."""
        known = loaded.position.get("data")
        if known != self.workload.fingerprint:
            raise DataError(
                f"the data set is not the one that the checkpoint of step {loaded.saved.step} was "
                f"trained on: its content hashes to {self.workload.fingerprint}, not {known}. "
                "Put the data back, or start a new job with init_from, which takes the weights"
            )
        step = loaded.saved.step
        resuming.refuse_other_model(f"the checkpoint of step {step}", loaded, self.strategy.whole())
        self.strategy.load(loaded.state)
        self.early_stopping = EarlyStoppingState(**loaded.state["patience"])
        self.progress = Progress.at(step)
        self.metrics = dict(loaded.saved.metrics)

    def _begin(self) -> LoadedCheckpoint | None:
        """Begin at step 0, or with what the document takes of another job's checkpoint: that."""
        self.progress = Progress.at(0)
        ref, asked = self.task.init_from, self.spec.init_from
        if ref is None:
            return None
        try:
            loaded = checkpoint_files.load(ref)
        except BrokenCheckpointError as error:
            raise DataError(f"init_from: {error}") from error
        if asked is not None and asked.take == "everything":
            self._go_on_from(loaded)
            return loaded
        resuming.refuse_other_model("init_from: the checkpoint", loaded, self.strategy.whole())
        self.strategy.load_model(loaded.state["model"])
        return loaded

    def _go_on_from(self, loaded: LoadedCheckpoint) -> None:
        """Restore another job's checkpoint, but for how long its early stopping has waited: this
        job's may go by another metric. DataError if there is nothing left to do, or it is too old
        to be divided."""
        step, last = loaded.saved.step, self.calendar.total_steps
        if step >= last:
            raise DataError(
                f"init_from: the checkpoint is of step {step}, and the job ends after step {last}: "
                "give it more train.epochs, or a larger train.max_steps"
            )
        if self.spec.is_divided and is_numbered(loaded.state["optimizer"]):
            raise DataError(
                "init_from: an old version of dray wrote the checkpoint, whose optimizer state is "
                "for ranks that have the whole model. Take its weights alone, or divide nothing"
            )
        self._restore(loaded)
        self.early_stopping = EarlyStoppingState()


def _check_same_data(fingerprint: str, device: torch.device, world_size: int) -> None:
    """DataError unless all ranks, which may be on several nodes, have read the same."""
    mine = int(fingerprint[:15], 16)
    if not process_group.all_same(mine, device, world_size):
        raise DataError(
            "the ranks have read different data from the same source; its content here hashes to "
            f"{fingerprint}. Don't change a source while a job starts"
        )
