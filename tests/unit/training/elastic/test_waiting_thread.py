"""Only a thread that waits for its group can be replaced: others end by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ray_workers.training.elastic.waiting_thread import WaitingThread

NUM_LOOKS = 8


class _Waits(torch.autograd.Function):
    """A user's function whose backward pass waits, for example for a file."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        ENDED.wait()
        return gradients[0]


ENDED = threading.Event()


def _compute() -> None:
    matrix = torch.ones(400, 400, requires_grad=True)
    while not ENDED.is_set():
        checkpoint(torch.mm, matrix, matrix, use_reentrant=False).sum().backward()


def _wait_in_backward() -> None:
    _Waits.apply(torch.ones(1, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]


def _sleep() -> None:
    while not ENDED.is_set():
        time.sleep(0.3)


@pytest.mark.parametrize("work", [_compute, _wait_in_backward, _sleep, ENDED.wait])
def test_a_thread_that_does_not_wait_for_a_group_is_not_replaced(work: Callable[[], None]) -> None:
    ENDED.clear()
    thread = threading.Thread(target=work)
    thread.start()
    observed = WaitingThread(thread.ident, thread.native_id)
    try:
        looks = [
            observed.num_looks_without_progress() for _ in range(NUM_LOOKS) if not time.sleep(0.05)
        ]
    finally:
        ENDED.set()
        thread.join()
    assert looks == [0] * NUM_LOOKS
