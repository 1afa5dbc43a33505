"""The training loop of one rank. It reads from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from dray import train
from dray.spec import JobSpec
from ray_workers.contracts import FrameKind, RankTask
from ray_workers.pages import Doing, Page, Place, Untold, Use
from ray_workers.training import checkpoints, handover, inheritance, process_group, resuming
from ray_workers.training.checkpoints import About, Loaded
from ray_workers.training.compression import CompressedReplica, takes_momentum
from ray_workers.training.data import (
    Batches,
    derive_seed,
    position_after,
    share,
    steps_per_epoch,
)
from ray_workers.training.errors import BrokenCheckpointError, DataError
from ray_workers.training.evaluation import Evaluation
from ray_workers.training.exact import ExactReplica
from ray_workers.training.feeding import Feed
from ray_workers.training.keeper import Keeper
from ray_workers.training.localsteps import LocalReplica, LocalSteps
from ray_workers.training.membership import Membership
from ray_workers.training.pacing import Pace
from ray_workers.training.profiling import Recorder
from ray_workers.training.progress import NO_STATE, Progress
from ray_workers.training.replica import Replica
from ray_workers.training.reporting import StepFigures, StepReporter
from ray_workers.training.samples import on_device
from ray_workers.training.saves import Saves
from ray_workers.training.schedule import Calendar, lr_at, scaled_lr
from ray_workers.training.sharding import (
    ShardedReplica,
    gathered,
    load_model,
    mesh_of,
    skeleton_of,
    spread_out,
)
from ray_workers.training.stopping import Patience
from ray_workers.training.traffic import Traffic
from ray_workers.training.update import Update
from ray_workers.training.workload import Workload

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


NOWHERE = -1
"""The rank of a process that is in no group."""


class Left(Exception):
    """The rank was asked to leave, and did, with a checkpoint of its last step."""


class Loop:
    """One rank's training: everything it holds between two steps."""

    def __init__(self, task: RankTask, spec: JobSpec, workload: Workload, page: Page) -> None:
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

        self.model = workload.model.to(self.device)
        self.loader_workers = spec.data.loader_workers
        self.num_shares = spec.resources.num_workers if spec.is_exact else None
        """Of each global batch, at any world size; None for one of each rank."""
        self.spec = spec
        self.compression = spec.sync.compression if spec.sync else None
        self.skeleton = skeleton_of(self.model) if spec.is_sharded else None
        self.whole: dict[str, Any] | None = None  # of a sharded state, on rank 0, until it is saved
        self.replica: Replica
        self.update: Update
        self.local: LocalSteps | None = None
        self.traffic: Traffic | None = None
        if not spec.is_sharded:
            self._build()
        self.evaluation = Evaluation(workload, self.device, self._autocast, self._micro_batch_size)
        self.recorder = Recorder(spec.profile, self.device) if spec.profile else None
        self.reporter = StepReporter(self.calendar.total_steps, page)
        self.keeper = Keeper(
            task.checkpoint_url, keep=spec.checkpoint.keep, best=spec.checkpoint.best
        )
        auto = self.calendar.save_every_steps is None
        self.saves = Saves(
            self.keeper, Pace(task.worker_mtbf_s / task.world_size) if auto else None
        )
        self.metrics: dict[str, float] = {}  # what was last measured, the same on all ranks
        self.measured_at = 0  # after which step of this attempt
        self.patience = Patience()
        self.handed_figures: list[Untold] = []  # what those who stayed know of the last steps
        self.feed: Feed  # of the share of the data that it has in its group
        self.rank, self.world_size = NOWHERE, 0
        self.was_rank = NOWHERE
        self.progress = NO_STATE

    def enter(self, place: Place) -> None:
        """Take a place in a group that was just formed, with the newest state that it has.

        A collective. A rank that comes from a broken group keeps what it has, a newcomer gets it
        from there; where nobody has anything, the checkpoint is taken.
        """
        use = Use.RECOVERING if place.generation else Use.STARTING
        self.page.enter(Doing.JOINING, use)
        self.rank, self.world_size = place.rank, place.world_size
        if self.spec.is_sharded:
            self._build()
        self._divide()
        _check_same_data(self.workload.fingerprint, self.device, self.world_size)
        newest, source, all_have_it = handover.newest(
            self.progress.number, self.device, self.world_size
        )
        was_behind = self.progress.number < newest
        if newest == handover.NOTHING:
            self.resume()
        elif not all_have_it:
            state = handover.broadcast(self._handed_over, source, self.rank, self.device)
            if state is not None and was_behind:
                self._take_handed_over(state)
        self.replica.form(self.world_size)
        if self.local is not None:
            self.local.begin()
        if self.progress.step:
            self.replica.settle_buckets(lambda: self.feed.at(1).shares)
        if self.rank == 0 and newest != handover.NOTHING and (self.was_rank != 0 or was_behind):
            self._take_over()
        self.was_rank = self.rank
        self.page.begin(place.generation, self.progress.step)

    def let_go(self) -> None:
        """Leave a group as if the step that broke off had not begun."""
        if self.rank == NOWHERE:
            return
        self.keeper.hold()
        if self.recorder is not None:
            self.recorder.break_off()
        self.replica.disband()
        self.feed.close()
        self.rank = NOWHERE

    def end(self) -> None:
        """Let go of all that works beside the training; what was copied is committed first."""
        self.keeper.wait()
        if self.rank != NOWHERE:
            self.feed.close()

    def _divide(self) -> None:
        """Take this rank's share of the data, among so many."""
        options, num_shares = self.options, self.num_shares or self.world_size
        mine = range(*share(num_shares, self.rank, self.world_size))
        batches = Batches(
            len(self.workload.train),
            global_batch_size=options.global_batch_size,
            seed=options.seed,
            shares=mine,
            num_shares=num_shares,
        )
        self.feed = Feed(
            self.samples,
            batches,
            self._micro_batch_size,
            last_step=self.calendar.total_steps,
            loader_workers=self.loader_workers,
            evenly=self.spec.is_sharded,
        )
        self.evaluation.share(mine, num_shares, self.world_size)
        self.reporter.rank = self.rank

    def _build(self) -> None:
        """What computes and applies gradients. Of a sharded model a collective, once there is a
        group: the optimizer knows this rank's parts only."""
        self.replica = self._replica()
        self.update = Update(
            *(self.model, self.replica, self.options, self.device),
            has_momentum=not takes_momentum(self.compression),
        )
        if self.spec.takes_local_steps:
            assert self.spec.sync is not None
            self.local = LocalSteps(self.model, self.update, self.spec.sync, self.calendar)
        if self.spec.sync is not None:
            self.traffic = Traffic(self.replica.num_elements)

    def _replica(self) -> Replica:
        spec, parts = self.spec, (self.model, self.workload.loss_sum, self._autocast)
        if spec.is_sharded:
            mesh = mesh_of(spec.parallel, self.world_size, self.device)
            sharded = spread_out(self.model, mesh, zero=spec.parallel.zero)
            return ShardedReplica(*parts, sharded, lambda: self.page.is_asked_to_leave)
        if spec.takes_local_steps:
            return LocalReplica(*parts)
        if self.num_shares is not None:
            return ExactReplica(*parts, self.num_shares)
        if self.compression is None:
            return Replica(*parts)
        momentum, seed = self.options.optimizer.momentum, derive_seed("sync", self.options.seed)
        return CompressedReplica(*parts, self.compression, momentum=momentum, seed=seed)

    @property
    def _micro_batch_size(self) -> int:
        return self.options.micro_batch_size or self.options.global_batch_size

    def _take_over(self) -> None:
        """Others have done what nobody told of, because rank 0 died, or the step ended on them and
        not on it: tell it, and commit the checkpoint that may have been due. What was told before
        is stored once."""
        kept = [*self.handed_figures, *self.page.kept()]
        spools = Path(self.task.spool_dir).parent
        for figures in inheritance.untold(spools, kept, self.progress.step):
            self.reporter.tell(figures)
        if self.measured_at:
            measured = {key: value for key, value in self.metrics.items() if key != "train/loss"}
            train.report(self.measured_at, measured)
        self.keeper.adopt_own()
        if self.progress.step:
            self._save(self.progress.step)

    def resume(self) -> None:
        """Restore the newest sound checkpoint, or begin at step 0."""
        refs = self.task.resume_from
        loaded, passed_over = resuming.choose(
            refs,
            lambda sound: process_group.all_same(sound, self.device, self.world_size) and sound,
        )
        if loaded is None:
            loaded = self._start_afresh()
        else:
            self._restore(loaded)
        if self.rank != 0:
            return
        resuming.log_passed_over(passed_over)
        step = self.progress.step
        if step:
            self.keeper.adopt(refs[len(passed_over) :])
        body = resuming.receipt(loaded, passed_over, step=step, position=self._position(step))
        train.emit(FrameKind.RESUMED, body)

    def fit(self, membership: Membership) -> None:
        """Train to the end of the calendar, or until nothing gets better.

        Regroup if the group is to change, Left if the rank was asked to leave.
        """
        self.reporter.restart_clock()
        if self.traffic is not None:
            self.traffic.watch(membership.sent_bytes, self.world_size)
        self.saves.starts_at(self.progress.step)
        try:
            while True:
                if not self.progress.is_settled:
                    self._between_steps(self.progress.step)
                    self.progress = self.progress.settled()
                if self._is_to_leave():
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

    def _is_to_leave(self) -> bool:
        if isinstance(self.replica, ShardedReplica):
            return self.replica.leaves
        return self.page.is_asked_to_leave if self.local is None else self.local.leaves

    def _leave(self) -> None:
        """Rank 0 saves what there is and goes; without it the others can't take another step."""
        self._gather()
        if self.rank == 0:
            self.reporter.flush()
            if self.progress.step:
                self._save(self.progress.step)
            raise Left

    def finish(self) -> None:
        """Leave the result: rank 0's, the model being the same everywhere. The others stay until
        it is there, so that one of them can do it if rank 0 dies."""
        self.page.enter(Doing.FINISH, Use.USEFUL)
        trained = self._trained()
        if self.rank == 0:
            self._write_result(trained, self.progress.step)
        process_group.wait_for_all(self.device, self.world_size)

    def _trained(self) -> nn.Module:
        """The whole model, on rank 0. A collective if it is sharded."""
        if self.skeleton is None:
            return self.update.weights
        whole = gathered(self.model.state_dict(), keep=self.rank == 0)
        if self.rank == 0:
            self.skeleton.load_state_dict(whole, assign=True)
        return self.skeleton

    def _write_result(self, trained: nn.Module, steps_done: int) -> None:
        self.keeper.wait()
        if self.recorder is not None:
            self.recorder.finish(steps_done)
        if steps_done < self.calendar.total_steps:
            rule = self.options.early_stopping
            assert rule is not None
            checkpoints.log(
                f"stopped early after step {steps_done} of {self.calendar.total_steps}: "
                f"{rule.metric} has not improved for {rule.patience} evaluations"
            )
            train.report(steps_done, {}, total_steps=steps_done)
        with TemporaryDirectory(prefix="dray-result-") as folder:
            self.workload.write_results(trained, self.metrics, steps_done, Path(folder))
            for path in sorted(Path(folder).iterdir()):
                train.save_artifact(path)

    def _step(self, step: int) -> None:
        """One optimizer step: the mean gradient over one global batch."""
        options, page = self.options, self.page
        use = Use.RECOMPUTED if step <= self.task.furthest_step else Use.USEFUL
        page.enter(Doing.DATA, Use.DATA_WAIT)
        if self.recorder is not None and self.rank == 0:
            self.recorder.begin_step(step)
        if self.traffic is not None:
            self.traffic.begin_step()
        began = time.perf_counter()
        feeding = self.feed.at(step)
        data_wait_s = time.perf_counter() - began

        lr = lr_at(
            step, total_steps=self.calendar.total_steps, lr=self.lr, schedule=options.schedule
        )

        def prepare(number: int) -> None:
            # Dropout is a function of (seed, step, share): nothing to save, nothing to restore.
            _seed(self.device, derive_seed("step", options.seed, step, number))

        scale = self.update.loss_scale()
        page.enter(Doing.COMPUTE, use)
        self.replica.backward(feeding.shares, scale, prepare, page.exchange)
        page.enter(Doing.UPDATE, use)
        loss = self.replica.take_loss()
        if scale is not None:
            loss = loss / scale
        self.keeper.hold()
        grad_norm = self.update.step(lr)
        if self.local is not None and self.local.are_over_after(step):
            page.exchange()
            self.local.agree(self.world_size, leaves=page.is_asked_to_leave)

        self.reporter.step_done(
            StepFigures(
                step=step,
                epoch=self.calendar.epoch_of(step),
                num_samples=feeding.num_global,
                lr=lr,
                data_wait_s=data_wait_s,
                loss=loss,
                grad_norm=grad_norm,
                more=self.traffic.of_step() if self.traffic else {},
            )
        )
        if self.rank == 0:
            self.saves.step_took(step, time.perf_counter() - began)
            if self.recorder is not None:
                self.recorder.end_step(step, data_wait_s)

    def _between_steps(self, step: int) -> None:
        """What is due: first the metrics, so that no checkpoint is ahead of what was told."""
        evaluates = self.calendar.evaluates_after(step)
        # A save by rank 0's own measure asks nothing of the others.
        saves = self.calendar.saves_after(step) or (self.rank == 0 and self.saves.is_due(step))
        if not (evaluates or saves):
            return
        self.reporter.flush()
        if evaluates:
            self.page.enter(Doing.EVALUATE, Use.USEFUL)
            self._evaluate(step)
        saves = saves or self._is_stopped()
        if saves:
            self._gather()
        if saves and self.rank == 0:
            self._save(step)
        self.reporter.restart_clock()

    def _evaluate(self, step: int) -> None:
        """Measure on the validation split; everyone learns the result, and whether to go on."""
        began = time.perf_counter()
        self.metrics = self.evaluation.measure(self.update.weights)
        rule = self.options.early_stopping
        if rule is not None:
            self.patience = self.patience.after(rule, self.metrics)
        measured = dict(self.metrics)
        self.measured_at = step
        self.metrics["train/loss"] = self.reporter.last_loss
        if self.rank == 0:
            eval_time_s = time.perf_counter() - began
            train.report(step, measured | {"perf/eval_time_s": eval_time_s})
            print(self._sentence(step))  # noqa: T201

    def _is_stopped(self) -> bool:
        rule = self.options.early_stopping
        return rule is not None and self.patience.is_over(rule)

    def _sentence(self, step: int) -> str:
        """What the log says of an evaluation."""
        epoch = self.calendar.epoch_of(step)
        figures = ", ".join(f"{key} {value:.4g}" for key, value in sorted(self.metrics.items()))
        return f"epoch {epoch}, step {step} of {self.calendar.total_steps}: {figures}"

    def _state(self) -> dict[str, Any]:
        """What a replica is made of, between two steps."""
        return {
            "model": self.model.state_dict(),
            **self.update.state_dict(),
            "patience": asdict(self.patience),
            **({} if self.local is None else {"local": self.local.state_dict()}),
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        load_model(self.model, state["model"])
        self.update.load_state_dict(state)
        if self.local is not None:
            self.local.load_state_dict(state["local"], self.rank)
        self.patience = Patience(**state["patience"])

    def _handed_over(self) -> dict[str, Any]:
        """What a rank that comes into the group needs besides."""
        return self._state() | {
            "progress": self.progress.number,
            "metrics": self.metrics,
            "measured_at": self.measured_at,
            "loss": self.reporter.last_loss,
            "figures": [tuple(figures) for figures in self.page.kept()],
        }

    def _take_handed_over(self, state: Mapping[str, Any]) -> None:
        self._load_state(state)
        self.progress = Progress(state["progress"])
        self.metrics = dict(state["metrics"])
        self.measured_at = state["measured_at"]
        self.reporter.last_loss = state["loss"]
        self.handed_figures = [Untold(*figures) for figures in state["figures"]]

    def _gather(self) -> None:
        """Have rank 0 know what the others hold of a checkpoint. A collective."""
        if self.local is not None:
            self.local.gather(self.rank, self.world_size, self.device)
        if self.spec.is_sharded:
            whole = gathered(self._state(), keep=self.rank == 0)
            self.whole = whole if self.rank == 0 else None

    def _save(self, step: int) -> None:
        self.page.enter(Doing.SAVE, Use.CHECKPOINTING)
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
        state, self.whole = self.whole or self._state(), None
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
        self._load_state(loaded.state)
        self.progress = Progress.at(loaded.saved.step)
        self.metrics = dict(loaded.saved.metrics)

    def _start_afresh(self) -> Loaded | None:
        """Begin at step 0, with another job's weights where the document says so: its."""
        ref = self.task.init_from
        loaded = None
        if ref is not None:
            try:
                loaded = checkpoints.load(ref)
                load_model(self.model, loaded.state["model"])
            except BrokenCheckpointError as error:
                raise DataError(f"init_from: {error}") from error
            except RuntimeError as error:  # what load_state_dict says of other names or shapes
                raise DataError(f"init_from: the checkpoint is of another model: {error}") from None
            self.update.start_average()
        self.progress = Progress.at(0)
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
