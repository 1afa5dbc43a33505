"""The training loop of one rank. It reads from top to bottom."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dray import train
from dray.spec import JobSpec
from ray_workers.contracts import FrameKind, RankTask
from ray_workers.training import checkpoints, process_group, resuming
from ray_workers.training.checkpoints import About, Loaded
from ray_workers.training.data import Batches, derive_seed, position_after
from ray_workers.training.errors import BrokenCheckpointError, DataError
from ray_workers.training.evaluation import Evaluation
from ray_workers.training.keeper import Keeper
from ray_workers.training.pacing import Pace
from ray_workers.training.replica import Replica
from ray_workers.training.reporting import StepFigures, StepReporter
from ray_workers.training.samples import Feed, on_device
from ray_workers.training.saves import Saves
from ray_workers.training.schedule import Calendar, lr_at, scaled_lr
from ray_workers.training.stopping import Patience
from ray_workers.training.update import Update
from ray_workers.training.workload import Workload

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def run(task: RankTask, spec: JobSpec, workload: Workload) -> None:
    """Train the workload as the document says, from the newest checkpoint that is sound."""
    device = torch.device(task.device)
    process_group.join(device, task.world_size)
    _check_same_data(workload.fingerprint, device, task.world_size)
    loop = Loop(task, spec, workload)
    try:
        steps_done = loop.resume()
        steps_done = loop.fit(steps_done)
        loop.finish(steps_done)
    finally:
        loop.keeper.wait()  # what was copied is committed, also after an error
    process_group.leave()


class Loop:
    """One rank's training: everything it holds between two steps."""

    def __init__(self, task: RankTask, spec: JobSpec, workload: Workload) -> None:
        self.task = task
        self.options = options = spec.train
        self.workload = workload
        self.rank, self.world_size = task.rank, task.world_size
        self.device = torch.device(task.device)

        batches = Batches(
            len(workload.train),
            global_batch_size=options.global_batch_size,
            seed=options.seed,
            rank=self.rank,
            world_size=self.world_size,
        )
        micro_batch_size = options.micro_batch_size or options.global_batch_size
        self.calendar = Calendar.of(options, spec.checkpoint, batches.steps_per_epoch)
        self.feed = Feed(
            on_device(workload.train, self.device),
            batches,
            micro_batch_size,
            self.calendar.total_steps,
        )
        self.lr = scaled_lr(options.optimizer.lr, options.lr_scaling, options.global_batch_size)

        self.model = workload.model.to(self.device)
        self.replica = Replica(self.model, workload.loss_sum, self._autocast, self.world_size)
        self.update = Update(self.model, self.replica, options, self.device)
        self.evaluation = Evaluation(
            workload,
            self.device,
            self._autocast,
            batch_size=micro_batch_size,
            rank=self.rank,
            world_size=self.world_size,
        )

        self.reporter = StepReporter(self.rank, self.calendar.total_steps)
        self.keeper = Keeper(
            task.checkpoint_url, keep=spec.checkpoint.keep, best=spec.checkpoint.best
        )
        auto = self.calendar.save_every_steps is None
        self.saves = Saves(
            self.keeper, Pace(task.worker_mtbf_s / self.world_size) if auto else None
        )
        self.metrics: dict[str, float] = {}  # what was last measured, the same on all ranks
        self.patience = Patience()

    def resume(self) -> int:
        """Restore the newest sound checkpoint; the number of optimizer steps done."""
        refs = self.task.resume_from
        loaded, passed_over = resuming.choose(
            refs,
            lambda sound: process_group.all_same(sound, self.device, self.world_size) and sound,
        )
        if self.rank == 0:
            resuming.log_passed_over(passed_over)
        step = 0
        if loaded is None:
            loaded = self._start_afresh()
        else:
            self._restore(loaded)
            step = loaded.saved.step
            if self.rank == 0:
                self.keeper.adopt(refs[len(passed_over) :])
        if self.rank == 0:
            position = self._position(step)
            body = resuming.receipt(loaded, passed_over, step=step, position=position)
            train.emit(FrameKind.RESUMED, body)
        return step

    def fit(self, steps_done: int) -> int:
        """Train from after `steps_done` to the end of the calendar, or until nothing gets better.

        Returns the optimizer steps done in the end.
        """
        self.reporter.restart_clock()
        self.saves.starts_at(steps_done)
        try:
            while steps_done < self.calendar.total_steps and not self._is_stopped():
                steps_done += 1
                self._step(steps_done)
                self._between_steps(steps_done)
        finally:
            # After an error the device may not answer any more; what was read is told.
            self.reporter.flush(wait_for_device=False)
        return steps_done

    def finish(self, steps_done: int) -> None:
        """Leave the result: rank 0's, the model being the same everywhere."""
        if self.rank != 0:
            return
        self.keeper.wait()
        if steps_done < self.calendar.total_steps:
            rule = self.options.early_stopping
            assert rule is not None
            checkpoints.log(
                f"stopped early after step {steps_done} of {self.calendar.total_steps}: "
                f"{rule.metric} has not improved for {rule.patience} evaluations"
            )
            train.report(steps_done, {}, total_steps=steps_done)
        with TemporaryDirectory(prefix="dray-result-") as folder:
            self.workload.write_results(self.update.weights, self.metrics, steps_done, Path(folder))
            for path in sorted(Path(folder).iterdir()):
                train.save_artifact(path)

    def _step(self, step: int) -> None:
        """One optimizer step: the mean gradient over one global batch."""
        options = self.options
        began = time.perf_counter()
        feeding = self.feed.at(step)
        batch = feeding.batch
        data_wait_s = time.perf_counter() - began

        lr = lr_at(
            step, total_steps=self.calendar.total_steps, lr=self.lr, schedule=options.schedule
        )
        # Dropout is a function of (seed, step, rank): nothing to save, nothing to restore.
        _seed(self.device, derive_seed("step", options.seed, step, self.rank))
        scale = self.update.loss_scale()
        weight = 0.0 if batch.is_empty else 1 / batch.num_global
        self.replica.backward(feeding.micro_batches, weight, scale)
        loss = self.replica.take_loss()
        if scale is not None:
            loss = loss / scale
        self.keeper.hold()
        grad_norm = self.update.step(lr, wants_norm=self.rank == 0)

        self.reporter.step_done(
            StepFigures(
                step=step,
                epoch=self.calendar.epoch_of(step),
                num_samples=batch.num_global,
                lr=lr,
                data_wait_s=data_wait_s,
                loss=loss,
                grad_norm=grad_norm,
            )
        )
        if self.rank == 0:
            self.saves.step_took(step, time.perf_counter() - began)

    def _between_steps(self, step: int) -> None:
        """What is due: first the metrics, so that no checkpoint is ahead of what was told."""
        evaluates = self.calendar.evaluates_after(step)
        # A save by rank 0's own measure asks nothing of the others.
        saves = self.calendar.saves_after(step) or (self.rank == 0 and self.saves.is_due(step))
        if not (evaluates or saves):
            return
        self.reporter.flush()
        if evaluates:
            self._evaluate(step)
        if self.rank == 0 and (saves or self._is_stopped()):
            self._save(step)
        self.reporter.restart_clock()

    def _evaluate(self, step: int) -> None:
        """Measure on the validation split; everyone learns the result, and whether to go on."""
        began = time.perf_counter()
        self.metrics = self.evaluation.measure(self.update.weights)
        rule = self.options.early_stopping
        if rule is not None:
            self.patience = self.patience.after(rule, self.metrics)
        if self.rank == 0:
            eval_time_s = time.perf_counter() - began
            train.report(step, self.metrics | {"perf/eval_time_s": eval_time_s})
            self.metrics["train/loss"] = self.reporter.last_loss
            print(self._sentence(step))  # noqa: T201

    def _is_stopped(self) -> bool:
        rule = self.options.early_stopping
        return rule is not None and self.patience.is_over(rule)

    def _sentence(self, step: int) -> str:
        """What the log says of an evaluation."""
        epoch = self.calendar.epoch_of(step)
        figures = ", ".join(f"{key} {value:.4g}" for key, value in sorted(self.metrics.items()))
        return f"epoch {epoch}, step {step} of {self.calendar.total_steps}: {figures}"

    def _save(self, step: int) -> None:
        state = {"model": self.model.state_dict(), **self.update.state_dict()}
        state["patience"] = {
            "best": self.patience.best,
            "evaluations_since": self.patience.evaluations_since,
        }
        loss = self.reporter.last_loss
        about = About(
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
        self.saves.save(about, state, volatile=self.model.buffers())

    def _position(self, step: int) -> dict[str, int]:
        return position_after(step, len(self.workload.train), self.options.global_batch_size)

    def _restore(self, loaded: Loaded) -> None:
        """Go on from a checkpoint of this job. DataError if the data are others now."""
        known = loaded.position.get("data")
        if known != self.workload.fingerprint:
            raise DataError(
                f"the data set is not the one that the checkpoint of step {loaded.saved.step} was "
                f"trained on: its content hashes to {self.workload.fingerprint}, not {known}. "
                "Put the data back, or start a new job with init_from"
            )
        self.replica.settle_buckets(self.feed.at(1).micro_batches)
        self.model.load_state_dict(loaded.state["model"])
        self.update.load_state_dict(loaded.state)
        self.patience = Patience(**loaded.state["patience"])
        self.metrics = dict(loaded.saved.metrics)

    def _start_afresh(self) -> Loaded | None:
        """Begin at step 0, with another job's weights where the document says so: its."""
        ref = self.task.init_from
        loaded = None
        if ref is not None:
            try:
                loaded = checkpoints.load(ref)
                self.model.load_state_dict(loaded.state["model"])
            except BrokenCheckpointError as error:
                raise DataError(f"init_from: {error}") from error
            except RuntimeError as error:  # what load_state_dict says of other names or shapes
                raise DataError(f"init_from: the checkpoint is of another model: {error}") from None
            self.update.start_average()
        return loaded

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = AUTOCAST.get(self.options.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def _check_same_data(fingerprint: str, device: torch.device, world_size: int) -> None:
    """DataError unless all ranks, which may be on several nodes, have read the same."""
    mine = int(fingerprint[:15], 16)
    if not process_group.all_same(mine, device, world_size):
        raise DataError(
            "the ranks have read different data from the same source; its content here hashes to "
            f"{fingerprint}. Don't change a source while a job starts"
        )


def _seed(device: torch.device, seed: int) -> None:
    """Seed only the generator that is drawn from: `torch.manual_seed` visits every backend."""
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
