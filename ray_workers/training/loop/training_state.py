"""The state of a rank between two steps, which is restored from checkpoints and received by new
ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dray import train
from dray.spec import JobSpec
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import UnreportedStep
from ray_workers.training.checkpoint import checkpoint_files, resuming
from ray_workers.training.checkpoint.checkpoint_files import LoadedCheckpoint, SkippedCheckpoint
from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.checkpoint.manifests import CheckpointMetadata
from ray_workers.training.checkpoint.peer_memory import PeerMemory
from ray_workers.training.core.errors import CopiesDifferError, DataError, PartsLostError
from ray_workers.training.core.progress import NO_STATE, NOTHING, Progress
from ray_workers.training.core.schedule import Calendar, EarlyStoppingState
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.sampler import position_after
from ray_workers.training.loop.step_reporter import StepReporter, unreported_steps
from ray_workers.training.parallel import Strategy
from ray_workers.training.parallel.optim.optimizer_step import is_numbered


class TrainingState:
    """The state of one rank between two steps, except for the strategy's state (weights and
    optimizer).

    The state is equal on all ranks of a group, except for `unreported`.
    """

    def __init__(
        self,
        task: RankTask,
        spec: JobSpec,
        workload: Workload,
        calendar: Calendar,
        strategy: Strategy,
        reporter: StepReporter,
    ) -> None:
        self.progress: Progress = NO_STATE
        self.early_stopping = EarlyStoppingState()
        self.batch_size = spec.train.global_batch_size
        """The current global batch size, which can vary within `train.batch_range`."""
        self.metrics: dict[str, float] = {}
        """Results of the last evaluation."""
        self.measured_at = 0
        """The step of this attempt after which the last evaluation took place; 0 if there was no
        evaluation."""
        self.is_compared = False
        """Whether the last `sync` compared copies of the state."""
        self.unreported: list[UnreportedStep] = []
        """The metrics of the last steps, received from a peer together with its state."""
        self._task = task
        self._spec = spec
        self._workload = workload
        self._calendar = calendar
        self._strategy = strategy
        self._reporter = reporter

    def resume(
        self,
        checkpoints: CheckpointManager,
        all_agree: Callable[[int], bool],
        rank: int,
        world_size: int,
    ) -> None:
        """Restore the latest intact checkpoint of an earlier attempt, or begin at step 0. A
        collective operation: `all_agree` returns whether all ranks have the same number.

        Rank 0 reports the checkpoint, and any later checkpoints that could not be used.
        """

        def everywhere(is_valid: bool) -> bool:
            return all_agree(is_valid) and is_valid

        refs = self._task.resume_from
        loaded, passed_over = resuming.choose(refs, everywhere, number=rank, num_ranks=world_size)
        if loaded is None:
            loaded = self._begin(everywhere, rank, world_size)
        else:
            self._restore(loaded)
        if rank != 0:
            return
        resuming.log_passed_over(passed_over)
        step = self.progress.step
        if step:
            checkpoints.adopt(refs[len(passed_over) :])
        report = resuming.receipt(loaded, passed_over, step=step, position=self._position(step))
        train.emit(report.KIND, report.body())

    def _begin(
        self, everywhere: Callable[[bool], bool], rank: int, world_size: int
    ) -> LoadedCheckpoint | None:
        """Begin at step 0, or load the requested part of another job's checkpoint and return this
        checkpoint."""
        self.progress = Progress.at(0)
        ref, asked = self._task.init_from, self._spec.init_from
        if ref is None:
            return None
        (found,) = checkpoint_files.load_each([ref], number=rank, num_ranks=world_size)
        loaded = resuming.agree(found, everywhere)
        if isinstance(loaded, SkippedCheckpoint):
            refs = self._task.older_than_init_from
            older, _ = resuming.choose(refs, everywhere, number=rank, num_ranks=world_size)
            raise DataError(resuming.damaged_origin(asked, loaded, older))
        if asked is not None and asked.take == "everything":
            self._restore_other_job(loaded)
            return loaded
        what = "init_from: the checkpoint"
        resuming.refuse_other_base(what, loaded, self._workload.base)
        resuming.refuse_other_model(what, loaded, self._strategy.whole())
        self._strategy.load_model(loaded.state["model"])
        return loaded

    def _restore(self, loaded: LoadedCheckpoint) -> None:
        """Load the state of a checkpoint. Raises DataError if the checkpoint was trained on
        different data."""
        known = loaded.position.get("data")
        if known != self._workload.fingerprint:
            raise DataError(
                f"the checkpoint of step {loaded.saved.step} was written by training on a "
                f"different data set: the hash of data.source is {self._workload.fingerprint} "
                f"instead of {known}. Restore the data, or start a new job that loads the weights "
                "with init_from"
            )
        step = loaded.saved.step
        what = f"the checkpoint of step {step}"
        resuming.refuse_other_base(what, loaded, self._workload.base)
        resuming.refuse_other_model(what, loaded, self._strategy.whole())
        self._strategy.load(loaded.state)
        self.early_stopping = EarlyStoppingState(**loaded.state["patience"])
        self.progress = Progress.at(step)
        if self._spec.train.batch_range is not None:
            self.batch_size = int(loaded.position["global_batch_size"])
        self.metrics = dict(loaded.saved.metrics)

    def _restore_other_job(self, loaded: LoadedCheckpoint) -> None:
        """Load the state of another job's checkpoint. A batch size that varies within a range is
        not loaded, and neither is the state of early stopping, because this job might use a
        different metric. Raises DataError if no steps remain, or if the checkpoint is too old to be
        divided."""
        step, last = loaded.saved.step, self._calendar.total_steps
        if step >= last:
            raise DataError(
                f"init_from: the checkpoint is from step {step}, but the job ends after step "
                f"{last}: increase train.epochs, train.max_steps, federated.rounds or "
                "federated.privacy.epsilon"
            )
        if self._spec.is_divided and is_numbered(loaded.state["optimizer"]):
            raise DataError(
                "init_from: the checkpoint was written by an old version of dray, and its "
                "optimizer state can be loaded only if each rank holds the whole model. Load only "
                "the weights, or do not divide the model between ranks"
            )
        self._restore(loaded)
        self.batch_size = self._spec.train.global_batch_size
        self.early_stopping = EarlyStoppingState()

    def of_checkpoint(
        self, step: int, world_size: int
    ) -> tuple[CheckpointMetadata, dict[str, Any]]:
        """Return the metadata and the contents of a checkpoint after `step`, on the ranks that
        save."""
        loss = self._reporter.last_loss
        about = CheckpointMetadata(
            step,
            metrics=self.metrics if self.measured_at == step else {},
            position={
                **self._position(step),
                "seed": self._spec.train.seed,
                "global_batch_size": self.batch_size,
                "world_size": world_size,
                "data": self._workload.fingerprint,
                **({} if self._workload.base is None else {"base": self._workload.base}),
            },
            loss=loss if math.isfinite(loss) else None,
        )
        return about, {**self._strategy.state(), "patience": asdict(self.early_stopping)}

    def sync(
        self,
        memory: PeerMemory,
        unreported: list[UnreportedStep],
        found_different: Callable[[int, bool], None],
    ) -> int:
        """Bring all ranks to the state of the rank with the most progress or, if a part of this
        state is lost, back to the newest state in the ranks' memory. Return the progress, which is
        NOTHING if no rank has a state. A collective operation. Raises PartsLostError if a part of
        the state is lost.

        found_different: is called on every rank if copies that should be equal differ, with the
            step, and with whether this rank has just received its state.
        """
        memory.agree()
        try:
            newest, peer_state = self._strategy.sync_progress(
                self.progress.number, lambda: self.peer_state_dict(unreported)
            )
        except PartsLostError:
            if memory.is_empty:
                raise
            step, peer_state = memory.restored()
            newest = Progress.at(step).number
        if newest != NOTHING:
            if peer_state is not None:
                self.load_peer_state(peer_state)
            self.progress = Progress(newest)
            found = self._strategy.compare_copies()
            self.is_compared = found.num_compared > 0
            if found.num_differing:
                found_different(self.progress.step, peer_state is not None)
                raise CopiesDifferError
        return newest

    def peer_state_dict(self, unreported: list[UnreportedStep]) -> dict[str, Any]:
        """Return the state for a rank that joins the group without a state, as input for
        `load_peer_state`."""
        return {
            **self._strategy.peer_state_dict(),
            "patience": asdict(self.early_stopping),
            "batch_size": self.batch_size,
            "metrics": self.metrics,
            "measured_at": self.measured_at,
            "loss": self._reporter.last_loss,
            "divergence": self._reporter.divergence.state_dict(),
            "figures": [tuple(figures) for figures in unreported],
        }

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of a peer's `peer_state_dict`."""
        self._strategy.load_peer_state(state)
        self.early_stopping = EarlyStoppingState(**state["patience"])
        self.batch_size = state["batch_size"]
        self.metrics = dict(state["metrics"])
        self.measured_at = state["measured_at"]
        self._reporter.last_loss = state["loss"]
        self._reporter.divergence.load_state_dict(state["divergence"])
        self.unreported = [UnreportedStep(*figures) for figures in state["figures"]]

    def report_unreported(self, kept: list[UnreportedStep]) -> None:
        """Report steps that a previous process of rank 0 completed but did not report, or whose end
        only other ranks saw. The service ignores metrics that it already has.

        kept: the steps that this rank has on its page.
        """
        spools = Path(self._task.spool_dir).parent
        for figures in unreported_steps(spools, [*self.unreported, *kept], self.progress.step):
            self._reporter.write(figures)
        if self.measured_at:
            measured = {key: value for key, value in self.metrics.items() if key != "train/loss"}
            train.report(self.measured_at, measured)

    def _position(self, step: int) -> dict[str, int]:
        # In federated learning, each client has its own data, so there is no common position in the
        # data set.
        samples = 0 if self._spec.federated is not None else self._spec.train.samples_per_step
        return position_after(step, self._calendar.steps_per_epoch, samples)
