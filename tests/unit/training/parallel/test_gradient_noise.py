"""The gradient noise scale: compared with a known value, and for a real job."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_workers.training.data.sampler import epoch_order, share
from ray_workers.training.parallel.data_parallel.gradient_noise import (
    EVERY,
    GradientNoise,
    estimates,
)
from tests.unit.training.jobs import digits, document, series, weights
from tests.unit.training.ranks import run_ranks


@pytest.mark.parametrize("counts", [(32, 32), (8, 8, 8, 8), (40, 10, 14)])
def test_it_finds_the_known_scale_of_a_quadratic(counts: tuple[int, ...]) -> None:
    """The loss of a sample x is |w - x|^2 / 2, where x has variance s^2 in each of d dimensions.
    Its gradient w - x has the mean w and the covariance s^2 I, so the scale is d s^2 / |w|^2."""
    random = np.random.default_rng(0)
    size, deviation = 20, 3.0
    w = random.normal(size=size)
    batch_size = sum(counts)
    parts = [count / batch_size for count in counts]
    found = np.zeros(2)
    rounds = 4000
    for _ in range(rounds):
        own = [
            part * (w - deviation * random.normal(size=(count, size))).mean(axis=0)
            for count, part in zip(counts, parts, strict=True)
        ]
        squares = sum(float(each @ each) for each in own)
        total = sum(own)
        found += estimates(squares, float(total @ total), parts, batch_size)
    square, variance = found / rounds
    assert square == pytest.approx(w @ w, rel=0.05)
    assert variance == pytest.approx(size * deviation**2, rel=0.05)


def test_the_means_of_numerator_and_denominator_are_taken_apart() -> None:
    noise = GradientNoise()
    assert noise.scale is None
    noise.add(2.0, 6.0)
    assert noise.scale == pytest.approx(3.0)
    noise.add(-1.0, 3.0)
    assert noise.scale == pytest.approx((0.9 * 6.0 + 3.0) / (0.9 * 2.0 - 1.0))
    for _ in range(20):
        noise.add(-1.0, 3.0)
    assert noise.scale is None, "a gradient of no measurable size"


def first_scale(size: int, world_size: int) -> float:
    """Return the noise scale of the first step, computed with plain autograd."""
    work = digits()
    order = epoch_order(len(work.train), 0, 0)[:size]
    own = []
    for rank in range(world_size):
        start, stop = share(size, rank, world_size)
        inputs, targets = work.train.take(order[start:stop])
        loss = work.loss_sum(work.model(inputs), targets) / size
        grads = torch.autograd.grad(loss, list(work.model.parameters()))
        own.append(torch.cat([grad.reshape(-1) for grad in grads]).double().numpy())
    batch = sum(own)
    count = size // world_size
    # Two batch sizes, as in equations (A.2) and (A.3) of the paper.
    small = sum(float(each @ each) for each in own) * world_size**2 / world_size
    large = float(batch @ batch)
    square = (size * large - count * small) / (size - count)
    variance = (small - large) / (1 / count - 1 / size)
    return variance / square


def test_a_job_reports_the_scale_of_its_gradients_and_learns_the_same(tmp_path: Path) -> None:
    for name, train in (("plain", {}), ("measured", {"measure_noise": True})):
        spec = document(2, epochs=2, **train)
        assert run_ranks(tmp_path / name, spec, world_size=2) == [0, 0]
    told = series(tmp_path / "measured", "train/gradient_noise_scale")
    assert set(told) <= set(range(1, 100, EVERY))
    assert told[1] == pytest.approx(first_scale(200, 2), rel=1e-3)
    assert all(math.isfinite(scale) and scale > 0 for scale in told.values())
    assert not series(tmp_path / "plain", "train/gradient_noise_scale")
    plain, measured = weights(tmp_path / "plain"), weights(tmp_path / "measured")
    assert all(torch.equal(plain[name], measured[name]) for name in plain)
