"""The training loop of one rank. It reads from top to bottom."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from dray import train
from dray.spec import JobSpec
from ray_workers.contracts import FrameKind, RankTask
from ray_workers.training import checkpoints, process_group
from ray_workers.training.checkpoints import Keeper
from ray_workers.training.data import Batch, Batches, derive_seed, share
from ray_workers.training.optimizers import build_optimizer, set_lr
from ray_workers.training.replica import Replica
from ray_workers.training.reporting import StepFigures, StepReporter
from ray_workers.training.schedule import Calendar, lr_at
from ray_workers.training.workload import Samples, Workload


def run(task: RankTask, spec: JobSpec, workload: Workload) -> None:
    """Train the workload as the document says, from the newest checkpoint that is sound."""
    process_group.join(torch.device(task.device), task.world_size)
    loop = Loop(task, spec, workload)
    steps_done = loop.resume()
    loop.fit(steps_done)
    loop.finish()
    process_group.leave()


class Loop:
    """One rank's training: everything it holds between two steps."""

    def __init__(self, task: RankTask, spec: JobSpec, workload: Workload) -> None:
        self.task = task
        self.options = spec.train
        self.workload = workload
        self.rank, self.world_size = task.rank, task.world_size
        self.device = torch.device(task.device)

        self.samples = _to(self.device, workload.train)
        self.validation = _to(self.device, workload.validation)
        self.batches = Batches(
            len(workload.train),
            global_batch_size=self.options.global_batch_size,
            seed=self.options.seed,
            rank=self.rank,
            world_size=self.world_size,
        )
        self.micro_batch_size = self.options.micro_batch_size or self.options.global_batch_size
        self.calendar = Calendar.of(self.options, spec.checkpoint, self.batches.steps_per_epoch)

        self.model = workload.model.to(self.device)
        self.replica = Replica(self.model, workload.loss_sum, self._autocast, self.world_size)
        self.optimizer = build_optimizer(self.model, self.options.optimizer)

        self.reporter = StepReporter(self.rank, self.calendar.total_steps)
        self.keeper = Keeper(
            task.checkpoint_url, keep=spec.checkpoint.keep, best=spec.checkpoint.best
        )
        self.metrics: dict[str, float] = {}  # what was last measured, the same on all ranks

    def resume(self) -> int:
        """Restore the newest sound checkpoint; the number of optimizer steps done."""
        refs = self.task.resume_from
        if not refs:
            self._tell_resumed(0, "")
            return 0
        loaded = checkpoints.newest_sound(refs) if self.rank == 0 else None
        urls = [ref.url for ref in refs]
        mine = urls.index(loaded.saved.url) if loaded is not None else -1
        chosen = process_group.agree(mine, self.device, self.world_size)
        if chosen < 0:
            self._tell_resumed(0, "")
            return 0
        if loaded is None:
            loaded = checkpoints.load(refs[chosen])
        self.replica.settle_buckets(self._micro_batches(self.batches.at(1)))
        self.model.load_state_dict(loaded.state["model"])
        self.optimizer.load_state_dict(loaded.state["optimizer"])
        self.metrics = dict(loaded.saved.metrics)
        if self.rank == 0:
            self.keeper.adopt(refs[chosen:])
        self._tell_resumed(loaded.saved.step, loaded.saved.url)
        return loaded.saved.step

    def fit(self, steps_done: int) -> None:
        """Train from after `steps_done` to the end of the calendar."""
        self.reporter.restart_clock()
        try:
            for step in range(steps_done + 1, self.calendar.total_steps + 1):
                self._step(step)
                self._between_steps(step)
        finally:
            # After an error the device may not answer any more; what was read is told.
            self.reporter.flush(wait_for_device=False)

    def finish(self) -> None:
        """Leave the result: rank 0's, the model being the same everywhere."""
        if self.rank != 0:
            return
        with TemporaryDirectory(prefix="dray-result-") as folder:
            self.workload.write_results(
                self.model, self.metrics, self.calendar.total_steps, Path(folder)
            )
            for path in sorted(Path(folder).iterdir()):
                train.save_artifact(path)

    def _step(self, step: int) -> None:
        """One optimizer step: the mean gradient over one global batch."""
        options = self.options
        began = time.perf_counter()
        batch = self.batches.at(step)
        micro_batches = self._micro_batches(batch)
        data_wait_s = time.perf_counter() - began

        lr = lr_at(
            step,
            total_steps=self.calendar.total_steps,
            lr=options.optimizer.lr,
            schedule=options.schedule,
        )
        set_lr(self.optimizer, lr)
        # Dropout is a function of (seed, step, rank): nothing to save, nothing to restore.
        _seed(self.device, derive_seed("step", options.seed, step, self.rank))
        self.replica.backward(micro_batches, 0.0 if batch.is_empty else 1 / batch.num_global)
        loss = self.replica.take_loss()
        grad_norm = self._clip()
        self.optimizer.step()
        self.replica.forget_gradients()

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

    def _between_steps(self, step: int) -> None:
        """What is due: first the metrics, so that no checkpoint is ahead of what was told."""
        evaluates = self.calendar.evaluates_after(step)
        saves = self.calendar.saves_after(step)
        if not (evaluates or saves):
            return
        self.reporter.flush()
        if evaluates:
            self._evaluate(step)
        if saves and self.rank == 0:
            self._save(step)
        self.reporter.restart_clock()

    def _micro_batches(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """The rank's share in pieces of at most `micro_batch_size` samples."""
        return [
            (
                self.samples.inputs.index_select(0, indices),
                self.samples.targets.index_select(0, indices),
            )
            for indices in torch.split(batch.indices.to(self.device), self.micro_batch_size)
        ]

    def _clip(self) -> Tensor | None:
        """The gradient's norm before it is clipped; None on a rank that has no use for it."""
        most = self.options.max_grad_norm
        if most is None and self.rank != 0:
            return None
        norm = self.replica.grad_norm()
        if most is not None:
            clip_grads_with_norm_(self.model.parameters(), most, norm)
        return norm

    def _evaluate(self, step: int) -> None:
        """Measure on the validation split, each rank its share; everyone learns the result."""
        began, num_samples = time.perf_counter(), len(self.workload.validation)
        start, stop = share(num_samples, self.rank, self.world_size)
        measures = {"loss": self.workload.loss_sum, **self.workload.metric_sums}
        sums = torch.zeros(len(measures), dtype=torch.float64, device=self.device)
        self.model.eval()
        with torch.no_grad(), self._autocast():
            for at in range(start, stop, self.micro_batch_size):
                part = slice(at, min(at + self.micro_batch_size, stop))
                outputs = self.model(self.validation.inputs[part])
                targets = self.validation.targets[part]
                sums += torch.stack(
                    [measure(outputs, targets).double() for measure in measures.values()]
                )
        self.model.train()
        process_group.add_up(sums, self.world_size)
        means = (sums / num_samples).tolist()
        self.metrics = {f"val/{name}": mean for name, mean in zip(measures, means, strict=True)}
        if self.rank == 0:
            self.metrics["train/loss"] = self.reporter.last_loss
            values = {key: self.metrics[key] for key in self.metrics if key.startswith("val/")}
            train.report(step, values | {"perf/eval_time_s": time.perf_counter() - began})
            print(self._sentence(step))  # noqa: T201

    def _sentence(self, step: int) -> str:
        """What the log says of an evaluation."""
        epoch = self.calendar.epoch_of(step)
        figures = ", ".join(f"{key} {value:.4g}" for key, value in sorted(self.metrics.items()))
        return f"epoch {epoch}, step {step} of {self.calendar.total_steps}: {figures}"

    def _save(self, step: int) -> None:
        steps_per_epoch = self.calendar.steps_per_epoch
        metrics = self.metrics if self.calendar.evaluates_after(step) else {}
        self.keeper.save(
            step,
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()},
            metrics=metrics,
            position={
                "epoch": step // steps_per_epoch,
                "step_in_epoch": step % steps_per_epoch,
                "seed": self.options.seed,
                "global_batch_size": self.options.global_batch_size,
                "world_size": self.world_size,
            },
        )

    def _tell_resumed(self, step: int, url: str) -> None:
        if self.rank == 0:
            train.emit(FrameKind.RESUMED, {"step": step, "url": url})

    def _autocast(self) -> AbstractContextManager[object]:
        if self.options.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _to(device: torch.device, samples: Samples) -> Samples:
    return Samples(samples.inputs.to(device), samples.targets.to(device))


def _seed(device: torch.device, seed: int) -> None:
    """Seed only the generator that is drawn from: `torch.manual_seed` visits every backend."""
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
