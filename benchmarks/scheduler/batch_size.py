"""The batch size of a replayed job, which follows the gradient noise: pure rules.

The gradient noise scale (McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, section 2.2) is
the size of a batch whose mean gradient is half noise: tr(S) / |G|^2 with the gradient G and the
covariance S of a sample's gradient. Far below it, twice the batch is worth nearly two steps; far
above, hardly more than one. It grows while a model is trained.

The batch depends on the noise alone, and neither on the world size nor on how fast the ranks are:
a group that was resized or mended would learn the same as one that was not.
"""

from __future__ import annotations

import math

LEAST_EFFICIENCY = 0.7
"""The least worth of a sample in the batch in force, in samples of the smallest batch."""


def efficiency(noise_scale: float, smallest: int, size: int) -> float:
    """The worth of a sample in a batch of this size, of that in the smallest batch: the part of
    the samples that would do as well there (Pollux, Qiao et al. 2021, section 3.1)."""
    return 1.0 if math.isinf(noise_scale) else (noise_scale + smallest) / (noise_scale + size)


def next_size(noise_scale: float, smallest: int, largest: int) -> int:
    """The largest of the smallest size times a power of two that is efficient enough."""
    size = smallest
    while 2 * size <= largest and efficiency(noise_scale, smallest, 2 * size) >= LEAST_EFFICIENCY:
        size *= 2
    return size
