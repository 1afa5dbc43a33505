"""Reports the metrics of each step without slowing it down, and the metrics of steps that a
previous process of rank 0 had committed but not reported."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dray import train
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.heartbeat import HeartbeatPage, UnreportedStep
from ray_workers.training.core.divergence import Divergence
from ray_workers.training.data.prefetcher import Feeding
from ray_workers.training.devices import is_gpu, module_of

FLUSH_S = 0.05
"""Maximum number of seconds that a step's metrics wait to be written while training continues. A
frame in the middle of a step takes three times as long to write as one in a sequence of frames,
because the code and data for it have been evicted from the CPU's caches."""


Event = Any
"""A GPU event, such as `torch.cuda.Event`."""


class Batch(NamedTuple):
    """This rank's part of a step's global batch."""

    feed: Feeding
    began: float
    """Start time of the step, from `time.perf_counter`, in seconds."""
    wait_s: float
    """Number of seconds that the step waited for its samples."""


class StepFigures(NamedTuple):
    """The metrics of a step that has been launched, and may still be running on a GPU."""

    step: int
    epoch: int
    num_samples: int
    """Number of samples in the global batch."""
    lr: float
    data_wait_s: float
    loss: Tensor
    """Mean over the global batch; a scalar on the device, valid until the next backward pass."""
    grad_norm: Tensor
    """Gradient norm before clipping."""
    measured: Mapping[str, Tensor] = MappingProxyType({})
    """Additional metrics, keyed by name, which are means over the global batch like the loss."""
    more: Mapping[str, float] = MappingProxyType({})
    """Additional metrics of the step."""


class StepReporter:
    """Reports every step: rank 0 reports the global metrics, and the other ranks report only their
    own times. Each rank also writes all metrics to its heartbeat page, in case it has to replace
    rank 0.

    On a GPU, reading a number waits for all previously launched operations. Therefore the numbers
    are copied to pinned memory in the GPU's stream, and read after the next step has been launched.
    The time of a step is measured in this stream, from the end of the previous step to the end of
    this step.
    """

    def __init__(
        self, total_steps: int, page: HeartbeatPage, device: torch.device, divergence: Divergence
    ) -> None:
        self.rank = 0
        self._total_steps = total_steps
        self._page = page
        self.divergence = divergence
        self._waiting: list[UnreportedStep] = []
        self._more: dict[int, Mapping[str, float]] = {}
        """Additional metrics of the steps that have not been written, keyed by step."""
        self._device = device
        self._is_on_gpu = is_gpu(device)
        self._on_device: tuple[StepFigures, Event, Tensor, Event] | None = None
        self._began = self._flushed = time.perf_counter()
        self._began_on_gpu: Event | None = None
        self._is_first = True
        self.last_loss = float("nan")

    def restart_clock(self) -> None:
        """Restart the clock for the next step, so that an evaluation or a checkpoint after the last
        step is not counted."""
        self._began = time.perf_counter()
        if self._is_on_gpu:
            self._began_on_gpu = _mark(self._device)

    def step_done(self, figures: StepFigures) -> None:
        """Record the metrics of the step that ends now. The metrics of the first step are written
        immediately, because users wait for them."""
        now = time.perf_counter()
        if self._is_on_gpu:
            self._read_device()
            assert self._began_on_gpu is not None, "the clock was not started"
            host, copied = _start_copy(figures)
            self._on_device = (figures, self._began_on_gpu, host, copied)
            self._began_on_gpu = copied
        else:
            step_time_s, self._began = now - self._began, now
            self._take(figures, step_time_s, *(float(one) for one in _numbers_of(figures)))
        if self._is_first or now - self._flushed > FLUSH_S:
            self.flush(wait_for_device=self._is_first)
            self._is_first = False

    def flush(self, *, wait_for_device: bool = True) -> None:
        """Write the recorded metrics. With `wait_for_device`, the metrics of a step that may still
        be running on a GPU are included."""
        if wait_for_device:
            self._read_device()
        for waiting in self._waiting:
            self.write(waiting)
        self._waiting.clear()
        self._flushed = time.perf_counter()

    def write(self, figures: UnreportedStep) -> None:
        """Write the metrics of one step."""
        values = {
            "perf/step_time_s": figures.step_time_s,
            "perf/data_wait_s": figures.data_wait_s,
            **self._more.pop(figures.step, {}),
        }
        if self.rank != 0:
            train.report(figures.step, values)
            return
        samples_per_s = figures.num_samples / figures.step_time_s
        values |= {
            "train/loss": figures.loss,
            "train/lr": figures.lr,
            "train/grad_norm": figures.grad_norm,
            "perf/samples_per_s": samples_per_s,
        }
        train.report(
            figures.step,
            values,
            epoch=figures.epoch,
            total_steps=self._total_steps,
            samples_per_s=samples_per_s,
        )

    def report_unseen(
        self, step: int, epoch: int, lr: float, loss: float, grad_norm: float
    ) -> None:
        """Report a step whose duration is unknown, because no process of this rank has observed its
        end. The service ignores metrics that it already has."""
        self.last_loss = loss
        values = {"train/loss": loss, "train/lr": lr, "train/grad_norm": grad_norm}
        train.report(step, values, epoch=epoch, total_steps=self._total_steps)

    def _read_device(self) -> None:
        if self._on_device is not None:
            figures, began, host, copied = self._on_device
            self._on_device = None
            copied.synchronize()
            self._take(figures, began.elapsed_time(copied) / 1e3, *host.tolist())

    def _take(
        self, figures: StepFigures, step_time_s: float, loss: float, norm: float, *measured: float
    ) -> None:
        figures_read = UnreportedStep(
            figures.step,
            figures.epoch,
            figures.num_samples,
            figures.lr,
            loss,
            norm,
            step_time_s,
            figures.data_wait_s,
        )
        self.last_loss = loss
        self._waiting.append(figures_read)
        self._page.keep(figures_read)
        means = zip(figures.measured, measured, strict=True) if self.rank == 0 else ()
        if more := {f"train/{name}": mean for name, mean in means} | dict(figures.more):
            self._more[figures.step] = more
        self.divergence.step_done(self.rank, figures.step, loss, norm)


def _numbers_of(figures: StepFigures) -> list[Tensor]:
    """Return (loss, norm, additional metrics...)."""
    return [figures.loss, figures.grad_norm, *figures.measured.values()]


def _start_copy(figures: StepFigures) -> tuple[Tensor, Event]:
    """Begin to copy the result of `_numbers_of` to the host; return the copies with the event that
    marks the end of the copying."""
    numbers = torch.stack(_numbers_of(figures))
    host = torch.empty(len(numbers), pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    return host, _mark(figures.loss.device)


def _mark(device: torch.device) -> Event:
    """Record an event in the stream, after all previously launched operations."""
    event = module_of(device).Event(enable_timing=True)
    event.record()
    return event


def unreported_steps(
    spools: Path, kept: Iterable[UnreportedStep], last_step: int
) -> list[UnreportedStep]:
    """Return the metrics of steps up to `last_step` that are not in any spool of rank 0, in order.

    spools: the attempt's folder on this node. kept: the metrics of the last steps from the other
    ranks. If rank 0 ran on another node, its spools can't be read on this node, and all of `kept`
    is returned, because the service ignores metrics that it already has.
    """
    reported = max(map(_last_reported, spools.glob("r0.*.metrics")), default=0)
    found = {figures.step: figures for figures in kept}
    return [found[step] for step in sorted(found) if reported < step <= last_step]


def _last_reported(directory: Path) -> int:
    """Return the last step whose metrics are in a spool, whether delivered or not; 0 if there is
    none."""
    frames = spool_reader.decode(directory.name, spool_reader.tail(directory))
    steps = [
        int(frame.body["step"])
        for frame in frames
        if frame.kind is FrameKind.METRICS and "train/loss" in frame.body["values"]
    ]
    return max(steps, default=0)
