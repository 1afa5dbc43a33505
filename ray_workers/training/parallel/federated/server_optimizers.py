"""The server's step (Reddi et al. 2021, arXiv:2003.00295, algorithm 2).

The gradient is the mean of the clients' updates with its sign changed, so that a step goes against
it as any optimizer's does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dray import spec
from dray.spec.federated.parts import ServerOptimizer
from ray_workers.training.parallel.federated.engine import FederatedEngine
from ray_workers.training.parallel.optim.optimizer_step import OptimizerStep
from ray_workers.training.parallel.optim.optimizers import parameter_groups
from ray_workers.training.parallel.strategy import StrategyContext


class AdaptiveServerOptimizer(Optimizer):
    """FedAdam and FedYogi: unlike Adam without a correction of the first steps, and with variances
    that begin at the square of `tau`."""

    def __init__(self, groups: Any, options: ServerOptimizer, *, yogi: bool) -> None:
        super().__init__(groups, {"lr": options.lr, "betas": options.betas, "tau": options.tau})
        self._yogi = yogi

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        (beta_1, beta_2), tau = group["betas"], group["tau"]
        state = self.state[parameter]
        if not state:
            state["mean"] = torch.zeros_like(parameter)
            state["variance"] = torch.full_like(parameter, tau**2)
        mean, variance = state["mean"], state["variance"]
        mean.mul_(beta_1).add_(gradient, alpha=1 - beta_1)
        square = gradient.square()
        if self._yogi:
            sign = torch.sign(variance - square)
            variance.sub_(square.mul_(sign), alpha=1 - beta_2)
        else:
            variance.mul_(beta_2).add_(square, alpha=1 - beta_2)
        parameter.addcdiv_(mean, variance.sqrt().add_(tau), value=-group["lr"])


class ServerStep(OptimizerStep):
    """The server's step in each round that counts."""

    def __init__(
        self, given: StrategyContext, engine: FederatedEngine, federated: spec.Federated
    ) -> None:
        self._federated = federated
        self._engine = engine
        # The gradients that the document clips are the clients'.
        options = given.spec.train.model_copy(update={"max_grad_norm": None})
        super().__init__(given.workload.model, engine, options, given.device)

    @property
    def _is_adaptive(self) -> bool:
        return self._federated.algorithm in ("fedadam", "fedyogi")

    def _build_optimizer(self, model: nn.Module, options: spec.Optimizer) -> Optimizer:
        """The server's; `options` are the clients'."""
        federated = self._federated
        server = federated.server
        groups = parameter_groups(model, weight_decay=0.0)
        if self._is_adaptive:
            return AdaptiveServerOptimizer(groups, server, yogi=federated.algorithm == "fedyogi")
        return torch.optim.SGD(groups, lr=server.lr, momentum=server.momentum)

    def step(self, lr: float) -> Tensor:
        """By the server's rate; `lr` is the clients'."""
        if not self._engine.counts:
            norm = self._engine.grad_norm()
            self._engine.forget_gradients()
            return norm
        # The rate of an adaptive optimizer is no share of the update. Nor does a running variance
        # bear a rate above 1, by which it could fall below 0.
        rate = 1.0 if self._is_adaptive else min(1.0, self._federated.server.lr)
        self._engine.change_buffers(rate)
        return super().step(self._federated.server.lr)
