"""The optimizers a job document can name."""

from __future__ import annotations

from typing import Any, assert_never

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from dray import spec
from ray_workers.training.parallel.optim.lars_lamb import Lamb, Lars


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and filters, which decay, and the rest, which doesn't.

    Biases and the scales of norms are 1-D; pulling them to zero regularises nothing.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, options: spec.Optimizer) -> Optimizer:
    """Fused where torch has it: one kernel for all parameters, which is what a small step spends
    its time on."""
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
                # Of a sharded model's parameters torch has no fused kernel of it.
                fused=not is_sharded,
                foreach=is_sharded,
            )
        case "adafactor":  # Shazeer & Stern 2018, arXiv:1804.04235; it has no fused kernel
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
