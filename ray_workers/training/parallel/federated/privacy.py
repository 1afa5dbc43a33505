"""Differential privacy for clients: clipping, noise, and how much privacy is spent.

One client's update can move the sum of a round by the clipping norm at most, and the noise hides
that. The noise of a simulation is drawn from the job's seed, so that a run can be repeated: it
shows what privacy costs, and hides nothing from who knows the seed.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dray import spec
from dray.spec.federated import Privacy
from ray_workers.training.data.sampler import derive_seed


class Accountant:
    """Epsilon after a number of rounds, by opacus: the moments of the sampled Gaussian mechanism
    (Mironov et al. 2019, arXiv:1908.10530), with each client in a round by a chance of its own."""

    def __init__(self, federated: spec.Federated, privacy: Privacy) -> None:
        self._privacy = privacy
        self._sample_rate = federated.clients_per_round / federated.clients

    @cached_property
    def _of_one_round(self) -> tuple[list[float], Any]:
        """(orders, the divergence of each)."""
        from opacus.accountants import RDPAccountant
        from opacus.accountants.analysis.rdp import compute_rdp

        orders = list(RDPAccountant.DEFAULT_ALPHAS)
        noise = self._privacy.noise_multiplier
        return orders, compute_rdp(
            q=self._sample_rate, noise_multiplier=noise, steps=1, orders=orders
        )

    def epsilon(self, num_rounds: int) -> float:
        if num_rounds == 0:
            return 0.0
        from opacus.accountants.analysis.rdp import get_privacy_spent

        orders, one = self._of_one_round
        spent, _ = get_privacy_spent(orders=orders, rdp=one * num_rounds, delta=self._privacy.delta)
        return float(spent)

    def most_rounds(self, limit: int) -> int:
        """The rounds, up to `limit`, after which no more is spent than the document allows."""
        if self.epsilon(limit) <= self._privacy.epsilon:
            return limit
        enough, too_many = 0, limit
        while too_many - enough > 1:
            middle = (enough + too_many) // 2
            if self.epsilon(middle) <= self._privacy.epsilon:
                enough = middle
            else:
                too_many = middle
        return enough


class ClippingNorm:
    """The norm to which updates are clipped, which may follow a quantile of their norms."""

    def __init__(self, federated: spec.Federated, privacy: Privacy, seed: int) -> None:
        self._federated = federated
        self._privacy = privacy
        self._seed = seed
        self.value = privacy.clip_norm

    def clip(self, update: Tensor, norm: float) -> None:
        """In place."""
        if norm > self.value:
            update *= self.value / norm

    def noise(self, round_number: int, size: int) -> Tensor:
        """The noise of the sum of a round: float64, on the CPU, the same on every rank."""
        deviation = self._noise_multiplier * self.value
        return deviation * torch.randn(
            size, generator=self._generator("noise", round_number), dtype=torch.float64
        )

    @property
    def _noise_multiplier(self) -> float:
        """Of the updates: where the norm adapts, the noise of its count has a part of the whole
        (Andrew et al. 2021, theorem 1)."""
        whole = self._privacy.noise_multiplier
        if self._privacy.adaptive is None:
            return whole
        return 1 / math.sqrt(whole**-2 - (2 * self._federated.count_noise) ** -2)

    def after(self, round_number: int, num_within: int) -> float:
        """The norm of the next round, when so many updates of this one were not clipped."""
        adaptive = self._privacy.adaptive
        if adaptive is None:
            return self.value
        generator = self._generator("count", round_number)
        noise = self._federated.count_noise * float(torch.randn((), generator=generator))
        share = (num_within + noise) / self._federated.clients_per_round
        return self.value * math.exp(-adaptive.lr * (share - adaptive.quantile))

    def _generator(self, name: str, round_number: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(name, self._seed, round_number))
