"""Telling how each step went, without making it slower."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from dray import train


@dataclass
class _Figures:
    """What is known of a step when it was launched, and what the device still computes."""

    step: int
    epoch: int
    num_samples: int
    lr: float
    step_time_s: float
    data_wait_s: float
    loss_and_norm: Tensor | None
    copied: torch.cuda.Event | None


class StepReporter:
    """Reports a step; rank 0 the global figures, the others only their own times.

    On a GPU, asking for a number waits for all that was launched before it. So the numbers are
    copied to pinned memory in the stream, and read when the next step was launched; the first
    step's are read at once, because people wait for it.
    """

    def __init__(self, rank: int, total_steps: int) -> None:
        self._rank = rank
        self._total_steps = total_steps
        self._pending: _Figures | None = None
        self._began = time.perf_counter()
        self._is_first = True
        self.last_loss = float("nan")

    @property
    def wants_figures(self) -> bool:
        """Whether loss and gradient norm are worth computing on this rank."""
        return self._rank == 0

    def restart_clock(self) -> None:
        """What happened since the last step (evaluation, a checkpoint) is not the next one's."""
        self._began = time.perf_counter()

    def step_done(
        self,
        step: int,
        epoch: int,
        num_samples: int,
        lr: float,
        data_wait_s: float,
        loss: Tensor | None,
        grad_norm: Tensor | None,
    ) -> None:
        """`num_samples` is the size of the global batch."""
        tensor = (
            torch.stack((loss, grad_norm)) if loss is not None and grad_norm is not None else None
        )
        copied = None
        if tensor is not None and tensor.is_cuda:
            host = torch.empty(2, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            tensor, copied = host, torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        now = time.perf_counter()
        figures = _Figures(
            step, epoch, num_samples, lr, now - self._began, data_wait_s, tensor, copied
        )
        self._began = now
        self.flush()
        self._pending = figures
        if copied is None or self._is_first:
            self.flush()
        self._is_first = False

    def flush(self) -> None:
        """Report the step that is still pending, if one is."""
        figures, self._pending = self._pending, None
        if figures is None:
            return
        values = {
            "perf/step_time_s": figures.step_time_s,
            "perf/data_wait_s": figures.data_wait_s,
        }
        if figures.loss_and_norm is None:
            train.report(figures.step, values)
            return
        if figures.copied is not None:
            figures.copied.synchronize()
        loss, norm = figures.loss_and_norm.tolist()
        self.last_loss = loss
        samples_per_s = figures.num_samples / figures.step_time_s
        values |= {
            "train/loss": loss,
            "train/lr": figures.lr,
            "train/grad_norm": norm,
            "perf/samples_per_s": samples_per_s,
        }
        train.report(
            figures.step,
            values,
            epoch=figures.epoch,
            total_steps=self._total_steps,
            samples_per_s=samples_per_s,
        )
