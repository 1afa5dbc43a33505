"""The optimizers that a job document can select.

LARS and LAMB are for large batches. Large batches need a learning rate that is too high for layers
whose gradients are large relative to their weights. LARS and LAMB therefore scale the rate of each
layer by the ratio of the norm of its weights to the norm of its gradient or update. As in the
papers, 1-D parameters, which are biases and the scales of normalisation layers, are not adapted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, assert_never, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from dray import spec

Groups = Sequence[dict[str, Any]]


class _Layerwise(Optimizer, ABC):
    """Base class of optimizers that update all tensors of a group at once."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step_group(group, parameters, [p.grad for p in parameters])
        return loss

    @abstractmethod
    def _step_group(
        self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Update the group's parameters."""

    def _states(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        """Return a state tensor, initially zero, for each parameter."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]


def _is_layer(parameter: Tensor) -> bool:
    return parameter.ndim >= 2


class Lars(_Layerwise):
    """LARS: You, Gitman, Ginsburg 2017, arXiv:1708.03888, algorithm 1.

    rate = lr * trust * |w| / (|g| + decay * |w|); v = momentum * v + rate * (g + decay * w); w = w
    - v. For a layer whose weights are all zero, the rate is lr.
    """

    def __init__(self, groups: Groups, lr: float, momentum: float, trust: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "trust": trust})

    def _step_group(
        self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]
    ) -> None:
        decay = group["weight_decay"]
        updates = torch._foreach_add(grads, parameters, alpha=decay)
        weights, slopes = torch._foreach_norm(parameters), torch._foreach_norm(grads)
        rates = [
            _ratio(group["trust"] * weight, slope + decay * weight) if _is_layer(p) else 1.0
            for p, weight, slope in zip(parameters, weights, slopes, strict=True)
        ]
        velocities = self._states(parameters, "velocity")
        torch._foreach_mul_(velocities, group["momentum"])
        for velocity, update, rate in zip(velocities, updates, rates, strict=True):
            velocity.add_(update * rate, alpha=group["lr"])
        torch._foreach_sub_(parameters, velocities)


class Lamb(_Layerwise):
    """LAMB: You et al. 2019, arXiv:1904.00962, algorithm 2, with Adam's bias correction.

    r = m / (sqrt(v) + eps) + decay * w; w = w - lr * |w| / |r| * r.
    """

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    def _step_group(
        self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]
    ) -> None:
        first_beta, second_beta = group["betas"]
        steps = self._count(group, parameters)
        means = self._states(parameters, "mean")
        squares = self._states(parameters, "square")
        torch._foreach_lerp_(means, grads, 1 - first_beta)
        torch._foreach_mul_(squares, second_beta)
        torch._foreach_addcmul_(squares, grads, grads, 1 - second_beta)
        below = torch._foreach_div(squares, [1 - second_beta**step for step in steps])
        torch._foreach_sqrt_(below)
        torch._foreach_add_(below, group["eps"])
        updates = torch._foreach_div(means, [1 - first_beta**step for step in steps])
        torch._foreach_div_(updates, below)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        weights, lengths = torch._foreach_norm(parameters), torch._foreach_norm(updates)
        for parameter, update, weight, length in zip(
            parameters, updates, weights, lengths, strict=True
        ):
            rate = _ratio(weight, length) if _is_layer(parameter) else 1.0
            parameter.sub_(update * rate, alpha=group["lr"])

    def _count(self, group: dict[str, Any], parameters: list[Tensor]) -> list[int]:
        """Return the step number of each parameter. Step numbers are stored per parameter, because
        a rank might have the state of only some parameters."""
        once_counted = group.get("step", 0)  # per group in states of older versions of dray
        for parameter in parameters:
            state = self.state[parameter]
            state["step"] = state.get("step", once_counted) + 1
        return [self.state[parameter]["step"] for parameter in parameters]


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return the ratio, or 1 if either value is zero. The values are not read on the CPU, because
    reading them would require waiting for the GPU."""
    usable = (above > 0) & (below > 0)
    return torch.where(usable, above / torch.where(usable, below, 1.0), 1.0)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices and filters with weight decay, and 1-D parameters
    without weight decay. 1-D parameters are biases and the scales of normalisation layers, on which
    weight decay has no regularising effect.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, options: spec.Optimizer) -> Optimizer:
    """Build the optimizer, using torch's fused version if there is one. A fused version updates all
    parameters with a single kernel, which is faster because kernel launches dominate small
    steps."""
    groups = parameter_groups(model, options.weight_decay)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    match options.name:
        case "adamw":
            return AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)
        case "sgd":
            return SGD(
                groups,
                lr=options.lr,
                momentum=options.momentum,
                nesterov=options.nesterov,
                # torch has no fused SGD for the parameters of a sharded model.
                fused=not is_sharded,
                foreach=is_sharded,
            )
        case "adafactor":  # Shazeer & Stern 2018, arXiv:1804.04235; there is no fused version
            return Adafactor(groups, lr=options.lr)
        case "lars":
            return Lars(groups, options.lr, options.momentum, options.trust)
        case "lamb":
            return Lamb(groups, options.lr, options.betas, options.eps)
        case unknown:
            assert_never(unknown)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
