"""Losses and metrics of learning from preferences: pairs of a chosen and a rejected answer.

The outputs of a model are, for dpo, log-probabilities of answers: (N, 2, 2), indexed by the pair,
by model (0: trained, 1: reference) and by answer (0: chosen, 1: rejected); for reward, the rewards
of the answers, (N, 2). The targets are the numbers of tokens of the answers, (N, 2). The metrics
have the same names as in TRL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torchmetrics import Metric, MetricCollection

from dray import spec
from ray_workers.training.core.workload import LossSum


def dpo_losses(log_ratios: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Return the losses of equation 7 of Rafailov et al. 2023 (arXiv:2305.18290). log_ratios: log
    pi(y|x) - log pi_ref(y|x) of the chosen and the rejected answers, (N, 2).

    With label smoothing e, the answers of a pair count as swapped with probability e (conservative
    DPO, Mitchell 2023).
    """
    chosen, rejected = log_ratios.unbind(1)
    margins = beta * (chosen - rejected)
    e = label_smoothing
    return -(1 - e) * F.logsigmoid(margins) - e * F.logsigmoid(-margins)


def ipo_losses(log_ratios: Tensor, lengths: Tensor, tau: float) -> Tensor:
    """Return the losses of equation 17 of Azar et al. 2023 (arXiv:2310.12036), of log-probabilities
    that are divided by the answers' lengths, as in TRL."""
    chosen, rejected = (log_ratios / lengths).unbind(1)
    return (chosen - rejected - 1 / (2 * tau)).square()


def reward_losses(rewards: Tensor) -> Tensor:
    """Return the losses of equation 1 of Ouyang et al. 2022 (arXiv:2203.02155), the negative log
    likelihoods of Bradley and Terry 1952. rewards: of chosen and rejected answers, (N, 2)."""
    chosen, rejected = rewards.unbind(1)
    return -F.logsigmoid(chosen - rejected)


def loss_sum(method: spec.Dpo | spec.Reward) -> LossSum:
    """Return the function that sums the losses of pairs."""

    def summed(outputs: Tensor, lengths: Tensor) -> Tensor:
        if isinstance(method, spec.Reward):
            return reward_losses(outputs).sum()
        log_ratios = outputs[:, 0] - outputs[:, 1]
        if method.loss == "ipo":
            return ipo_losses(log_ratios, lengths, method.beta).sum()
        return dpo_losses(log_ratios, method.beta, method.label_smoothing).sum()

    return summed


def measures(method: spec.Dpo | spec.Reward) -> Mapping[str, LossSum]:
    """Return functions that sum the metrics of pairs, keyed by name."""

    def rewards(outputs: Tensor) -> Tensor:
        if isinstance(method, spec.Reward):
            return outputs.detach()
        return method.beta * (outputs[:, 0] - outputs[:, 1]).detach()

    def chosen(outputs: Tensor, _: Tensor) -> Tensor:
        return rewards(outputs)[:, 0].sum()

    def rejected(outputs: Tensor, _: Tensor) -> Tensor:
        return rewards(outputs)[:, 1].sum()

    def margin(outputs: Tensor, _: Tensor) -> Tensor:
        found = rewards(outputs)
        return (found[:, 0] - found[:, 1]).sum()

    def accuracy(outputs: Tensor, _: Tensor) -> Tensor:
        found = rewards(outputs)
        return (found[:, 0] > found[:, 1]).to(found.dtype).sum()

    if isinstance(method, spec.Reward):
        return {"accuracy": accuracy, "margin": margin}
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margin,
        "rewards/accuracies": accuracy,
    }


class MeanOverPairs(Metric):
    """The mean, over all pairs, of the values that a function sums."""

    total: Tensor
    count: Tensor

    def __init__(self, sum_of: LossSum, **options: Any) -> None:
        super().__init__(**options)
        self._sum_of = sum_of
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("total", zero, dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += self._sum_of(outputs, targets).double()
        self.count += len(outputs)

    def compute(self) -> Tensor:
        return self.total / self.count


def metrics(method: spec.Dpo | spec.Reward) -> MetricCollection:
    """Return the metrics of an evaluation."""
    parts: dict[str, Metric | MetricCollection] = {
        name: MeanOverPairs(sum_of) for name, sum_of in measures(method).items()
    }
    # Otherwise, torchmetrics merges metrics that are equal after the first update.
    return MetricCollection(parts, compute_groups=False)
