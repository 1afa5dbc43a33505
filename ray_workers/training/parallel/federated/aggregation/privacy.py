"""Differential privacy for clients: clipping, noise, and accounting.

A single client's update changes the sum of a round by at most the clipping norm, and the noise
hides this change. In a simulation, the noise is derived from the job's seed, so that a run can be
repeated. A simulation shows the cost of privacy, but the noise hides nothing from anyone who knows
the seed.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dray import spec
from dray.spec.federated.parts import Privacy
from ray_workers.training.core.errors import RoundsError
from ray_workers.training.data.sampler import derive_seed


class Accountant:
    """Uses opacus to compute epsilon after a number of rounds, from the moments of the sampled
    Gaussian mechanism (Mironov et al. 2019, arXiv:1908.10530), with independently drawn clients."""

    def __init__(self, federated: spec.Federated, privacy: Privacy) -> None:
        self._privacy = privacy
        self._sample_rate = federated.clients_per_round / federated.clients

    @cached_property
    def _of_one_round(self) -> tuple[list[float], Any]:
        """A pair (orders, Rényi divergence of one round for each order)."""
        try:
            from opacus.accountants import RDPAccountant
            from opacus.accountants.analysis.rdp import compute_rdp
        except ModuleNotFoundError as error:
            raise RoundsError(
                "federated.privacy requires the package opacus on the nodes to compute how much "
                'of the privacy budget is spent: add "opacus>=1.5" to environment.python_packages'
            ) from error
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
        """Return the largest number of rounds, up to `limit`, that stays within the document's
        epsilon."""
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


def rounds_of(options: spec.Federated) -> int:
    """Return the number of rounds that the job can run. The job runs fewer rounds than the document
    specifies if that many rounds would exceed the document's epsilon. Raises RoundsError if not
    even one round is allowed."""
    if options.privacy is None:
        return options.rounds
    accountant = Accountant(options, options.privacy)
    rounds = accountant.most_rounds(options.rounds)
    if rounds == 0:
        raise RoundsError(
            f"federated.privacy.epsilon is {options.privacy.epsilon:g}, but one round spends "
            f"{accountant.epsilon(1):.4g}: increase epsilon or noise_multiplier, or reduce "
            "clients_per_round"
        )
    return rounds


def check_statistics(model: nn.Module) -> None:
    """Raise RoundsError if the model has running statistics, which clients would have to send
    without noise."""
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise RoundsError(
                f"federated.privacy does not support models with running statistics, which {name} "
                f"({type(module).__name__}) has: use a GroupNorm or LayerNorm instead"
            )


class ClippingNorm:
    """The norm to which updates are clipped. The norm can be adapted to a quantile of the updates'
    norms."""

    def __init__(self, federated: spec.Federated, privacy: Privacy, seed: int) -> None:
        self._federated = federated
        self._privacy = privacy
        self._seed = seed
        self.value = privacy.clip_norm

    def clip(self, update: Tensor, norm: float) -> bool:
        """Clip an update in place. Returns whether the update was already within the norm."""
        if norm > self.value:
            update *= self.value / norm
        return norm <= self.value

    def noise(self, round_number: int, size: int) -> Tensor:
        """Return the noise for the sum of a round: float64, on the CPU, the same on every rank."""
        deviation = self._noise_multiplier * self.value
        return deviation * torch.randn(
            size, generator=self._generator("noise", round_number), dtype=torch.float64
        )

    @property
    def _noise_multiplier(self) -> float:
        """The noise multiplier for the updates. With an adaptive norm, the multiplier is larger
        than in the document, because the count uses part of the budget (Andrew et al. 2021, theorem
        1)."""
        whole = self._privacy.noise_multiplier
        if self._privacy.adaptive is None:
            return whole
        return whole / math.sqrt(1 - (whole / (2 * self._federated.count_noise)) ** 2)

    def after(self, round_number: int, num_within: int, num_updates: int) -> float:
        """Return the norm for the next round. `num_within` is the number of updates of this round
        that were not clipped.

        Each update counts as plus or minus one half. Adding or removing an update then changes the
        count by at most one half, as `_noise_multiplier` assumes; a plain count would change by 1.
        """
        federated, adaptive = self._federated, self._privacy.adaptive
        if adaptive is None:
            return self.value
        generator = self._generator("count", round_number)
        noise = federated.count_noise * float(torch.randn((), generator=generator))
        share = 0.5 + (num_within - num_updates / 2 + noise) / federated.expected_updates
        value = self.value * math.exp(-adaptive.lr * (share - adaptive.quantile))
        return min(value, federated.max_update_norm)

    def _generator(self, name: str, round_number: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(name, self._seed, round_number))
